"""The token that separates texts: what the vocabulary knows, what is asked for, and where it is told."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import txl_export
import txl_runtime
from support import call_main, random_state, save_checkpoint, small_config
from txl_export.checkpoints.vocabularies import boundary_of
from txl_runtime.errors import UsageError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"kind": "words", "symbols": ["a", "<eos>", "b"], "line_end": 1}, 1),
        ({"kind": "words", "symbols": ["<S>", "a", "b"], "line_start": 0, "line_end": 0}, 0),
        ({"kind": "words", "symbols": ["a", "b", "<eos>"]}, 2),
        ({"kind": "words", "symbols": ["<s>", "a", "b"], "line_start": 0}, 0),
        ({"kind": "words", "symbols": ["a", "b", "c"]}, None),
    ],
)
def test_word_vocabularies_know_their_boundary(words, expected):
    assert boundary_of(msgspec.json.encode(words), 3) == expected


def test_bytes_have_no_boundary():
    assert boundary_of(b'{"kind": "bytes"}', 256) is None


def test_the_vocabulary_of_the_checkpoint_sets_it_and_inspect_shows_it(tmp_path, monkeypatch, capfd):
    symbols = ["<eos>", *(f"w{number}" for number in range(59))]
    words = {"kind": "words", "symbols": symbols, "unknown": None, "line_end": 0}
    file = save_checkpoint(tmp_path / "words.pt", small_config(vocab_size=60), vocabulary=words)
    out = tmp_path / "words.txl"
    txl_export.export(file, out, segment_length=4, verify=False)
    assert txl_runtime.load(out).manifest.boundary_token == 0
    _, document, _ = call_main(("inspect", out, "--json"), monkeypatch, capfd)
    assert json.loads(document)["boundary_token"] == 0
    _, shown, _ = call_main(("inspect", out), monkeypatch, capfd)
    assert [line.split() for line in shown.splitlines() if line.startswith("boundary")] == [["boundary", "token", "0"]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (60, "boundary_token is 60, expected an id of 0 … 59; check --boundary-token"),
        (-1, "boundary_token is -1, expected a token id of 0 …; check --boundary-token"),
        (True, "boundary_token is True, expected a token id"),
        ("a", "boundary_token is 'a', expected a token id"),
    ],
)
def test_what_is_no_id_of_the_model_is_refused(given, message, tmp_path: Path) -> None:
    config = small_config(vocab_size=60)
    with pytest.raises(UsageError) as refused:
        txl_export.export(random_state(config), tmp_path / "a.txl", config=config, boundary_token=given, verify=False)
    assert message in str(refused.value)
    assert not (tmp_path / "a.txl").exists()
