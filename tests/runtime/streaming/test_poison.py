"""Nothing that does not count can be told from the results: padding, unfilled memory, neighbours. Bits are compared.

First on the graphs alone, as anyone's loop may run them; then through `Stream`. Rolled memory has its rows in the last
slots; a ring has them before `head`, and beyond its slots those that a segment spills into.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from txl_runtime import Model, Stream, StreamState, load
from txl_runtime.host.placements import Ring

M, B, V = 7, 3, 60
KINDS: dict[str, dict[str, Any]] = {
    "ring, post-norm": {"config": {}},
    "ring, pre-norm": {"config": {"pre_lnorm": True, "attention_bias": True, "memory_start": "zeros"}},
    "kv, post-norm": {"config": {}, "update": "rolled"},
    "kv, pre-norm": {
        "config": {"pre_lnorm": True, "attention_bias": True, "memory_start": "zeros"},
        "update": "rolled",
    },
    "hidden, post-norm": {"config": {}, "memory": "hidden"},
    "hidden, pre-norm": {"config": {"pre_lnorm": True}, "memory": "hidden"},
}
kinds = pytest.mark.parametrize("kind", KINDS)
empty_at_first = pytest.mark.parametrize(
    "kind", [kind for kind, options in KINDS.items() if "memory_start" not in options["config"]]
)
segment_lengths = pytest.mark.parametrize("length", [4, 1])

IDS_OUT_OF_RANGE = [-1, -(2**31), V, 10**6, 2**31 - 1]
Named = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def models(make_bundle):
    """The loaded bundle of a kind."""
    opened: dict[str, Model] = {}

    def open_kind(kind: str) -> Model:
        if kind not in opened:
            options = {"batch_size": B, **KINDS[kind]}
            update = options.pop("update", None)
            opened[kind] = load(make_bundle(**options), update=update)
            assert opened[kind].update == ("ring" if kind.startswith("ring") else "rolled")
        return opened[kind]

    return open_kind


class Graph:
    """A program in ONNX Runtime, without the project's runtime around it."""

    def __init__(self, model: Model, length: int) -> None:
        self.states, self.length = model.manifest.states_of(model.update), length
        same_rule = [program for program in model.manifest.programs if program.update == model.update]
        (program,) = (program for program in same_rule if program.segment_length == length)
        path = model.bundle.file(program.file)
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.ring = self.states[0].slots
        self.slots = self.states[0].shape[self.states[0].row_axis]

    def run(self, inputs: Named) -> Named:
        return dict(zip(self.outputs, self.session.run(self.outputs, inputs), strict=True))

    def inputs(self, valid: list[int], fill: list[int]) -> Named:
        draws = np.random.default_rng(1)
        heads = {} if self.ring is None else {"head": draws.integers(0, self.ring, B).astype(np.int32)}
        return {
            "tokens": draws.integers(0, V, (B, self.length)).astype(np.int32),
            "valid": np.array(valid, np.int32),
            "fill": np.array(fill, np.int32),
            **heads,
        } | {state.input: draws.normal(size=state.shape).astype(np.float32) for state in self.states}

    def filled(self, inputs: Named, row: int) -> np.ndarray:
        """Slots of a sequence's memory before a step, oldest first."""
        fill = int(inputs["fill"][row])
        if self.ring is None:
            return np.arange(M - fill, M)
        head = int(inputs["head"][row])
        return np.arange(head - fill, head) % self.ring

    def filled_after(self, inputs: Named, row: int) -> np.ndarray:
        """Slots of a sequence's memory as a step leaves it, oldest first; spilled rows where they were written."""
        valid = int(inputs["valid"][row])
        fill = min(M, int(inputs["fill"][row]) + valid)
        if self.ring is None:
            return np.arange(M - fill, M)
        after = int(inputs["head"][row]) + valid
        slots = np.arange(after - fill, after)
        return np.where(slots < after - valid, slots % self.ring, slots)

    def unfilled(self, inputs: Named) -> np.ndarray:
        """Which slots hold no memory, bool [B, slots]."""
        return np.stack([~np.isin(np.arange(self.slots), self.filled(inputs, row)) for row in range(B)])

    def counted(self, inputs: Named, found: Named, rows: range | list[int] = range(B)) -> list[bytes]:
        """What counts of a step's outputs: valid rows, and the memory rows that are filled afterwards."""
        parts = []
        for row in rows:
            parts.append(found[self.outputs[0]][row, : inputs["valid"][row]])
            for state in self.states:
                slots = np.moveaxis(found[state.output], state.row_axis, 1)[row]
                parts.append(slots[self.filled_after(inputs, row)])
        assert all(np.isfinite(part).all() for part in parts)
        return [part.tobytes() for part in parts]


