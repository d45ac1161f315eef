"""The file of results: whole lines, from which a run goes on whatever ended it, and nobody else's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from txl_runtime.errors import UsageError

from txl_deploy import terminal
from txl_deploy.corpora.results import Finished, Header, Results
from txl_deploy.corpora.totals import Scores, Totals, measures

HEADER = Header(
    model_id="ab" * 32,
    precision="fp32",
    segment_length=4,
    corpus="cd" * 32,
    boundary_token=None,
    field=None,
    weights="12" * 32,
    vocabulary="34" * 32,
)
OTHER = [
    ("model_id", "ef" * 32),
    ("precision", "fp16"),
    ("segment_length", 8),
    ("corpus", "ef" * 32),
    ("boundary_token", 0),
    ("field", "body"),
    ("weights", "ef" * 32),
    ("vocabulary", "ef" * 32),
    ("vocabulary", None),
]


def scores(index: int) -> Scores:
    return Scores(
        index=index, id=f"d{index}", tokens=index + 1, scored=index, nll=0.5 if index else None, scored_bytes=index
    )


def written(path: Path, count: int = 4) -> bytes:
    with Results(path, HEADER) as results:
        for index in range(count):
            results.add([scores(index)])
    return path.read_bytes()


def test_every_line_is_one_document(tmp_path: Path) -> None:
    first, *rest = written(tmp_path / "out.jsonl").splitlines()
    assert json.loads(first) == msgspec.to_builtins(HEADER)
    assert json.loads(first)["format"] == "txl-deploy.scores/1"
    assert [msgspec.json.decode(line, type=Scores) for line in rest] == [scores(index) for index in range(4)]


def test_a_file_torn_at_any_byte_goes_on_with_every_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_deploy.corpora.results.os.fsync", lambda descriptor: None)  # 1,000 of them take seconds
    whole, path = written(tmp_path / "whole.jsonl"), tmp_path / "torn.jsonl"
    begins = [0, *(place + 1 for place in range(len(whole)) if whole[place : place + 1] == b"\n")]
    for torn in range(len(whole) + 1):
        path.write_bytes(whole[:torn])
        with Results(path, HEADER, resume=True) as results:
            there = sum(begin <= torn for begin in begins) - 2  # without the header and the end of all
            assert len(results.finished) == max(there, 0)
            for index in range(4):
                if index not in results.finished:
                    results.add([scores(index)])
        assert path.read_bytes() == whole, f"torn at {torn}"


def test_zeros_that_a_power_cut_left_are_cut_off(tmp_path: Path) -> None:
    whole, path = written(tmp_path / "out.jsonl"), tmp_path / "out.jsonl"
    path.write_bytes(whole + b"\0" * 4096)
    with Results(path, HEADER, resume=True) as results:
        assert len(results.finished) == 4
    assert path.read_bytes() == whole


@pytest.mark.parametrize(("name", "value"), OTHER)
def test_results_of_another_run_are_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    before = written(tmp_path / "out.jsonl")
    asked = msgspec.structs.replace(HEADER, **{name: value})
    with pytest.raises(UsageError, match=f"out.jsonl: holds results of another run, {name} is .*, expected {value}"):
        Results(tmp_path / "out.jsonl", asked, resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_file_of_an_older_version_goes_on_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal.Messages, "stream", sys.stderr)
    first, *rest = written(tmp_path / "out.jsonl").splitlines(keepends=True)
    older = {name: value for name, value in json.loads(first).items() if name not in ("weights", "vocabulary")}
    before = msgspec.json.encode(older) + b"\n" + b"".join(rest)
    (tmp_path / "out.jsonl").write_bytes(before)
    with Results(tmp_path / "out.jsonl", HEADER, resume=True) as results:
        assert len(results.finished) == 4
    assert (tmp_path / "out.jsonl").read_bytes() == before
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "out.jsonl: was begun by version 0.8.0, so nothing tells whether weights and vocabulary are still the" in said
    )
    with pytest.raises(UsageError, match=r"corpus is cdcd.*, expected efef"):
        Results(tmp_path / "out.jsonl", msgspec.structs.replace(HEADER, corpus="ef" * 32), resume=True)


@pytest.mark.parametrize(
    "content",
    [
        b"my thesis",
        b'{"format": "other"}\n',
    ],
    ids=lambda content: str(content[:20]),
)
def test_a_file_that_holds_no_results_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "thesis").write_bytes(content)
    with pytest.raises(UsageError, match="holds no results of `txl-deploy score`"):
        Results(tmp_path / "thesis", HEADER, resume=True)
    assert (tmp_path / "thesis").read_bytes() == content


@pytest.mark.parametrize("line", [b"{}", b"nonsense", b'{"index": -1, "id": "a"}', b'{"index": 2, "id": "d2"}'])
def test_a_damaged_line_is_named_and_the_file_kept(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "out.jsonl"
    before = written(path) + line + b"\n"
    path.write_bytes(before)
    with pytest.raises(UsageError, match=r"out\.jsonl:6: "):
        Results(path, HEADER, resume=True)
    assert path.read_bytes() == before


DAMAGES: dict[str, dict[str, object]] = {
    "an index below 0": {"index": -1},
    "tokens below 0": {"tokens": -1},
    "scored below 0": {"scored": -5},
    "more scored than there are": {"scored": 10},
    "scored bytes below 0": {"scored_bytes": -1},
    "unknown words below 0": {"unknown_words": -1},
    "more unknown words than there are": {"unknown_words": 10},
    "a mean of nothing": {"scored": 0},
    "a mean that is no number": {"nll": 1e309},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_numbers_that_no_run_writes_are_refused_and_the_file_kept(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "out.jsonl"
    said = msgspec.to_builtins(scores(8)) | DAMAGES[damage]
    before = written(path) + json.dumps(said).replace("Infinity", "1e309").encode() + b"\n"
    path.write_bytes(before)
    with pytest.raises(UsageError, match=r"out\.jsonl:6: .*; the file is damaged: take the line out, or begin anew"):
        Results(path, HEADER, resume=True)
    assert path.read_bytes() == before


def test_a_document_that_the_corpus_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path)
    with Results(path, HEADER, resume=True) as results:
        results.check_count(4)
        with pytest.raises(
            UsageError, match=r"out\.jsonl: holds a result of document 3, and the corpus has 3; the file"
        ):
            results.check_count(3)


def test_a_file_is_replaced_when_that_is_asked_for_and_else_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    before = written(path)
    with pytest.raises(UsageError, match="is there already, expected a new file; --resume goes on, --force"):
        Results(path, HEADER)
    with pytest.raises(ValueError, match="no backend"), Results(path, HEADER, force=True):
        raise ValueError("no backend")
    assert path.read_bytes() == before, "kept until there is something else to write"
    with Results(path, HEADER, force=True) as results:
        assert len(results.finished) == 0
        results.add([scores(2)])
        assert path.read_bytes().splitlines()[1:] == [before.splitlines()[3]]
    with Results(path, HEADER, force=True):
        pass
    assert path.read_bytes() == before.splitlines(keepends=True)[0]


def test_a_power_cut_costs_seconds_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk was waited for, with the length that the file had."""
    path, now, through = tmp_path / "out.jsonl", [0.0], list[int]()
    monkeypatch.setattr("txl_deploy.corpora.results.time.monotonic", lambda: now[0])
    monkeypatch.setattr("txl_deploy.corpora.results.os.fsync", lambda file: through.append(os.fstat(file).st_size))
    with Results(path, HEADER) as results:
        for index in range(12):
            results.add([scores(index)])
            now[0] += 1
            if index == 6:
                assert through == [path.stat().st_size]
        assert len(through) == 1
    assert set(through[1:]) == {path.stat().st_size}, "whatever ends a run, its results are on the disk"


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    with (
        Results(tmp_path / "out.jsonl", HEADER),
        pytest.raises(UsageError, match=r"out\.jsonl: another run writes to it"),
    ):
        Results(tmp_path / "out.jsonl", HEADER, resume=True)


