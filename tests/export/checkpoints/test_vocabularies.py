"""Lists with fewer words than the model has tokens, and a bundle's vocabulary against its checkpoint's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import txl_export
from resealing import copied, reseal
from stand_ins.small_steps import window
from stand_ins.smallest import SMALLEST
from support import call_main, random_state, save_checkpoint
from txl_export.checkpoints.vocabularies import completed, word_vocabulary
from txl_export.options import ExportOptions
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import UsageError

WORDS = [f"w{number}" for number in range(10)]
LIST: dict[str, Any] = {"kind": "words", "symbols": [*WORDS, "<unk>"], "unknown": 10, "line_end": 3}
"""A list of 11 words, for a model of 12 tokens."""


def given(way: str, folder: Path) -> dict[str, Any]:
    """A model and a list that lacks a word, as they come to an export."""
    if way == "a checkpoint's own":
        return {"checkpoint_or_state": save_checkpoint(folder / "m.pt", SMALLEST, vocabulary=LIST)}
    if way == "a specification's":
        words = {"kind": "words", "symbols": WORDS}
        return {"checkpoint_or_state": replace(window(), vocabulary=words)}
    (folder / "words.txt").write_text("\n".join(LIST["symbols"]))
    return {"checkpoint_or_state": random_state(SMALLEST), "config": SMALLEST, "vocabulary": folder / "words.txt"}


@pytest.mark.parametrize("way", ["a file's", "a checkpoint's own", "a specification's"])
def test_a_list_with_fewer_words_than_the_model_has_tokens_is_refused(way: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        txl_export.export(out=tmp_path / "a.txl", segment_length=1, verify=False, **given(way, tmp_path))
    words, tokens = (10, 11) if way == "a specification's" else (11, 12)
    for part in (f"{words} words", f"{tokens} tokens", "--specials '<S>,…'", "--missing-words"):
        assert part in str(refused.value)
    assert not (tmp_path / "a.txl").exists()


@pytest.mark.parametrize(
    ("vocabulary", "options", "message"),
    [
        (LIST, {"specials": "<S>,<pad>"}, "11 words and --specials 2, the model 12 tokens, expected"),
        (LIST, {"specials": "w3"}, "--specials has 'w3'"),
        (LIST, {"specials": "<S>", "missing_words": True}, "11 words and --specials 1, the model 12 tokens, expected"),
        (
            LIST | {"symbols": [*WORDS, "<unk>", "<S>"]},
            {"missing_words": True},
            "for a list that lacks words; leave them out",
        ),
        (None, {"specials": "<S>"}, "for a list that lacks words; leave them out"),
        (LIST, {"specials": ["<S>"]}, "specials is .*, expected a text such as"),
    ],
)
def test_what_does_not_make_up_the_difference_is_refused(vocabulary, options, message, tmp_path: Path) -> None:
    file = save_checkpoint(tmp_path / "m.pt", SMALLEST, vocabulary=vocabulary)
    with pytest.raises(UsageError, match=message):
        txl_export.export(file, tmp_path / "a.txl", segment_length=1, verify=False, **options)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle with a word in front of its checkpoint's list, and the checkpoint."""
    folder = tmp_path_factory.mktemp("words")
    file = save_checkpoint(folder / "m.pt", SMALLEST, vocabulary=LIST)
    result = txl_export.export(file, folder / "m.txl", segment_length=1, specials="<S>")
    assert result.manifest.parity["vocabulary differing"] == 0
    return folder / "m.txl", file


def test_words_in_front_move_the_others_and_their_roles(exported, monkeypatch, capfd) -> None:
    bundle = open_bundle(exported[0])
    words: Any = bundle.vocabulary()
    assert words.symbols == ("<S>", *WORDS, "<unk>")
    assert (words.unknown, words.line_start, words.line_end, bundle.manifest.boundary_token) == (11, None, 4, 4)
    command: Any = bundle.manifest.provenance["command"]
    assert command["arguments"][-2:] == ["--specials", "<S>"]
    _, shown, _ = call_main(("inspect", exported[0]), monkeypatch, capfd)
    assert "12 words of 12 tokens" in shown


def test_words_in_front_of_a_plain_list_mean_what_they_mean_in_any_list() -> None:
    plain = word_vocabulary({"idx2sym": WORDS}, "a list")
    assert completed(plain, 11, ExportOptions(specials="<S>"), "a list") == word_vocabulary(
        {"idx2sym": ["<S>", *WORDS]}, "a list"
    )


