"""Steps of one's own that leave B open: what is computed, and that it is what a bundle of a fixed B computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from opcodes import bits, interrupted_at
from step_models import FEATURES, VOCABULARY, B, Graph, StepModel, counting, recurrent, state
from support import Counted
from txl_runtime import BundleError, Model, load
from txl_runtime.bundle.tables import Input, Output
from txl_runtime.host.loop import HostLoop

WIDTH = 4


def layered(lengths: tuple[int, ...] = (3, 1)) -> StepModel:
    """Two layers with the batch second, and inputs and outputs with the time first: nothing of few sequences is in one
    piece.
    """
    model = StepModel(
        inputs=(
            Input(name="x", dtype="float32", shape=("L", "B", WIDTH), role="feature"),
            Input(name="valid", dtype="int32", shape=("B",), role="valid"),
        ),
        outputs=(Output(name="y", dtype="float32", shape=(2, "L", "B", WIDTH)),),
        states=(state("h", (2, B, WIDTH), 1, initial=0.5), state("n", (B,), 0, "int32")),
    )
    mix = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    for length in lengths:
        graph = Graph()
        live = graph.add("Greater", ["valid", graph.constant(0, np.int32)])
        wide = graph.add("Unsqueeze", [live, graph.constant([0, 2], np.int64)])
        sums = graph.add("ReduceSum", ["x", graph.constant([0], np.int64)], keepdims=1)
        after = graph.add("Tanh", [graph.add("Add", [graph.add("MatMul", ["state.h.in", graph.constant(mix)]), sums])])
        graph.add("Where", [wide, after, "state.h.in"], "state.h.out")
        held = graph.add("Unsqueeze", [after, graph.constant([1], np.int64)])
        graph.add("Add", [held, graph.add("Unsqueeze", ["x", graph.constant([0], np.int64)])], "y")
        one = graph.add("Cast", [live], to=TensorProto.INT32)
        graph.add("Add", ["state.n.in", one], "state.n.out")
        model.add(f"step-{length}", length, graph)
    return model


KINDS = {"recurrent": recurrent, "counting": counting, "layered": layered}
every = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The model of a kind, with B open or fixed."""
    models: dict[Any, Model] = {}

    def open_one(kind: str, open_batch: bool = True) -> Model:
        if (kind, open_batch) not in models:
            made = KINDS[kind]()
            path = (made.leave_open() if open_batch else made).write(tmp_path_factory.mktemp("own") / "own.txl")
            models[kind, open_batch] = load(path, backend="cpu", threads=1)
        return models[kind, open_batch]

    return open_one


def segment(kind: str, draws: np.random.Generator, b: int = B) -> tuple[dict[str, np.ndarray], int]:
    """Inputs of b sequences, and their positions."""
    columns = int(draws.choice([1, 3 if kind == "layered" else 4]))
    if kind == "recurrent":
        obs = draws.normal(size=(b, columns, FEATURES)).astype(np.float32)
        return {"obs": obs, "starts": draws.random(b) < 0.3}, columns
    if kind == "layered":
        return {"x": draws.normal(size=(columns, b, WIDTH)).astype(np.float32)}, columns
    return {"tokens": draws.integers(0, VOCABULARY, (b, columns))}, columns