@pytest.mark.parametrize("place", ["/dev/null", ".", "missing/out.jsonl", "a\0b"])
def test_a_place_that_takes_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    for options in ({}, {"resume": True}, {"force": True}):
        with pytest.raises(UsageError, match="expected a"):
            Results(Path(place), HEADER, **options)


@given(st.permutations(range(40)))
def test_what_is_finished_is_known_in_any_order(order: list[int]) -> None:
    finished = Finished()
    for count, index in enumerate(order):
        assert index not in finished
        finished.add(index)
        assert index in finished
        assert len(finished) == count + 1
    assert 40 not in finished


def test_totals_are_means_over_tokens() -> None:
    totals = Totals()
    parts = [(3, 4.5), (10, 12.0), (0, 0.0)]
    for index, (scored, total) in enumerate(parts):
        found = measures(total, scored, scored)
        totals.add(Scores(index=index, id="", tokens=scored + 1, scored=scored, nll=found["nll"], scored_bytes=scored))
    totals.add(Scores(index=3, id="", error="broken"))
    document = totals.document()
    assert document["nll"] == pytest.approx(16.5 / 13)
    assert document["perplexity"] == pytest.approx(np.exp(16.5 / 13))
    assert document["bits_per_byte"] == document["bits_per_token"] == pytest.approx(16.5 / 13 / np.log(2))
    assert (document["tokens"], document["scored_tokens"], document["documents"], document["skipped"]) == (16, 13, 3, 1)


@pytest.mark.parametrize("more", [{"scored_bytes": None}, {"scored_bytes": 5, "unknown_words": 1}])
def test_there_is_nothing_to_say_of_bytes_that_the_ids_do_not_hold(more: dict[str, int | None]) -> None:
    totals = Totals()
    totals.add(Scores(index=0, id="", tokens=6, scored=5, nll=1.0, scored_bytes=5))
    totals.add(Scores(index=1, id="", tokens=6, scored=5, nll=1.0, **more))  # type: ignore[arg-type]
    assert totals.document()["bits_per_byte"] is None
    assert Totals().document()["nll"] is None
