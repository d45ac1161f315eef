"""Nothing that does not count can be told from a stream's results, to the bit: padding, unfilled memory, neighbours.

Rolled memory has its rows in the last slots; a ring has them before `head`, and beyond its slots those that a segment
spills into. That graphs keep to it, their own tests say, and every export's verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from frozen import FORMS, KEPT, opened
from txl_runtime import Stream, StreamState
from txl_runtime.host.placements import Ring

kinds = pytest.mark.parametrize("kind", KEPT)
IDS_OUT_OF_RANGE = [-1, -(2**31), 41, 10**6, 2**31 - 1]


def pair(kind: str) -> tuple[Stream, Stream]:
    return opened(kind).stream(), opened(kind).stream()


def random_tokens(stream: Stream, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 41, (stream.batch_size, columns)).astype(np.int32)


def all_bits(stream: Stream) -> list[bytes]:
    return [stream.fill.tobytes(), *(rows.tobytes() for rows in stream.memory().values())]


def with_memory_of(state: StreamState, row: int, value: float) -> StreamState:
    """The state with every filled value of one sequence replaced."""
    memory = {name: rows.copy() for name, rows in state.memory.items()}
    for rows in memory.values():
        rows[row, rows.shape[1] - state.fill[row] :] = value
    return replace(state, memory=memory)


@kinds
def test_token_ids_beyond_the_lengths_change_no_bit(kind):
    clean, poisoned = pair(kind)
    for seed, columns in enumerate((1, 4, 10)):
        tokens = random_tokens(clean, columns, seed)
        lengths = np.roll([columns, columns // 2, 0], seed)[: clean.batch_size]
        padding = np.arange(columns) >= lengths[:, None]
        expected = clean.feed(tokens, lengths)
        ids = np.resize(np.array([*IDS_OUT_OF_RANGE, 2**62], np.int64), tokens.shape)
        assert poisoned.feed(np.where(padding, ids, tokens), lengths).tobytes() == expected.tobytes()
        assert all_bits(poisoned) == all_bits(clean)


@pytest.mark.parametrize("kind", ["ring", "rolled", "hidden"])
def test_what_a_state_holds_before_a_shorter_sequence_changes_no_bit(kind):
    clean, poisoned = pair(kind)
    clean.feed(random_tokens(clean, 6), [6, 2, 0][: clean.batch_size])
    state = clean.snapshot()
    for rows in state.memory.values():
        rows[1, :4] = rows[2:] = np.nan
    poisoned.restore(state)
    for seed in range(1, 4):
        tokens = random_tokens(clean, 3, seed)
        assert poisoned.feed(tokens).tobytes() == clean.feed(tokens).tobytes()
        assert all_bits(poisoned) == all_bits(clean)


def poison_unfilled(stream: Stream, poison: Callable[[tuple[int, ...]], Any]) -> None:
    """Overwrite every slot that holds no memory, as nothing public can, but another engine might."""
    (memory,), fill = stream.loop.placements, stream.fill
    for state in stream._states:
        ring = isinstance(memory, Ring)
        for array in [memory.tensors[state.name]] if ring else [side[state.name] for side in memory.sides]:
            slots = np.moveaxis(array, state.row_axis, 1)
            unfilled = np.ones(slots.shape[:2], bool)
            for row, count in enumerate(fill.tolist()):
                head = int(stream.loop.heads[row]) if ring else slots.shape[1]
                unfilled[row, np.arange(head - count, head) % (state.slots or slots.shape[1])] = False
            slots[unfilled] = poison(slots[unfilled].shape)


@kinds
def test_unfilled_and_spill_slots_may_hold_anything_before_every_mixed_partial_segment(kind):
    """From empty to many times round: before each call all that is no memory is overwritten."""
    draws, heads = np.random.default_rng(0), set[int]()
    clean, poisoned = pair(kind)

    def finite(shape: tuple[int, ...]) -> np.ndarray:
        return draws.choice([-1, 1], shape) * 10.0 ** draws.uniform(-38, 38, shape)

    for _ in range(40):
        columns, b = int(draws.integers(1, 5)), clean.batch_size
        tokens, lengths = draws.integers(0, 41, (b, columns)), draws.integers(0, columns + 1, b)
        poison_unfilled(poisoned, finite)
        padding = np.arange(columns) >= lengths[:, None]
        ids = np.where(padding, draws.choice(IDS_OUT_OF_RANGE, tokens.shape), tokens)
        assert poisoned.step(ids, lengths).tobytes() == clean.step(tokens, lengths).tobytes()
        assert all_bits(poisoned) == all_bits(clean), "memory() is zero-padded whatever stands in unfilled slots"
        heads |= set(poisoned.snapshot().head.tolist())
    assert poisoned.fill.min() == opened(kind).memory_length
    assert len(heads) == (10 if FORMS[kind][1] == "ring" else 1), "the ring was entered at every slot"


@kinds
@pytest.mark.parametrize("poison", [np.nan, 3e38])
def test_an_idle_sequence_of_anything_changes_no_bit_of_the_others(kind, poison):
    clean, sick = pair(kind)
    clean.feed(random_tokens(clean, 6), [6, 6, 2][: clean.batch_size])
    for ill in range(clean.batch_size):
        sick.restore(with_memory_of(clean.snapshot(), ill, poison))
        before, well = sick.snapshot(), [row for row in range(clean.batch_size) if row != ill]
        for seed, columns in enumerate((1, 4, 3)):
            lengths = np.where(np.arange(clean.batch_size) == ill, 0, columns)
            tokens = random_tokens(clean, columns, seed)
            assert sick.feed(tokens, lengths).tobytes() == clean.feed(tokens, lengths).tobytes()
        assert (sick.fill == clean.fill).all()
        for name, rows in sick.memory().items():
            assert rows[well].tobytes() == clean.memory()[name][well].tobytes()
            fill = before.fill[ill]
            assert rows[ill, rows.shape[1] - fill :].tobytes() == before.memory[name][ill, -fill:].tobytes()


@kinds
@pytest.mark.parametrize("ill", [0, 1])
def test_an_ill_sequence_infects_nobody_and_reset_or_restore_cures_it_or_it_is_dropped(kind, ill):
    clean, sick = pair(kind)
    well = [row for row in range(clean.batch_size) if row != ill]
    clean.feed(random_tokens(clean, 6))
    start = clean.snapshot()
    for cure in ("reset", "restore", "select"):
        clean.restore(start)
        sick.restore(with_memory_of(start, ill, np.nan))
        for seed, columns in enumerate((1, 1, 5, 4)):  # so that both of its buffers have held NaN
            tokens = random_tokens(clean, columns, seed)
            found, expected = sick.feed(tokens), clean.feed(tokens)
            assert np.isnan(found[ill]).all()
            assert found[well].tobytes() == expected[well].tobytes()
        for stream in (clean, sick):
            if cure == "reset":
                stream.reset(rows=[ill])
            elif cure == "restore":
                stream.restore(start)
            else:
                stream.select(well)
                stream.select([*range(len(well)), 0])
        for seed, columns in enumerate((4, 1, 1, 9)):
            assert all_bits(sick) == all_bits(clean)
            tokens = random_tokens(clean, columns, seed)
            assert sick.feed(tokens).tobytes() == clean.feed(tokens).tobytes()
