"""Abilities: what a model may be asked for, by the tables of its bundle."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from frozen import frozen
from txl_runtime.bundle.abilities import Abilities
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.bundle.tables import Input

TOKENS = ("read_text", "feed_tokens", "score", "pair_tokens", "feed_freely")
"""Abilities of models of tokens, in which each line of the next table has a letter: y or n."""


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return decode_manifest((frozen("clusters") / "manifest.json").read_bytes(), "manifest.json")


def changed(manifest: Manifest, shape: tuple[Any, ...] = ("B", "L"), **more: Any) -> Manifest:
    """The manifest with tokens of a shape, and log-probabilities that have one axis more."""
    ahead, columns = more.pop("lookahead", 0), more.pop("columns", manifest.vocab_size)
    tokens, logprobs = manifest.tokens, manifest.logprobs
    rest = [entry for entry in manifest.inputs if entry.role != "tokens"]
    read = msgspec.structs.replace(tokens, shape=shape, lookahead=ahead)
    written = msgspec.structs.replace(logprobs, shape=(*shape, columns))
    return msgspec.structs.replace(manifest, **{"inputs": (read, *rest), "outputs": (written,), **more})


CASES = {
    "as a Transformer-XL": ({}, "yyyyy"),
    "positions first": ({"shape": ("L", "B")}, "yyynn"),
    "one token a step": ({"shape": ("B",)}, "yyynn"),
    "a look-ahead": ({"lookahead": 2}, "ynnyn"),
    "tokens in columns": ({"shape": ("B", "L", 2)}, "ynnnn"),
    "other columns than the vocabulary": ({"columns": 3}, "ynnnn"),
    "a state of whole segments": ({"commits": "segment"}, "yynyn"),
    "in lockstep": ({"streams": "lockstep"}, "yyyyn"),
    "exact lengths": ({"lengths": "exact"}, "yyyyn"),
    "no log-probabilities": ({"outputs": ()}, "nnnnn"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_tokens_can_be_fed_follows_from_the_tables(manifest: Manifest, case: str) -> None:
    changes, expected = CASES[case]
    can = changed(manifest, **changes).can
    assert "".join("ny"[getattr(can, name)] for name in TOKENS) == expected


def test_a_second_input_is_more_than_text(manifest: Manifest) -> None:
    more = Input(name="x", dtype="float32", shape=("B", 3), role="feature")
    can = msgspec.structs.replace(manifest, inputs=(*manifest.inputs, more)).can
    assert not any(getattr(can, name) for name in TOKENS)


def test_sequences_run_apart_ragged_and_alone(manifest: Manifest) -> None:
    can = manifest.can
    assert can is manifest.can
    assert isinstance(can, Abilities)
    assert can.run_apart
    assert can.run_fewer
    assert can.run_ragged
    assert can.run_single
    assert can.count_rows
    replace = msgspec.structs.replace
    assert not replace(manifest, streams="lockstep").can.run_apart
    assert not replace(manifest, streams="lockstep", joint=True).can.run_fewer
    assert not replace(manifest, lengths="exact").can.run_ragged
    assert not replace(manifest, counters={}).can.count_rows
    longer = tuple(program for program in manifest.programs if program.segment_length != 1)
    assert replace(manifest, lengths="exact").can.run_single == (1 in manifest.segment_lengths)
    assert not replace(manifest, lengths="exact", programs=longer).can.run_single
    assert replace(manifest, programs=longer).can.run_single
