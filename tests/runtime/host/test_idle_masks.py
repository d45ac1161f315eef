"""Steps without masks of idle sequences: the loop keeps what these had, and every bit is what the graph gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from frozen import frozen
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from opcodes import bits, interrupted_at
from step_models import BATCH, B, Graph, StepModel, state
from txl_runtime import BackendError, Model, Stream, TxlError, UsageError, load
from txl_runtime.bundle.tables import Input, Output
from txl_runtime.guard.graph_check import GRAPH, MODEL, NODE, check_graph
from txl_runtime.guard.protobuf import fields, message
from txl_runtime.host.idle_masks import without_idle_masks
from txl_runtime.host.loop import HostLoop
from txl_runtime.host.placements import Replaced
from txl_runtime.types import Ids

BOTH = ["state.c.out", "state.h.out"]
MASKED = {
    "policy-1": {"step-1": BOTH[1:], "step-4": BOTH[1:]},
    "lookahead": {"step-1": BOTH[1:]},
    "policy-16": {"step-1": BOTH[1:]},
    "0.8/policy-16": {"step-1": BOTH[1:], "step-4": BOTH[1:]},
    "0.8/adapted": {"step-1": BOTH, "step-64": BOTH},
}
OTHERS = ["axes", "growing", "lockstep", "stages", "table", "ring", "0.8/growing", "0.8/stages"]


def both_forms(path: Path) -> tuple[Model, Model]:
    """A bundle as it runs fastest, and as it lies there."""
    fast, plain = (load(path, "cpu", threads=1, forms=forms) for forms in ("fast", "plain"))
    return fast, plain


def kept(model: Model) -> dict[str, list[str]]:
    """Return, for every program, the outputs whose idle sequences the loop keeps."""
    backend: Any = model.backend
    return {program.name: sorted(backend.engine.kept(program)) for program in backend.programs}


def same(found: Mapping[str, Any], expected: Mapping[str, Any], said: str) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), f"{name} after {said}"
        assert found[name].tobytes() == array.tobytes(), f"{name} after {said}"


def random_inputs(model: Model, draws: np.random.Generator, b: int, length: int) -> dict[str, Any]:
    """Inputs of any size, now and then NaN."""
    found: dict[str, Any] = {}
    for entry in model.manifest.given:
        sizes = entry.sizes(b, length)
        if entry.dtype.startswith("float"):
            found[entry.name] = (draws.normal(size=sizes) * 2).astype(entry.dtype)
            if draws.random() < 0.1:
                found[entry.name][...] = np.nan
        else:
            found[entry.name] = draws.integers(0, entry.vocab or 2, sizes).astype(entry.dtype)
    return found


def counts(model: Model, draws: np.random.Generator, b: int, length: int) -> Ids:
    """Draw the sequences that run, and the number of their positions that count."""
    live = draws.random(b) < draws.choice([0.3, 0.6, 1.0])
    if not model.manifest.can.run_apart:
        live = np.full(b, bool(live.any()))
    exact = model.manifest.lengths == "exact"
    positions = np.full(b, length) if exact else draws.integers(1, length + 1, b)
    return np.where(live, positions, 0).astype(np.int32)


def returned(stream: Stream) -> dict[str, Any]:
    """Return the states as the last segment would make them."""
    return {state.name: array.copy() for state, array in stream.loop.written()}


def ran(stream: Stream, inputs: dict[str, Any], live: Ids, commit: bool) -> Mapping[str, Any]:
    """Run a segment and return its results; {"failed": [1.]} if a graph cannot run this number of sequences."""
    try:
        return stream.run(inputs, live, commit=commit)
    except BackendError:
        return {"failed": np.ones(1)}


def play(fast: Model, plain: Model, seed: int, turns: int) -> None:
    """Random segments and random changes of states; everything is compared after each."""
    draws = np.random.default_rng(seed)
    b = fast.batch_size if not fast.manifest.can.run_fewer else int(draws.integers(1, fast.batch_size + 1))
    pair, snapshots, rows, said = [model.stream(b) for model in (fast, plain)], list[Any](), list[Any](), ""
    for _ in range(turns):
        b = pair[0].batch_size
        length, commit = int(draws.choice(fast.segment_lengths)), bool(draws.random() < 0.7)
        inputs, live = random_inputs(fast, draws, b, length), counts(fast, draws, b, length)
        said = f"{said[-60:]} run {live.tolist()}{'' if commit else ' uncommitted'}"
        same(*(ran(stream, inputs, live, commit) for stream in pair), said)
        same(*(returned(stream) for stream in pair), said)
        if not commit and draws.random() < 0.5:
            said += " commit"
            for stream in pair:
                stream.loop.commit()
        same(*(stream.state() for stream in pair), said)
        choice, apart = draws.choice(["reset", "select", "snapshot", "restore", "take", "put", ""]), True
        said, apart = f"{said} {choice}", fast.manifest.can.run_apart
        if choice == "reset":
            which = draws.random(b) < 0.4 if apart else None
            for stream in pair:
                stream.reset(which)
        elif choice == "select" and apart:
            order = draws.integers(0, b, int(draws.integers(1, fast.batch_size + 1)))
            for stream in pair:
                stream.select(order)
        elif choice == "snapshot":
            snapshots.append([stream.snapshot() for stream in pair])
        elif choice == "restore" and snapshots and snapshots[-1][0].batch_size == b:
            for stream, state in zip(pair, snapshots[-1], strict=True):
                stream.restore(state)
        elif choice == "take" and apart:
            row = int(draws.integers(0, b))
            rows.append([stream.take(row) for stream in pair])
        elif choice == "put" and rows and apart:
            row = int(draws.integers(0, b))
            for stream, state in zip(pair, rows[-1], strict=True):
                stream.put(row, state)
        same(*(stream.state() for stream in pair), said)


@pytest.mark.parametrize("name", MASKED)
def test_without_masks_every_bit_is_what_it_was(name):
    fast, plain = both_forms(frozen(name))
    found = kept(fast)
    assert {name: names for name, names in found.items() if names}.items() >= MASKED[name].items()
    assert not any(kept(plain).values())
    for seed in range(3):
        play(fast, plain, seed, 20)


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_such_mask_is_left_alone(name):
    assert not any(kept(load(frozen(name), "cpu", threads=1)).values())


@pytest.mark.parametrize("fault", ["nothing is kept", "the first is not", "a neighbour is", "the wrong way", "late"])
@pytest.mark.parametrize("name", ["0.8/adapted", "policy-16"])
def test_a_loop_that_does_not_keep_them_is_found_out(name, fault, monkeypatch):
    def keep(self: Any, states: Any, rows: int) -> None:
        idle = np.flatnonzero(self.counters.valid[:rows] == 0).tolist()
        for before, after in states:
            for row in idle:
                if fault == "the first is not" and row:
                    after[row] = before[row]
                elif fault == "a neighbour is":
                    after[row - 1] = before[row - 1]
                elif fault == "the wrong way":
                    before[row] = after[row]

    if fault == "late":  # only where the segment becomes part of the state
        real, run = HostLoop._keep, HostLoop.run
        monkeypatch.setattr(HostLoop, "_keep", lambda self, *rest: setattr(self, "later", rest))

        def late(self: Any, *rest: Any, **options: Any) -> Any:
            result = run(self, *rest, **options)
            if self._computed == 0 and hasattr(self, "later"):
                real(self, *self.later)
            return result

        monkeypatch.setattr(HostLoop, "run", late)
    else:
        monkeypatch.setattr(HostLoop, "_keep", keep)
    fast, plain = both_forms(frozen(name))
    with pytest.raises(AssertionError):
        play(fast, plain, 0, 80)


def test_an_interrupt_leaves_the_state_before_or_after_a_segment_with_idle_sequences():
    fast, _ = both_forms(frozen("policy-16"))
    inputs = {"obs": np.random.default_rng(0).normal(size=(3, 1, 6)).astype(np.float32)}
    stream = fast.stream(3)
    stream.run(inputs)
    start = stream.snapshot()
    before, live = bits(stream), np.array([0, 1, 1], np.int32)
    stream.run(inputs, live)
    after, number, interrupted = bits(stream), 3, True
    assert before != after
    while interrupted:
        stream.restore(start)
        interrupted = interrupted_at(lambda: stream.run(inputs, live), number)
        assert bits(stream) in (before, after), f"opcode {number}"
        number += 11
    assert number > 600


def test_nothing_is_copied_where_nobody_is_idle(monkeypatch):
    """Nor are views made in a step: they are made once for each way that segments go."""
    fast, _ = both_forms(frozen("0.8/policy-16"))
    stream, inputs = fast.stream(), {"obs": np.ones((16, 1, 6), np.float32)}
    for _ in range(2):
        stream.run(inputs)
    loop: Any = stream.loop
    for key, route in loop._routes.items():
        assert route.kept
        loop._routes[key] = route._replace(kept=((None, None),))  # not even looked at
    monkeypatch.setattr(Replaced, "kept", None)
    stream.run(inputs)


# --- what is taken out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MASKED, *OTHERS])
def test_everything_else_of_a_graph_stays_byte_for_byte(name):
    bundle = load(frozen(name), "cpu", threads=1).bundle
    for program in bundle.manifest.programs:
        graph = bundle.read(program.file)
        found = check_graph(graph, "a.onnx", program, bundle.manifest)
        assert message(found.model) == graph
        other, names = without_idle_masks(graph, found, bundle.manifest)
        if not names:
            assert other == graph
            continue
        check_graph(other, "a.onnx", program, bundle.manifest)
        before, after = (dict(fields(data, MODEL, "the model")) for data in (graph, other))
        assert {k: v for k, v in before.items() if k != 7} == {k: v for k, v in after.items() if k != 7}
        one, two = (fields(model[7], GRAPH, "the graph") for model in (before, after))
        assert [pair for pair in one if pair[0] != 1] == [pair for pair in two if pair[0] != 1]
        changed = [
            dict(fields(part, NODE, "a node"))[4] for number, part in two if number == 1 and (1, part) not in one
        ]
        assert len(changed) >= 1
        gone = [dict(fields(part, NODE, "a node"))[4] for number, part in one if number == 1]
        for number, part in two:
            if number == 1:
                gone.remove(dict(fields(part, NODE, "a node"))[4])
        assert gone.count(b"Where") == len(names)
        assert set(gone) <= {b"Where", b"Reshape", b"Greater"}


WIDTH = B
"""So that a mask across is as good to the engine as one along."""
COMPARED = {
    "Greater": lambda graph, by: graph.add("Greater", [by, graph.constant(0, np.int32)]),
    "Greater of one": lambda graph, by: graph.add("Greater", [by, graph.constant([0], np.int32)]),
    "Greater of a node": lambda graph, by: graph.add(
        "Greater", [by, graph.add("Reshape", [graph.constant(0, np.int32), graph.constant([1, 1], np.int64)])]
    ),
    "Greater than 1": lambda graph, by: graph.add("Greater", [by, graph.constant(1, np.int32)]),
    "Greater than some": lambda graph, by: graph.add("Greater", [by, graph.constant([0, 1, 0], np.int32)]),
    "GreaterOrEqual": lambda graph, by: graph.add("GreaterOrEqual", [by, graph.constant(0, np.int32)]),
    "Less": lambda graph, by: graph.add("Less", [graph.constant(0, np.int32), by]),
    "swapped": lambda graph, by: graph.add("Greater", [graph.constant(0, np.int32), by]),
}
LAID = {
    "along": lambda axis: [1] * axis + [-1] + [1] * (1 - axis),
    "across": lambda axis: [1] * (1 - axis) + [-1] + [1] * axis,
    "by number": lambda axis: [1] * axis + [B] + [1] * (1 - axis),
    "not": lambda axis: None,
}
NEW = ["node", "shared", "returned", "spread", "constant", "input", "old", "other"]
CHOICES = {
    "compared": list(COMPARED),
    "by": ["valid", "turns"],
    "laid": list(LAID),
    "new": NEW,
    "turned": [False, True],
    "wide": [False, True],
    "read": [False, True],
    "foreign": [False, True],
    "open": [False, True],
}
USUAL = {name: values[0] for name, values in CHOICES.items()}


def masked(choice: dict[str, Any]) -> StepModel:
    """Two states of which one has a usual mask, and the other one that looks alike."""
    axis = int(choice["wide"])
    shape = (WIDTH, B) if axis else (B, WIDTH)
    table = (
        Input(name="x", dtype="float32", shape=("B", WIDTH), role="feature"),
        Input(name="turns", dtype="int32", shape=("B",), role="feature"),
        Input(name="valid", dtype="int32", shape=("B",), role="valid"),
    )
    outputs = (Output(name="y", dtype="float32", shape=("B", WIDTH)),)
    states = (state("g", (B, WIDTH), 0, initial=0.5), state("h", shape, axis, initial=0.25))
    model, graph = StepModel(inputs=table, outputs=outputs, states=states), Graph()
    live = COMPARED[choice["compared"]](graph, choice["by"])
    target = LAID[choice["laid"]](axis)
    mask = live if target is None else graph.add("Reshape", [live, graph.constant(target, np.int64)])
    x = graph.add("Transpose", ["x"], perm=[1, 0]) if axis else "x"
    half = graph.constant(0.5, np.float32)
    g = graph.add("Add", [graph.add("Mul", ["state.g.in", half]), "x"])
    node = graph.add("Add", [graph.add("Tanh", ["state.h.in"]), x])
    new = {
        "node": node,
        "shared": graph.add("Transpose", [g], perm=[1, 0]) if axis else g,
        "returned": "y" if not axis else node,
        "spread": graph.add("ReduceMax", [node, graph.constant([axis], np.int64)], keepdims=1),
        "constant": graph.constant(np.ones(shape), np.float32),
        "input": x,
        "old": "state.h.in",
        "other": graph.add("Transpose", ["state.g.in"], perm=[1, 0]) if axis else "state.g.in",
    }[choice["new"]]
    usual = graph.add("Greater", ["valid", graph.constant(0, np.int32)])
    usual = graph.add("Reshape", [usual, graph.constant([-1, 1], np.int64)])
    graph.add("Where", [usual, g, "state.g.in"], "state.g.out")
    first = node if choice["new"] != "returned" or axis else "y.before"
    if choice["new"] == "returned" and not axis:
        graph.add("Add", ["x", node], "y")
    else:
        seen = "state.h.out" if choice["read"] else first
        late = [graph.add("Transpose", [seen], perm=[1, 0]) if axis else seen, "x"] if not choice["read"] else None
        if late:
            graph.add("Mul", late, "y")
    old = ("state.g.in" if not axis else new) if choice["foreign"] else "state.h.in"
    graph.add("Where", [mask, *((old, new) if choice["turned"] else (new, old))], "state.h.out")
    if choice["read"] and not (choice["new"] == "returned" and not axis):
        graph.add("Mul", [graph.add("Transpose", ["state.h.out"], perm=[1, 0]) if axis else "state.h.out", "x"], "y")
    model.add("step-1", 1, graph)
    return model.leave_open() if choice["open"] else model


def written(choice: dict[str, Any], folder: Path) -> Path:
    return masked(choice).write(folder / "own.txl")


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in CHOICES.items() for value in values[1:] if name not in ("wide", "open")],
)
@pytest.mark.parametrize("wide", [False, True])
def test_a_mask_that_looks_alike_stays(name, value, wide, tmp_path):
    """But for one whose 0 is an array of one number, and one whose value is shared: there one mask goes."""
    model = load(written({**USUAL, "wide": wide, name: value}, tmp_path), "cpu", threads=1)
    same = {"Greater of one", *(("shared",) if wide else ())} | ({"returned", "input", "other"} if wide else set())
    assert kept(model)["step-1"] == (["state.g.out", "state.h.out"] if value in same else ["state.g.out"])


ODD = [(name, value) for name, values in CHOICES.items() for value in values[1:]]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(odd=st.lists(st.sampled_from(ODD), max_size=3), seed=st.integers(0, 99))
def test_whatever_the_mask_is_every_bit_is_what_the_graph_gives(odd, seed, tmp_path_factory):
    try:
        path = written({**USUAL, **dict(odd)}, tmp_path_factory.mktemp("own"))
        plain = load(path, "cpu", threads=1, forms="plain")
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, TxlError):
        assume(False)
    fast = load(path, "cpu", threads=1)
    play(fast, plain, seed, 8)


def spreading(declared: bool) -> StepModel:
    """The last sequence's state spread over all; its sizes are left open, or declared falsely as those of the state."""
    model = StepModel(
        inputs=(
            Input(name="x", dtype="float32", shape=("B", WIDTH), role="feature"),
            Input(name="valid", dtype="int32", shape=("B",), role="valid"),
        ),
        outputs=(Output(name="y", dtype="float32", shape=("B", WIDTH)),),
        states=(state("h", (B, WIDTH), 0, initial=0.5),),
    )
    graph = Graph()
    live = graph.add("Greater", ["valid", graph.constant(0, np.int32)])
    live = graph.add("Reshape", [live, graph.constant([-1, 1], np.int64)])
    node = graph.add("Add", ["state.h.in", "x"], "y")
    last = graph.add("Sub", [graph.add("Shape", [node], end=1), graph.constant([1], np.int64)])
    ends, axes = graph.constant([9], np.int64), graph.constant([0], np.int64)
    last = graph.add("Slice", [node, last, ends, axes])
    graph.add("Where", [live, last, "state.h.in"], "state.h.out")
    model.add("step-1", 1, graph)
    if declared:
        value = onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, [BATCH, WIDTH])
        model.graphs["step-1.onnx"].graph.value_info.append(value)
    return model.leave_open()