def situations(length: int) -> list[tuple[list[int], list[int]]]:
    """(valid, fill): full, partial and idle sequences on empty, half-filled and full memory."""
    valids = [[length, length // 2, 0], [0, 1, max(1, length - 1)]]
    return list(itertools.product(valids, [[0, 3, 6], [7, 0, 2], [1, 7, 0]]))


@kinds
@segment_lengths
def test_token_ids_in_padding_change_no_bit_of_a_graphs_results(models, kind, length):
    graph = Graph(models(kind), length)
    for valid, fill in situations(length):
        inputs = graph.inputs(valid, fill)
        expected = graph.counted(inputs, graph.run(inputs))
        padding = np.arange(length) >= inputs["valid"][:, None]
        assert padding.any()
        for poison in IDS_OUT_OF_RANGE:
            poisoned = inputs | {"tokens": np.where(padding, np.int32(poison), inputs["tokens"])}
            assert graph.counted(inputs, graph.run(poisoned)) == expected, f"{poison} at {valid}, {fill}"


@kinds
@segment_lengths
@pytest.mark.parametrize("poison", [0.0, 3.4e38, -3.4e38, "signs", "random"])
def test_finite_values_in_unfilled_memory_change_no_bit_of_a_graphs_results(models, kind, length, poison):
    graph = Graph(models(kind), length)
    draws = np.random.default_rng(2)
    for valid, fill in situations(length):
        inputs = graph.inputs(valid, fill)
        expected = graph.counted(inputs, graph.run(inputs))
        poisoned = dict(inputs)
        for state in graph.states:
            slots = np.moveaxis(inputs[state.input], state.row_axis, 1).copy()
            unfilled = graph.unfilled(inputs)
            assert unfilled.any()
            assert graph.ring is None or unfilled[:, graph.ring :].all(), "spilled rows are moved after every step"
            shape = slots[unfilled].shape
            slots[unfilled] = {
                "signs": draws.choice([-3.4e38, 3.4e38], shape),
                "random": draws.normal(size=shape) * 10.0 ** draws.uniform(-30, 30, shape),
            }.get(poison, poison)
            poisoned[state.input] = np.ascontiguousarray(np.moveaxis(slots, 1, state.row_axis))
        assert graph.counted(inputs, graph.run(poisoned)) == expected, f"{poison} at {valid}, {fill}"


@kinds
@segment_lengths
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_what_a_neighbours_memory_holds_changes_no_bit_of_a_graphs_results(models, kind, length, poison):
    graph = Graph(models(kind), length)
    for (valid, fill), ill in itertools.product(situations(length), range(B)):
        well = [row for row in range(B) if row != ill]
        inputs = graph.inputs(valid, fill)
        expected = graph.counted(inputs, graph.run(inputs), well)
        poisoned = dict(inputs)
        for state in graph.states:
            poisoned[state.input] = inputs[state.input].copy()
            poisoned[state.input][ill] = poison
        assert graph.counted(inputs, graph.run(poisoned), well) == expected, f"{poison} at {valid}, {fill}"


@kinds
@segment_lengths
def test_an_idle_sequence_gets_its_memory_back_bit_for_bit_whatever_it_holds(models, kind, length):
    graph = Graph(models(kind), length)
    for idle, held in itertools.product(range(B), [None, np.nan, 1e30]):
        valid = [0 if row == idle else length for row in range(B)]
        inputs = graph.inputs(valid, [4, 2, 7])
        for state in graph.states:
            if held is not None:
                inputs[state.input][idle] = held
        found = graph.run(inputs)
        for state in graph.states:
            before, after = (np.moveaxis(a, state.row_axis, 1) for a in (inputs[state.input], found[state.output]))
            kept = np.ones(graph.slots, bool)
            if graph.ring is not None:  # padding is written as well, where no memory is
                first = inputs["head"][idle]
                kept[first : first + length] = False
            assert kept[graph.filled(inputs, idle)].all()
            assert after[idle, kept].tobytes() == before[idle, kept].tobytes()
            assert after[(idle + 1) % B].tobytes() != before[(idle + 1) % B].tobytes()


@kinds
@segment_lengths
def test_what_does_count_changes_the_results(models, kind, length):
    """The other tests could not fail if a graph ignored its memory."""
    graph = Graph(models(kind), length)
    inputs, result = graph.inputs([length] * B, [3, 3, 3]), graph.outputs[0]
    expected = graph.run(inputs)[result]
    for state in graph.states:
        changed = np.moveaxis(inputs[state.input].copy(), state.row_axis, 1)
        for row in range(B):
            changed[row, graph.filled(inputs, row)[0]] *= np.linspace(-2, 2, changed.shape[-1], dtype=np.float32)
        found = graph.run(inputs | {state.input: np.ascontiguousarray(np.moveaxis(changed, 1, state.row_axis))})
        assert (np.abs(found[result] - expected).max(axis=(1, 2)) > 1e-6).all(), state.name


# --- through Stream -----------------------------------------------------------------------------------------------


def random_tokens(columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (B, columns)).astype(np.int32)


def all_bits(stream: Stream) -> list[bytes]:
    return [stream.fill.tobytes(), *(rows.tobytes() for rows in stream.memory().values())]


def with_memory_of(state: StreamState, row: int, value: float) -> StreamState:
    """The state with every filled value of one sequence replaced."""
    memory = {name: rows.copy() for name, rows in state.memory.items()}
    for rows in memory.values():
        rows[row, rows.shape[1] - state.fill[row] :] = value
    return replace(state, memory=memory)


@kinds
@pytest.mark.parametrize("columns", [1, 4, 10])
def test_token_ids_beyond_the_lengths_change_no_bit_of_a_streams_results(models, kind, columns):
    clean, poisoned = models(kind).stream(), models(kind).stream()
    for seed in range(3):
        tokens, lengths = random_tokens(columns, seed), np.roll([columns, columns // 2, 0], seed)
        padding = np.arange(columns) >= lengths[:, None]
        expected = clean.feed(tokens, lengths)
        ids = np.resize(np.array([*IDS_OUT_OF_RANGE, 2**62], np.int64), tokens.shape)
        assert poisoned.feed(np.where(padding, ids, tokens), lengths).tobytes() == expected.tobytes()
        assert all_bits(poisoned) == all_bits(clean)


@empty_at_first
@pytest.mark.parametrize("poison", [1e30, np.nan])
def test_what_a_state_holds_before_a_shorter_sequence_changes_no_bit(models, kind, poison):
    clean, poisoned = models(kind).stream(), models(kind).stream()
    clean.feed(random_tokens(6), [6, 2, 0])
    state = clean.snapshot()
    for rows in (state.memory[name] for name in state.memory):
        rows[1, :4] = rows[2] = poison
    poisoned.restore(state)
    for seed in range(1, 4):
        tokens = random_tokens(3, seed)
        assert poisoned.feed(tokens).tobytes() == clean.feed(tokens).tobytes()
        assert all_bits(poisoned) == all_bits(clean)


def poison_unfilled(stream: Stream, poison: Callable[[tuple[int, ...]], Any]) -> int:
    """Overwrite every slot that holds no memory; how many there were.

    Nothing public can put anything there, another engine might leave it.
    """
    (memory,), fill, poisoned = stream.loop.placements, stream.fill, 0
    for state in stream._states:
        ring = isinstance(memory, Ring)
        for array in [memory.tensors[state.name]] if ring else [side[state.name] for side in memory.sides]:
            slots = np.moveaxis(array, state.row_axis, 1)
            unfilled = np.ones(slots.shape[:2], bool)
            for row, count in enumerate(fill.tolist()):
                head = int(stream.loop.heads[row]) if ring else slots.shape[1]
                unfilled[row, np.arange(head - count, head) % (state.slots or M)] = False
            slots[unfilled] = poison(slots[unfilled].shape)
            poisoned += int(unfilled.sum())
    return poisoned


@empty_at_first
@pytest.mark.parametrize("poison", [3.4e38, -3.4e38])
def test_finite_values_in_unfilled_slots_change_no_bit_of_a_streams_results(models, kind, poison):
    clean, poisoned = models(kind).stream(), models(kind).stream()
    for stream in (clean, poisoned):
        stream.feed(random_tokens(4), [4, 2, 0])
    assert poison_unfilled(poisoned, lambda shape: poison)
    for seed in range(3):
        assert all_bits(poisoned) == all_bits(clean), "memory() is zero-padded whatever stands in unfilled slots"
        tokens, lengths = random_tokens(2, seed), np.roll([2, 1, 0], seed)
        assert poisoned.feed(tokens, lengths).tobytes() == clean.feed(tokens, lengths).tobytes()
    assert all_bits(poisoned) == all_bits(clean)
    assert poisoned.fill.min() < M


@kinds
@pytest.mark.parametrize("seed", range(3))
def test_unfilled_and_spill_slots_may_hold_anything_before_every_mixed_partial_segment(models, kind, seed):
    """From empty to many times round: before each call all that is no memory is overwritten."""
    draws = np.random.default_rng(seed)
    clean, poisoned = models(kind).stream(), models(kind).stream()

    def finite(shape: tuple[int, ...]) -> np.ndarray:
        return draws.choice([-1, 1], shape) * 10.0 ** draws.uniform(-38, 38, shape)

    heads = set()
    for _ in range(40):
        columns = int(draws.integers(1, 5))
        tokens, lengths = draws.integers(0, V, (B, columns)), draws.integers(0, columns + 1, B)
        poison_unfilled(poisoned, finite)
        padding = np.arange(columns) >= lengths[:, None]
        ids = np.where(padding, draws.choice(IDS_OUT_OF_RANGE, tokens.shape), tokens)
        assert poisoned.step(ids, lengths).tobytes() == clean.step(tokens, lengths).tobytes()
        assert all_bits(poisoned) == all_bits(clean)
        heads |= set(poisoned.snapshot().head.tolist())
    assert poisoned.fill.tolist() == [M] * B
    assert len(heads) == (11 if kind.startswith("ring") else 1), "the ring was entered at every slot"


@kinds
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_an_idle_sequence_of_anything_changes_no_bit_of_the_others(models, kind, poison):
    clean, sick = models(kind).stream(), models(kind).stream()
    clean.feed(random_tokens(6), [6, 6, 2])
    for ill in range(B):
        sick.restore(with_memory_of(clean.snapshot(), ill, poison))
        before = sick.snapshot()
        for seed, columns in enumerate((1, 4, 3)):
            lengths = np.full(B, columns)
            lengths[ill] = 0
            tokens = random_tokens(columns, seed)
            assert sick.feed(tokens, lengths).tobytes() == clean.feed(tokens, lengths).tobytes()
        assert (sick.fill == clean.fill).all()
        for name, rows in sick.memory().items():
            well = [row for row in range(B) if row != ill]
            assert rows[well].tobytes() == clean.memory()[name][well].tobytes()
            fill = before.fill[ill]
            assert rows[ill, rows.shape[1] - fill :].tobytes() == before.memory[name][ill, -fill:].tobytes()


@kinds
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("ill", range(B))
def test_an_ill_stream_infects_nobody_and_reset_cures_it(models, kind, poison, ill):
    well = [row for row in range(B) if row != ill]
    clean, sick = models(kind).stream(), models(kind).stream()
    clean.feed(random_tokens(6))
    sick.restore(with_memory_of(clean.snapshot(), ill, poison))
    for seed, columns in enumerate((1, 5, 4)):
        tokens = random_tokens(columns, seed)
        found, expected = sick.feed(tokens), clean.feed(tokens)
        assert np.isnan(found[ill]).all()
        assert found[well].tobytes() == expected[well].tobytes()
    clean.reset(rows=[ill])
    sick.reset(rows=[ill])
    assert all_bits(sick) == all_bits(clean)
    for seed, columns in enumerate((4, 1, 1, 9)):
        tokens = random_tokens(columns, seed)
        assert sick.feed(tokens).tobytes() == clean.feed(tokens).tobytes()
        assert all_bits(sick) == all_bits(clean)


@kinds
def test_restore_cures_an_ill_stream(models, kind):
    stream, clean = models(kind).stream(), models(kind).stream()
    for other in (stream, clean):
        other.feed(random_tokens(6), [6, 4, 1])
    state = stream.snapshot()
    ill = with_memory_of(state, 1, np.nan)
    stream.restore(ill)
    for _ in range(2):  # so that both of its buffers have held NaN
        assert np.isnan(stream.step(random_tokens(1))[1]).all()
    stream.restore(state)
    for seed in range(3):
        assert stream.feed(random_tokens(5, seed)).tobytes() == clean.feed(random_tokens(5, seed)).tobytes()
        assert all_bits(stream) == all_bits(clean)


@kinds
def test_dropping_an_ill_stream_leaves_nothing_of_it(models, kind):
    stream, clean = models(kind).stream(), models(kind).stream()
    clean.feed(random_tokens(6))
    stream.restore(with_memory_of(clean.snapshot(), 1, np.nan))
    for other in (stream, clean):
        other.feed(random_tokens(5, 1))
        other.select([2, 0])
    assert all_bits(stream) == all_bits(clean)
    tokens = random_tokens(9, 2)[:2]
    assert stream.feed(tokens).tobytes() == clean.feed(tokens).tobytes()
    for other in (stream, clean):
        other.select([0, 0, 1])
        other.reset(rows=[1])
    assert stream.feed(random_tokens(9, 3)).tobytes() == clean.feed(random_tokens(9, 3)).tobytes()
