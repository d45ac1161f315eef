"""Documents of folders and files: which there are, how they are called, and what is said of bad ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from txl_runtime.errors import UsageError

from txl_deploy.corpora.documents import Bad
from txl_deploy.corpora.sources import Corpus, is_corpus


def documents(path: Path, **options: object) -> list[tuple[str, object]]:
    """Name and content, or name and reason."""
    found = list(Corpus(path, **options).documents(lambda index, weight: False))  # type: ignore[arg-type]
    assert [each.index for each in found] == list(range(len(found)))
    return [(each.id, each.why if isinstance(each, Bad) else each.content) for each in found]


def lines(path: Path, *rows: str | bytes) -> Path:
    path.write_bytes(b"".join((row.encode() if isinstance(row, str) else row) + b"\n" for row in rows))
    return path


def test_a_folder_is_read_by_name(tmp_path: Path) -> None:
    for name, text in {"b.txt": "two", "a.md": "one", ".hidden": "no", "c/d.txt": "below", "c/e/f": "far"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    np.save(tmp_path / "aa.npy", np.arange(3))
    lines(tmp_path / "z.jsonl", '{"text": "line"}', '{"tokens": [1, 2]}')
    (tmp_path / "circle").symlink_to(tmp_path)
    found = documents(tmp_path)
    assert [name for name, _ in found] == ["a.md", "aa.npy", "b.txt", "z.jsonl:1", "z.jsonl:2"]
    assert found[0][1] == b"one"
    assert np.asarray(found[1][1]).tolist() == [0, 1, 2]
    assert [content for _, content in found[3:]] == [b"line", [1, 2]]
    assert Corpus(tmp_path).left_out == 2
    assert not is_corpus(tmp_path / "b.txt"), "one text"
    below = documents(tmp_path, recursive=True)
    assert [name for name, _ in below] == ["a.md", "aa.npy", "b.txt", "c/d.txt", "c/e/f", "z.jsonl:1", "z.jsonl:2"]


def test_a_folder_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    with pytest.raises(UsageError, match=r"holds no document, expected a document.*--recursive looks into its 1"):
        Corpus(tmp_path)


def test_lines_of_every_kind(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl",
        '{"text": "é", "id": "first", "more": {"text": 3}}',
        "",
        "  ",
        '{"tokens": [], "id": 7}',
        '{"id": null, "text": ""}',
    )
    assert documents(file) == [("first", "é".encode()), ("7", []), ("a.jsonl:5", b"")]
    file.write_text('{"body": "b", "text": "t"}')  # a last line without an end
    assert documents(file) == [("a.jsonl:1", b"t")]
    assert documents(file, named="body") == [("a.jsonl:1", b"b")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "cut', "expected a JSON object"),
        ("[1, 2]", "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        (b'{"text": "\xff"}', "expected a JSON object"),
        ('{"text": null}', "expected a JSON object"),
        ('{"tokens": [-1]}', "expected a JSON object"),
        ('{"tokens": [99999999999999999999999]}', "expected a JSON object"),
        ('{"body": "b"}', "has fields ['body'], expected one of text and tokens; name the field with --field"),
        ('{"text": "b", "tokens": [1]}', "has text and tokens, expected one of"),
        ('{"text": "' + "x" * 3000, "expected a JSON object"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path: Path, line: str | bytes, said: str) -> None:
    file = lines(tmp_path / "a.jsonl", '{"text": "before"}', line, '{"text": "behind"}')
    before, (name, why), behind = documents(file)
    assert (before[1], behind[1]) == (b"before", b"behind")
    assert name == "a.jsonl:2"
    assert str(why).startswith(f"{file}:2: ")
    assert said in str(why)
    assert len(str(why)) < 400 + len(str(file))


def test_what_is_done_is_not_read(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", '{"text": "a"}', "broken", "", '{"text": "b"}')
    (tmp_path / "b.txt").write_text("c")
    asked: list[int] = []

    def done(index: int, weight: int) -> bool:
        asked.append(weight)
        return index in (0, 1)

    assert [each.id for each in Corpus(tmp_path).documents(done)] == ["a.jsonl:4", "b.txt"]
    assert sum(asked) == file.stat().st_size - 1 + 1, "all but the empty line"


def test_files_that_cannot_be_read_are_bad_documents(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "c.npy").write_text("no array")
    np.save(tmp_path / "d.npy", np.ones(3))
    np.save(tmp_path / "e.npy", np.ones((2, 2), np.int32))
    (tmp_path / "f.txt").symlink_to("nowhere")
    (tmp_path / "g.txt").write_text("good")
    found = documents(tmp_path)
    for (name, why), said in zip(
        found, ("pipe", "expected an .npy", "float64 [3]", "int32 [2, 2]", "No such file"), strict=False
    ):
        assert str(tmp_path / name) in str(why)
        assert said in str(why)
    assert found[-1] == ("g.txt", b"good")
    assert len(Corpus(tmp_path).identity()) == 64
    with pytest.raises(UsageError, match=r"nothing\.jsonl: no such file, expected documents; check the path"):
        Corpus(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize("kind", ["pipe", "link to nothing"])
def test_a_file_of_documents_that_cannot_be_read_ends_the_run(tmp_path: Path, kind: str) -> None:
    """With one bad document in its place the documents behind it would have an index of their own in a later run."""
    if kind == "pipe":
        os.mkfifo(tmp_path / "a.jsonl")
    else:
        (tmp_path / "a.jsonl").symlink_to("nowhere")
    corpus = Corpus(tmp_path)
    for read in (corpus.identity, lambda: list(corpus.documents(lambda index, weight: False))):
        with pytest.raises(UsageError, match=r"a\.jsonl: .*(is a pipe|No such file)"):
            read()


def test_a_disk_that_fails_in_the_middle_of_a_text_gives_no_identity(tmp_path: Path) -> None:
    """Else one fault of a network disk would be in the results' first line, and no later run would match it."""
    (tmp_path / "a.txt").write_text("one")
    failing = mock.mock_open()
    failing.return_value.read.side_effect = OSError(5, "Input/output error")
    with (
        mock.patch.object(Path, "open", failing),
        pytest.raises(UsageError, match=r"a\.txt: breaks off .*Input/output error"),
    ):
        Corpus(tmp_path).identity()


def test_the_identity_is_of_names_and_contents_and_of_no_place(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "a.txt").write_text("one")
    (first / "b.txt").write_text("two")
    shutil.copytree(first, second)
    assert Corpus(first).identity() == Corpus(second).identity()
    (second / "b.txt").write_text("twp")
    assert Corpus(first).identity() != Corpus(second).identity()
    (second / "b.txt").write_text("two")
    (second / "b.txt").rename(second / "c.txt")
    assert Corpus(first).identity() != Corpus(second).identity()