def test_missing_words_leave_the_last_ids_without_one(tmp_path: Path, monkeypatch, capfd) -> None:
    target = tmp_path / "a.txl"
    txl_export.export(out=target, segment_length=1, verify=False, missing_words=True, **given("a file's", tmp_path))
    words: Any = open_bundle(target).vocabulary()
    assert words.symbols == (*LIST["symbols"],)
    _, shown, _ = call_main(("inspect", target), monkeypatch, capfd)
    assert "11 words of 12 tokens" in shown


def changed(bundle: Path, target: Path, vocabulary: dict[str, Any], **fields: Any) -> Path:
    """A copy of a bundle with a vocabulary and manifest of somebody else."""
    file = copied(bundle, target) / "vocabulary.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | vocabulary))
    return reseal(target, **fields)


@pytest.mark.parametrize(
    ("vocabulary", "fields", "told"),
    [
        ({"symbols": ["<S>", *WORDS[:5], "w6", "w5", *WORDS[7:], "<unk>"]}, {}, "id 6: bundle 'w6', checkpoint 'w5'"),
        ({"symbols": ["w", *WORDS, "<unk>"]}, {}, "id 0: bundle 'w', checkpoint '<S>'"),
        (LIST, {"boundary_token": 3}, "id 0: bundle 'w0', checkpoint '<S>'"),
        ({"lower_case": True}, {}, "lower_case: bundle True, checkpoint False"),
        ({}, {"boundary_token": 7}, "boundary_token: bundle 7, checkpoint 4"),
    ],
)
def test_what_differs_from_the_checkpoints_vocabulary_fails(vocabulary, fields, told, exported, tmp_path: Path) -> None:
    bundle, file = exported
    parity = txl_export.verify(changed(bundle, tmp_path / "b.txl", vocabulary, **fields), checkpoint=file, segments=2)
    assert [gate.name for gate in parity.gates if gate.passed is False] == ["vocabulary differing"]
    assert parity.gate_advice.startswith(told)


def test_verify_compares_words_with_a_checkpoint_or_a_file_and_says_where_it_did_not(
    exported, tmp_path: Path, monkeypatch, capfd
) -> None:
    bundle, file = exported
    code, shown, said = call_main(("verify", bundle, "--checkpoint", file, "--segments", 2), monkeypatch, capfd)
    assert code == 0, said
    assert "vocabulary not compared" not in shown
    assert "not compared: '<S>' in front of the words of the checkpoint (--specials)" in said
    (tmp_path / "words.txt").write_text("\n".join(["<S>", *WORDS, "unknown"]))
    asked = ("verify", bundle, "--vocabulary", tmp_path / "words.txt", "--segments", 2)
    code, _, said = call_main(asked, monkeypatch, capfd)
    assert code == 1
    assert "id 11: bundle '<unk>', words.txt 'unknown'" in said
    for verb in ("verify", "selftest"):
        code, shown, _ = call_main((verb, bundle), monkeypatch, capfd)
        assert code == 0
        assert "vocabulary not compared" in shown
    _, document, _ = call_main(("selftest", bundle, "--json"), monkeypatch, capfd)
    assert json.loads(document)["vocabulary"] == "not compared"


def test_a_boundary_that_the_export_was_given_is_no_difference(exported, tmp_path: Path) -> None:
    bundle, file = exported
    provenance = open_bundle(bundle).manifest.provenance
    arguments = ["m.pt", "--specials", "<S>", "--boundary-token", "7"]
    provenance = {**provenance, "command": {"arguments": arguments, "in_memory": []}}
    asked = changed(bundle, tmp_path / "b.txl", {}, boundary_token=7, provenance=provenance)
    assert txl_export.verify(asked, checkpoint=file, segments=2).passed


def test_a_byte_level_model_with_text_is_told_of_the_vocabulary_of_bytes(tmp_path: Path) -> None:
    config = SMALLEST | {"vocab_size": 256}
    (tmp_path / "held.txt").write_text("text")
    with pytest.raises(UsageError, match=r'--vocabulary FILE\.json .*\{"kind": "bytes"\}'):
        txl_export.export(random_state(config), tmp_path / "a.txl", config=config, text=tmp_path / "held.txt")