def part(model: Model, given: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    """One sequence's inputs or outputs, as one of its own."""
    entries = (*model.manifest.inputs, *model.manifest.outputs)
    axes = {entry.name: entry.axes.batch for entry in entries}
    return {name: np.take(array, [row], axes[name]) for name, array in given.items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Engines may round otherwise for other numbers of sequences."""
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=2e-6, err_msg=name)


def counting_loop(model: Model) -> tuple[HostLoop, Counted]:
    backend: Any = model.backend
    engine = Counted(backend.engine)
    return HostLoop(model.manifest, engine, model.update, backend.programs, model._initial), engine


@pytest.mark.parametrize(
    ("kind", "counts", "rows"),
    [
        ("recurrent", [1], [1]),
        ("counting", [0, 0], []),
        ("layered", [1, 0, 0], [1]),
        ("layered", [0, 1, 0], [2]),
        ("recurrent", [1, 0, 1], [3]),
    ],
)
def test_what_is_computed_ends_with_the_last_sequence_that_runs(opened, kind, counts, rows):
    loop, engine = counting_loop(opened(kind))
    given, columns = segment(kind, np.random.default_rng(0), len(counts))
    loop.run(given, np.array(counts, np.int32) * columns)
    assert engine.rows == rows
    fixed, engine = counting_loop(opened(kind, open_batch=False))
    fixed.run(given, np.array(counts, np.int32) * columns)
    assert engine.rows == [B] * len(rows)


@every
def test_sequences_that_come_and_go_get_what_a_fixed_b_gives_and_what_each_gets_alone(opened, kind):
    """Different sequences run in every segment, and a different number is computed; rows are reset and moved."""
    model, fixed, draws = opened(kind), opened(kind, open_batch=False), np.random.default_rng(3)
    together, all_of_them = model.stream(), fixed.stream()
    alone = [model.stream(1) for _ in range(B)]
    seen = set()
    for number in range(60):
        given, columns = segment(kind, draws)
        live = draws.random(B) < [0.8, 0.5, 0.3]
        counts = np.where(live, columns, 0)
        if kind == "counting":
            counts = np.where(live, draws.integers(1, columns + 1, B), 0)
        commit = bool(draws.random() < 0.8)
        seen.add((tuple(live.tolist()), commit))
        found = together.run(given, counts, commit=commit)
        same(found, all_of_them.run(given, counts, commit=commit))
        for row in np.flatnonzero(live):
            one = alone[row].run(part(model, given, row), counts[row : row + 1], commit=commit)
            same(part(model, found, row), one)
        if number % 7 == 3:
            order = draws.permutation(B).tolist()
            for stream in (together, all_of_them):
                stream.select(order)
            alone = [alone[row] for row in order]
        if number % 7 == 4:
            for stream in (together, all_of_them):
                stream.reset([number % B])
            alone[number % B].reset()
        if number % 7 == 5:
            row, to = draws.permutation(B)[:2].tolist()
            kept = together.take(row)
            for stream in (together, all_of_them):
                stream.put(to, kept)
            alone[to].put(0, kept)
        same(together.state(), all_of_them.state())
    assert len(seen) > 10, "with and without a commit, in most of their ways"


@every
def test_nothing_reaches_a_result_from_sequences_that_are_not_computed(opened, kind):
    """Their states on either side, their inputs and their last results are spoiled."""
    model, draws = opened(kind), np.random.default_rng(1)
    clean, spoiled = model.stream(), model.stream()
    for _ in range(4):
        given, columns = segment(kind, draws)
        for stream in (clean, spoiled):
            stream.run(given, np.full(B, columns))
    loop: Any = spoiled.loop
    (placement,) = loop.placements
    for array, entry in ((side[s.name], s) for side in placement.sides for s in model.manifest.states):
        array[entry.axes.at(slice(2, None))] = np.nan if array.dtype == np.float32 else 99
    for taken, returned in loop._arrays.values():
        for array in (*taken.values(), *returned.values()):
            array[...] = np.nan if array.dtype == np.float32 else 3
    for number in range(6):
        given, columns = segment(kind, draws)
        counts = np.array([columns, columns * (number % 2), 0])
        ours, theirs = (stream.run(given, counts) for stream in (spoiled, clean))
        assert {name: array.tobytes() for name, array in ours.items()} == {
            name: array.tobytes() for name, array in theirs.items()
        }
    for row in range(2):
        for name, held in clean.take(row).tensors.items():
            assert held.tobytes() == spoiled.take(row).tensors[name].tobytes()


@every
def test_an_interrupt_leaves_sequences_of_two_sides_as_before_or_as_after(opened, kind):
    model, draws = opened(kind), np.random.default_rng(4)
    stream: Any = model.stream()
    given, columns = segment(kind, draws)
    stream.run(given, np.full(B, columns))
    start = stream.snapshot()
    before = bits(stream)
    stream.run(given, np.full(B, columns))
    allowed, number, interrupted = {before, bits(stream)}, 3, True
    while interrupted:
        for counts in ([columns] * B, [columns] * B, [columns, 0, 0]):  # so that both sides hold something else
            stream.run(given, np.array(counts))
        stream.restore(start)  # a sequence that is restored stays on its side
        assert len(set(stream.loop.counters.sides.tolist())) == 2
        interrupted = interrupted_at(lambda: stream.run(given, np.full(B, columns)), number)
        assert bits(stream) in allowed, f"opcode {number}"
        number += 17
    assert number > 1000
    assert bits(stream) != before


@every
def test_a_step_makes_no_arrays_once_its_number_of_sequences_has_been_computed(opened, kind, monkeypatch):
    """Not even where states and outputs of few sequences are in several pieces."""
    loop, draws = opened(kind).stream().loop, np.random.default_rng(2)
    calls = [segment(kind, draws) for _ in range(12)]
    ways = [np.array(way, np.int32) for way in ([1, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1])]

    def all_ways() -> None:
        for given, columns in calls:
            for way in ways:
                loop.run(given, way * columns)

    all_ways()

    def made(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("an array is made")

    for name in ("array", "ascontiguousarray", "concatenate", "copy", "empty", "full", "stack", "take", "zeros"):
        monkeypatch.setattr(np, name, made)
    all_ways()


def test_sequences_that_run_all_or_none_leave_no_number_open(tmp_path):
    made = counting().leave_open()
    made.streams = "lockstep"
    path = made.write(tmp_path / "lockstep.txl")
    with pytest.raises(BundleError, match=r"run all or none, but program step-4 leaves their number open; export"):
        load(path, "cpu")


def test_numbers_of_sequences_share_the_memory_of_what_is_copied(opened, monkeypatch):
    """With a B of 64 there are as many, and each with arrays of its own would be 32 times the state."""
    model, bound = opened("layered"), dict[tuple[str, int], set[int]]()
    backend: Any = model.backend
    bind = backend.engine.bind

    def noted(program: Any, inputs: Any, outputs: Any) -> Any:
        for name, array in {**inputs, **outputs}.items():
            bound.setdefault((name, len(inputs["x"])), set()).add(array.ctypes.data)
        return bind(program, inputs, outputs)

    monkeypatch.setattr(backend.engine, "bind", noted)
    stream = model.stream()
    for columns in (1, 3):
        for rows in (1, 2, 1, 2):
            given = np.ones((columns, B, WIDTH), np.float32)
            stream.run({"x": given}, np.array([columns] * rows + [0] * (B - rows)))
    assert {len(bound[name, 3]) for name in ("x", "y", "state.h.in", "state.h.out")} == {1}