def test_a_mask_stays_where_nothing_is_declared_of_what_it_lets_through(tmp_path):
    fast, _ = both_forms(spreading(False).write(tmp_path / "own.txl"))
    assert kept(fast) == {"step-1": []}
    assert fast.stream().run({"x": np.ones((B, WIDTH), np.float32)})["y"].tolist() == [[1.5] * WIDTH] * B


def test_a_step_whose_sizes_are_declared_falsely_fails_as_a_whole_and_runs_in_the_plain_form(tmp_path):
    fast, plain = both_forms(spreading(True).write(tmp_path / "own.txl"))
    assert kept(fast) == {"step-1": ["state.h.out"]}
    inputs, stream = {"x": np.ones((B, WIDTH), np.float32)}, fast.stream()
    before = bits(stream)
    with pytest.raises(BackendError, match=r"^program step-1 failed in ONNX Runtime: "):
        stream.run(inputs)
    assert bits(stream) == before
    assert plain.stream().run(inputs)["y"].tolist() == [[1.5] * WIDTH] * B


@pytest.mark.parametrize("wrong", ["slow", "", None, 1, ["fast"]])
def test_a_form_that_is_none_is_refused(wrong):
    with pytest.raises(UsageError, match=r"^forms is .*, expected one of fast, plain$"):
        load(frozen("policy-1"), "cpu", forms=wrong)
