"""`export --lookup`: a segment of up to five tokens gives what as many single steps give, in every form of memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support import random_state, small_config
from txl_export.families.transformer_xl import family
from txl_export.families.transformer_xl.facts import facts
from txl_export.families.transformer_xl.family import PreparedModel, prepare
from txl_export.families.transformer_xl.tables import expected_programs
from txl_export.families.transformer_xl.weights import model_id
from txl_export.options import ExportOptions
from txl_runtime import Stream, load
from txl_runtime.bundle.encoding import canonical_json
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.transformer_xl import Dialect
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.listener import Listener, Silent

SAME = 1e-5
"""Largest difference of log-probabilities and memory that is rounding."""
B, M = 2, 7
SIZES: dict[str, Any] = {"batch_size": B, "segment_length": [16, 1], "verify": False}


class Heard(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture(scope="module")
def bundles(kept_bundles: Callable[..., Path]) -> dict[bool, Path]:
    """With --lookup and without."""
    return {lookup: kept_bundles(**SIZES, **({"lookup": True} if lookup else {})) for lookup in (True, False)}


def difference(stream: Stream, tokens: np.ndarray, before: int, lengths: list[int]) -> float:
    """Between one segment and single steps, of log-probabilities and memory, `before` tokens behind the start."""
    if before:
        stream.feed(tokens[:, :before])
    start, (length, counts) = stream.snapshot(), (max(lengths), np.asarray(lengths))
    segment = stream.step(tokens[:, before : before + length], counts)
    memory = stream.memory()
    stream.restore(start)
    steps = [stream.step(tokens[:, before + at, None], (counts > at).astype(int)) for at in range(length)]
    found = [np.abs(segment - np.concatenate(steps, 1)).max()]
    return float(max(found + [np.abs(memory[name] - rows).max() for name, rows in stream.memory().items()]))


@pytest.mark.parametrize("update", ["ring", "rolled"])
@pytest.mark.parametrize("before", [0, 3, M, 150])
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_a_segment_is_as_many_steps_while_memory_fills_and_long_after(bundles, update, before, length):
    tokens = np.random.default_rng(length).integers(0, 60, (B, before + length))
    assert difference(load(bundles[True], "cpu", update=update).stream(), tokens, before, [length] * B) <= SAME


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_short_sequence_beside_a_long_one_is_as_many_steps(bundles, update):
    """The program is that of 16: the sequence's count decides, and not the program's length."""
    tokens = np.random.default_rng(0).integers(0, 60, (B, 30))
    stream = load(bundles[True], "cpu", update=update).stream()
    stream.feed(tokens[:, :20])
    start = stream.snapshot()
    beside = stream.step(tokens[:, 20:], np.array([10, 4]))[1, :4]
    stream.restore(start)
    alone = stream.step(tokens[:, 20:24], np.array([0, 4]))[1]
    assert np.abs(beside - alone).max() <= SAME


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_without_it_a_segment_sees_more_than_steps_do(bundles, update):
    tokens = np.random.default_rng(0).integers(0, 60, (B, 20))
    stream = load(bundles[False], "cpu", update=update).stream()
    assert difference(stream, tokens, 15, [5] * B) > 100 * SAME


@pytest.mark.parametrize("last", [6, 16])
def test_longer_segments_stay_what_they_were(bundles, last):
    """48 tokens by segments of 16, and a segment of 6, the shortest, or of 16 once memory is full."""
    tokens = np.random.default_rng(0).integers(0, 60, (B, 48 + last))
    with_it, without = (load(bundles[lookup], "cpu").stream().feed(tokens) for lookup in (True, False))
    assert np.abs(with_it - without).max() <= SAME


def test_the_manifest_says_so_and_names_a_function_of_its_own(bundles):
    with_it, without = (open_bundle(bundles[lookup]).manifest for lookup in (True, False))
    assert [with_it.segment_lengths, without.segment_lengths] == [(16, 5, 1), (16, 1)]
    assert [with_it.stepwise, without.stepwise] == [5, 1]
    assert [with_it.reach, without.reach] == [(2 - 1) * 16 + M + 16] * 2
    assert with_it.model_id != without.model_id
    said = [facts(manifest)["positions"] for manifest in (with_it, without)]
    assert ["5 tokens at once as single ones" in positions for positions in said] == [True, False]


def test_a_context_of_short_segments_alone_is_that_of_a_window():
    found = prepared(lookup=True, segment_length=1).builder.manifest([])
    assert (found.reach, found.stepwise) == (2 * M + 5, 5)


def test_a_model_without_it_is_called_as_before():
    found = prepared().builder
    known = {"config": found.config, "dialect": found.dialect, "memory_length": M}
    told = canonical_json(known, drop=("family", "single_steps"))
    assert model_id(found.config, found.dialect, M, {}) == hashlib.sha256(told).hexdigest()
    assert msgspec.json.decode(b'{"family": "txl", "window": 3}', type=Dialect).single_steps is None


# ---- options


def prepared(heard: Listener | None = None, changes: dict[str, Any] | None = None, **options: Any) -> PreparedModel:
    config = small_config(**changes or {})
    return prepare(random_state(config), ExportOptions(config=config, **options), heard or Silent())


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {"memory": "hidden"}, "--lookup is given with --memory hidden, expected a memory of keys and values"),
        ({}, {"memory_length": 0}, "--lookup is given with --memory-length 0, expected"),
        ({"attn_type": 2}, {}, "--lookup is given with a model of attn_type 2, whose memory holds positions, expected"),
        ({"attn_type": 3, "position_rows": 70}, {}, "a model of attn_type 3"),
    ],
)
def test_what_keeps_no_part_of_a_segment_is_refused_by_name(changes, options, said):
    with pytest.raises(UsageError, match=said) as refused:
        prepared(changes=changes, lookup=True, **options)
    assert str(refused.value).endswith("can be kept; leave one of them out")


def test_a_window_needs_none_but_gets_the_length():
    heard = Heard()
    found = prepared(heard, lookup=True, same_length=True)
    assert found.builder.dialect == prepared(same_length=True).builder.dialect
    assert found.builder.sizes.segment_lengths == (64, 5, 1)
    assert "with a window of 7 keys a segment gives what single steps give: --lookup adds L 5 alone" in heard.lines


def test_a_rule_that_is_wrong_is_no_bundle(monkeypatch, tmp_path):
    """The rule is tried with the reference at every export that verifies."""
    found = prepared(segment_length=[8, 1])
    monkeypatch.setattr(family, "verify_models", lambda *_: None)
    builder = found.builder
    updates, sizes = ("ring", "rolled"), builder.sizes
    made = expected_programs(builder.config, builder.manifest([]).states, 1, sizes.segment_lengths, updates)
    right = builder.manifest(made)
    assert found.verify(tmp_path, right, Silent()) is None
    with pytest.raises(CheckError, match="segments of 1 tokens give what single steps give, expected up to 8 by the"):
        found.verify(tmp_path, msgspec.structs.replace(right, stepwise=8), Silent())
