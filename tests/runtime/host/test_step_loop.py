"""Steps that return their whole state, on the CPU: any dtype, any batch axis, growth; no state but one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from stand_ins.steps import FRAME, MOST, looking, open_rows, speaking, state
from step_models import FEATURES, VOCABULARY, WIDTH, B, Graph, StepModel, counting, growing, recurrent
from txl_runtime import BackendError, BundleError, Stream, UsageError, load
from txl_runtime.bundle.tables import Input, Output

KINDS = {"recurrent": recurrent, "growing": growing, "counting": counting, "open": open_rows, "looking": looking}
every = pytest.mark.parametrize("kind", KINDS)
MADE = {**KINDS, "full": lambda: open_rows(full=True)}
independent = pytest.mark.parametrize("kind", ["recurrent", "counting", "looking"])


@pytest.fixture(scope="module")
def open_stream(tmp_path_factory):
    models: dict[str, Any] = {}

    def open_one(kind: str, batch_size: int | None = None) -> Stream:
        if kind not in models:
            path = MADE[kind]().write(tmp_path_factory.mktemp("own") / "own.txl")
            models[kind] = load(path, backend="cpu", threads=1)
        return models[kind].stream(batch_size)

    return open_one


def segment(kind: str, seed: int, b: int = B, columns: int = 2) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    if kind == "recurrent":
        columns = 4 if columns > 1 else 1
        obs = draws.normal(size=(b, columns, FEATURES)).astype(np.float32)
        return {"obs": obs, "starts": draws.random(b) < 0.3}
    if kind == "open":
        return {"frames": draws.normal(size=(b, columns, FRAME)).astype(np.float32)}
    if kind == "looking":
        frames = draws.normal(size=(columns + 2, b, FRAME)).astype(np.float32)
        return {"frames": frames, "marks": draws.integers(0, 9, (b, columns)), "gain": np.ones(FRAME, np.float32)}
    return {"tokens": draws.integers(0, VOCABULARY, (b, columns))}


def bits(arrays: dict[str, np.ndarray]) -> dict[str, tuple[Any, ...]]:
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


def lengths_of(kind: str, given: dict[str, np.ndarray], live: list[bool]) -> list[int]:
    columns = 4 if kind == "recurrent" else 2
    return [columns if alive else 0 for alive in live]


def test_states_have_the_tables_shapes_and_types_and_start_as_it_says(open_stream):
    state = open_stream("recurrent").state()
    shapes = {name: (str(array.dtype), array.shape) for name, array in state.items()}
    wide = ("float32", (1, B, WIDTH))
    assert shapes == {"c": wide, "count": ("int32", (B,)), "h": wide, "seen": ("bool", (B,))}
    assert state["count"].tolist() == [7, 7, 7]
    np.testing.assert_array_equal(state["h"], np.tile(np.linspace(-1, 1, WIDTH, dtype=np.float32), (1, B, 1)))
    assert open_stream("recurrent", 2).state()["h"].shape == (1, 2, WIDTH)


def test_an_lstm_is_the_lstm_of_onnx_with_any_lengths_in_any_order(open_stream):
    """Segments of 4 and of 1 are the same recurrence."""
    whole, single = open_stream("recurrent"), open_stream("recurrent")
    for seed in range(5):
        given = segment("recurrent", seed)
        at_once = whole.run(given)
        parts = []
        for column in range(4):
            starts = given["starts"] if column == 0 else np.zeros(B, bool)
            parts.append(single.run({"obs": given["obs"][:, column : column + 1], "starts": starts}))
        np.testing.assert_allclose(at_once["best"], np.concatenate([part["best"] for part in parts], axis=1), atol=1e-6)
        np.testing.assert_allclose(at_once["total"], np.concatenate([part["total"] for part in parts]), atol=1e-6)
    assert whole.state()["count"].tolist() == single.state()["count"].tolist() == [27, 27, 27]


def test_what_a_segment_leaves_open_of_a_programs_arrays_is_zero(open_stream):
    """Whatever earlier segments put there: NaN in the padding would otherwise reach results that are masked."""
    loop: Any = open_stream("counting").loop
    loop.run({"tokens": np.full((B, 4), 5, np.int32)}, np.full(B, 4, np.int32))
    loop.run({"tokens": np.full((B - 1, 2), 7, np.int32)}, np.full(B - 1, 2, np.int32))
    expected = np.zeros((B, 4), np.int32)
    expected[: B - 1, :2] = 7
    taken, _ = loop._arrays["step-4"]
    assert taken["tokens"].tolist() == expected.tolist()


def test_what_does_not_grow_has_one_array_a_side_however_many_stages_there_are(open_stream):
    stream: Any = open_stream("growing")
    arrays: list[dict[str, Any]] = []
    for _ in range(6):
        stream.feed({"tokens": np.ones((B, 2), np.int32)})
        (placement,) = stream.loop.placements
        arrays += placement.sides
    assert len({id(side["clock"]) for side in arrays}) == 2
    assert len({side["rows"].shape for side in arrays}) > 2


@pytest.mark.parametrize("kind", ["open", "full"])
def test_one_graph_serves_any_number_of_rows(open_stream, kind):
    """Also before and after one of a fixed number."""
    stream, seen = open_stream(kind), np.zeros((B, 0, FRAME), np.float32)
    for seed in range(8):
        given = segment("open", seed, columns=1 + seed % 2)
        every_row = np.concatenate([seen, given["frames"]], axis=1)
        np.testing.assert_allclose(stream.run(given)["mean"], every_row.mean(axis=1), rtol=0, atol=1e-6)
        seen = every_row[:, -MOST:]
        assert bits(stream.state()) == bits({"rows": seen})
    stream.reset()
    assert stream.state()["rows"].shape == (B, 0, FRAME)


def test_the_shortest_program_that_holds_a_segment_runs_it(open_stream):
    stream = open_stream("counting")
    taken = []
    real = stream.loop._programs.find
    stream.loop._programs.find = lambda *given: taken.append(real(*given)) or taken[-1]
    for columns in (1, 2, 4):
        stream.step(np.zeros((B, columns), int))
    assert [program.segment_length for program in taken] == [1, 4, 4]


@independent
def test_a_sequence_is_the_same_alone_beside_idle_ones_and_beside_nan(open_stream, kind):
    """Outputs and state of one sequence, bit for bit, whatever stands in the others."""
    draws = np.random.default_rng(7)
    together, alone, poisoned = (open_stream(kind) for _ in range(3))
    for seed in range(12):
        given = segment(kind, seed)
        live = (draws.random(B) < 0.6).tolist()
        live[1] = live[1] or seed < 2
        if seed == 5:
            for stream in (together, alone, poisoned):
                stream.reset([1])
        if seed == 8:
            together.reset([0, 2])
        found = together.run(given, lengths_of(kind, given, live))
        only = alone.run(given, lengths_of(kind, given, [False, live[1], False]))
        spoiled = {name: array.copy() for name, array in given.items()}
        for name, array in spoiled.items():
            if array.dtype == np.float32 and name != "gain":
                np.moveaxis(array, array.shape.index(B), 0)[[0, 2]] = np.nan
        beside = poisoned.run(spoiled, lengths_of(kind, given, [True, live[1], True]))
        for entry in together._manifest.outputs:
            one = [np.moveaxis(a[entry.name], entry.shape.index("B"), 0)[1].tobytes() for a in (found, only, beside)]
            assert len(set(one)) == 1, (seed, entry.name)
        mine, theirs, spared = (bits(dict(stream.take(1).tensors)) for stream in (together, alone, poisoned))
        assert mine == theirs == spared, seed


def test_states_no_program_takes_are_refused_and_stay(open_stream):
    stream = open_stream("growing")
    stream.run(segment("growing", 0))
    for row in range(B):  # beneath the stream, which would refuse them
        part = stream.loop.take(row)
        stream.loop.put(row, replace(part, tensors={**part.tensors, "rows": part.tensors["rows"][:1]}))
    with pytest.raises(
        UsageError,
        match=r"a segment of 2 positions came with state clock \[1\], rows \[3, 1, 4\], .* \(lengths \[2\]\)",
    ):
        stream.run(segment("growing", 1))
    assert stream.state()["rows"].shape == (B, 1, 4)
    stream.reset()
    stream.run(segment("growing", 1))


def failing(*_: Any) -> Any:
    raise BackendError("the engine failed")


@pytest.mark.parametrize("kind", ["open", "recurrent"])
def test_an_engine_that_fails_leaves_the_state(open_stream, monkeypatch, kind):
    stream = open_stream(kind)
    stream.run(segment(kind, 0))
    before = bits(stream.state())
    with monkeypatch.context() as patch:
        patch.setattr(stream.loop._engine, "run", failing)
        patch.setattr(stream.loop._engine, "bind", lambda *_: failing)
        patch.setattr(stream.loop, "_calls", {})
        patch.setattr(stream.loop, "_routes", {})
        with pytest.raises(BackendError, match="the engine failed"):
            stream.run(segment(kind, 1))
    assert bits(stream.state()) == before


@pytest.mark.parametrize("lean", [False, True])
def test_a_graph_that_is_not_what_its_program_says_is_refused(tmp_path, lean):
    model = speaking(("B", "L"))
    model.graphs["step-4.onnx"], model.graphs["step-1.onnx"] = model.graphs["step-1.onnx"], model.graphs["step-4.onnx"]

    with pytest.raises(
        BundleError, match=r"step-4\.onnx: one of its inputs is words int32\[3, 1\], expected .*\[3, 4\]"
    ):
        load(model.write(tmp_path / "own.txl"), backend="cpu", lean=lean)


def half() -> StepModel:
    """Sums in float16 and in float32, the batch second."""
    model = StepModel(
        inputs=(
            Input(name="x", dtype="float32", shape=("B", 2), role="feature"),
            Input(name="valid", dtype="int32", shape=("B",), role="valid"),
        ),
        outputs=(Output(name="y", dtype="float32", shape=("B", 2)),),
        states=(
            state("half", (2, B), 1, "float16", initial="initial.half"),
            state("number", (2, B), 1, "int32", initial=16777217),
        ),
        tensors={"initial.half": np.array([[0.5], [1.5]], np.float16)[:, 0]},
    )
    graph = Graph()
    live = graph.add("Greater", ["valid", graph.constant(0, np.int32)])
    turned = graph.add("Transpose", ["x"], perm=[1, 0])
    total = graph.add("Add", ["state.half.in", graph.add("Cast", [turned], to=TensorProto.FLOAT16)])
    graph.add("Where", [live, total, "state.half.in"], "state.half.out")
    graph.add("Add", ["state.number.in", "valid"], "state.number.out")
    graph.add("Transpose", [graph.add("Cast", ["state.half.out"], to=TensorProto.FLOAT)], "y", perm=[1, 0])
    model.add("step-1", 1, graph)
    return model


def test_halves_and_large_numbers_are_kept_as_they_are(tmp_path):
    stream = load(half().write(tmp_path / "own.txl"), backend="cpu", threads=1).stream()
    given = np.arange(6, dtype=np.float32).reshape(B, 2)
    found = stream.run({"x": given}, [1, 0, 1])["y"]
    assert found.tolist() == [[0.5, 2.5], [0, 0], [4.5, 6.5]]
    held = stream.state()
    assert (held["half"].dtype, held["number"].tolist()) == (np.float16, [[16777218, 16777217, 16777218]] * 2)
    assert held["half"][:, 1].tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    "stored", [np.zeros(3, np.float16), np.zeros((1, 1, 2), np.float16), np.zeros(2, np.float32)], ids=str
)
def test_an_initial_value_that_does_not_broadcast_is_refused(tmp_path, stored):
    model = half()
    model.tensors["initial.half"] = stored
    with pytest.raises(
        BundleError, match=r"initial\.half is float.*, expected float16 \[2\], which broadcasts over half"
    ):
        load(model.write(tmp_path / "own.txl"), backend="cpu")
