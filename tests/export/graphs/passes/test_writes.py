"""Writes at fixed positions become joins of what stays and what is new: the same numbers to the bit, and no scatter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from passed_graphs import kinds, run, small
from torch import nn
from txl_export.families.own_module import building
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_export.graphs.passes.improving import improve
from txl_export.graphs.shared_weights import read_weight_file
from txl_runtime.bundle.reading import WEIGHTS
from txl_runtime.listener import Silent

SCATTERS = {"ScatterND", "ScatterElements"}
ROWS, POSITIONS, WIDTH = 3, 6, 32


def one(n, c, x):
    n[:, 1, :-1] = c[:, 1, 1:]
    n[:, 1, -1] = x


def last(n, c, x):
    n[:, :, -1] = x[:, None]


def strided(n, c, x):
    n[:, :, ::2] = c[:, :, 1::2] + x[:, None, None]


def moved(n, c, x):
    n[:, 2] = c[:, 0]


def inside(n, c, x):
    n[:, 1][:, 2:4] = x[:, None]


def several_axes(n, c, x):
    n[:, 1:, 2:4, 1:3] = x[:, None, None, 1:3]


def listed(n, c, x):
    n[:, 1, torch.tensor([4, 1])] = torch.stack([x, -x], 1)


def everything(n, c, x):
    n[:] = x[:, None, None]


def rolled(n, c, x):
    n.copy_(c.roll(-1, 2))
    n[:, :, -1:] = x[:, None, None]


def layers(n, c, x):
    for layer in range(ROWS):
        n[:, layer, :-1] = n[:, layer, 1:].clone()
        n[:, layer, -1] = x
        x = n[:, layer, 2] - x


def scattered(n, c, x):
    c = torch.select_scatter(c, x[:, None].expand(-1, ROWS, -1), 2, -2)
    n.copy_(torch.slice_scatter(c, x[:, None, None].expand(-1, ROWS, 2, -1), 2, 1, 5, 2))


def indexed(n, c, x):
    n.copy_(c.index_copy(2, torch.tensor([3, 0]), torch.stack([x, x + 1], 1)[:, None].expand(-1, ROWS, -1, -1)))


WRITES = (one, last, strided, moved, inside, several_axes, listed, everything, rolled, layers, scattered, indexed)


class Written(nn.Module):
    """Each write into a cache of its own; what is written is the input, so that no state may differ by a bit."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for write, cache in zip(WRITES, caches, strict=True):
            new = cache.clone()
            write(new, cache, x)
            found.append(new)
        return (self.mix(x), *found)


@pytest.mark.parametrize("batch_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_writes_of_torch_are_joins_of_the_same_bits_for_any_number_of_sequences(batch_size, tmp_path, monkeypatch):
    states = [StateSpec(write.__name__, ("B", ROWS, POSITIONS, WIDTH)) for write in WRITES]
    spec = StepSpec(module=Written(), inputs=[InputSpec("x", ("B", WIDTH))], states=states, outputs=["y"])
    captured = list[Counter[str]]()
    monkeypatch.setattr(building, "improve", lambda model: (captured.append(kinds(model)), improve(model)))
    written = building.write_step(tmp_path, make_plan(spec, batch_size, (1,), Silent()), "fp32", "auto", Silent())
    assert set(captured[0]) & SCATTERS
    assert written.programs[0].open_batch == (batch_size > 1)
    assert [*read_weight_file(tmp_path / WEIGHTS)] == ["mix.weight"]  # no places of what is written
    model = ir.load(tmp_path / written.programs[0].file)
    for value in model.graph.initializers.values():
        value.const_value = ir.tensor(value.const_value.numpy(), name=value.name)
    assert not set(kinds(model)) & SCATTERS
    draws = np.random.default_rng(0)
    for count in range(1, batch_size + 1):
        x = draws.normal(size=(count, WIDTH)).astype(np.float32)
        caches = [draws.normal(size=(count, ROWS, POSITIONS, WIDTH)).astype(np.float32) for _ in WRITES]
        caches[0][0, 1, 2, :4] = np.nan, np.inf, -np.inf, 1e-42
        _, *wanted = spec.module(*map(torch.from_numpy, (x, *caches)))
        feed = dict(
            zip((value.name for value in model.graph.inputs), (x, np.ones(count, np.int32), *caches), strict=True)
        )
        for write, want, got in zip(WRITES, wanted, run(model, feed)[1:], strict=True):
            assert got.tobytes() == want.numpy().tobytes(), write.__name__


@st.composite
def scatters(draw: st.DrawFn) -> tuple[ir.Model, dict[str, np.ndarray], bool]:
    """A scatter at drawn places along some axes, maybe between transposes, and whether all places are apart."""
    rank = draw(st.integers(1, 4))
    shape = [draw(st.integers(1, 6)) for _ in range(rank)]
    turn = draw(st.permutations(range(rank))) if draw(st.booleans()) else None
    turned = shape if turn is None else [shape[axis] for axis in turn]
    nodes, read = [], "data"
    if turn is not None:
        nodes.append(helper.make_node("Transpose", ["data"], ["turned"], name="turn", perm=turn))
        read = "turned"

    def places(size: int) -> list[int]:
        kind = draw(st.sampled_from(["slice", "steps", "any"]))
        if kind == "any":
            return draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=size + 1))
        first = draw(st.integers(0, size - 1))
        return list(range(size))[first :: 1 if kind == "slice" else draw(st.integers(2, 3))]

    if draw(st.booleans()):
        axis = draw(st.integers(-rank, rank - 1))
        where = {axis % rank: places(turned[axis])}
        new = [len(where[at]) if at in where else size for at, size in enumerate(turned)]
        along = [-1 if at in where else 1 for at in range(rank)]
        index = np.broadcast_to(np.array(where[axis % rank]).reshape(along), new)
        nodes.append(helper.make_node("ScatterElements", [read, "index", "new"], ["z"], name="write", axis=axis))
    else:
        where = {axis: places(turned[axis]) for axis in range(draw(st.integers(1, rank)))}
        new = [len(where[at]) if at in where else size for at, size in enumerate(turned)]
        index = np.stack(np.meshgrid(*where.values(), indexing="ij"), -1)
        nodes.append(helper.make_node("ScatterND", [read, "index", "new"], ["z"], name="write"))
    back = list(range(rank)) if turn is None else np.argsort(turn).tolist()
    nodes.append(helper.make_node("Transpose", ["z"], ["y"], name="back", perm=back))
    apart = all(len({one % turned[axis] for one in found}) == len(found) for axis, found in where.items())
    draws = np.random.default_rng(0)
    feed = {"data": draws.normal(size=shape).astype(np.float32), "new": draws.normal(size=new).astype(np.float32)}
    feed["data"].flat[0], feed["new"].flat[0] = -0.0, np.nan
    sizes = {name: array.shape for name, array in feed.items()}
    return small(nodes, sizes, {"index": np.ascontiguousarray(index, np.int64)}), feed, apart


@settings(deadline=None, max_examples=60)
@given(scatters())
def test_a_scatter_at_any_places_gives_the_same_bits_as_a_join(drawn):
    model, feed, apart = drawn
    (wanted,) = run(model, feed)
    axes = model.graph.node("write").attributes.get("axis"), model.graph.initializers["index"].const_value.numpy()
    improve(model)
    (found,) = run(model, feed)
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()
    if apart and (axes[0] is not None or axes[1].shape[-1] == 1):
        assert not set(kinds(model)) & SCATTERS


def scatter(kind="ScatterElements", **changed):
    """A write of one row into [5, 3], which becomes a join unless something about it is changed."""
    index = np.full((1, 3), 2) if kind == "ScatterElements" else np.array([[2]])
    inputs = {"data": (5, 3), "new": (1, 3)} | changed.pop("inputs", {})
    constants = {"index": changed.pop("index", index).astype(np.int64)}
    return small([helper.make_node(kind, ["data", "index", "new"], ["y"], name="write", **changed)], inputs, constants)


@pytest.mark.parametrize("kind", sorted(SCATTERS))
def test_a_scatter_stays_where_it_may_be_something_else(kind):
    plain = scatter(kind)
    improve(plain)
    assert kinds(plain) == {"Slice": 2, "Concat": 1}
    twice = np.full((2, 3), 2) if kind == "ScatterElements" else np.array([[2], [2]])
    others = [
        scatter(kind, reduction="add"),
        scatter(kind, index=twice, inputs={"new": (2, 3)}),  # which of the two stays is not said
        scatter(kind, inputs={"data": ("rows", 3)}),
    ]
    if kind == "ScatterElements":
        others.append(scatter(kind, index=np.array([[2, 2]]), inputs={"new": (1, 2)}))  # a part of the row
        others.append(scatter(kind, index=np.array([[2, 1, 2]])))  # into several rows
    else:
        others.append(scatter(kind, index=np.array([[[2]]]), inputs={"new": (1, 1, 3), "data": (5, 3)}))
    computed = scatter(kind)
    computed.graph.inputs.append(computed.graph.initializers["index"])  # a number that a caller may change
    for model in (*others, computed):
        improve(model)
        assert kinds(model) == {kind: 1}


@pytest.mark.parametrize(("places", "wanted"), [((0, 1, 2), {"Identity": 1}), ((0, 2, 1), {"ScatterND": 1})])
def test_a_write_into_all_sequences_that_there_are_is_what_is_written(places, wanted):
    nodes = [
        helper.make_node("Shape", ["new"], ["count"], name="count", end=1),
        helper.make_node("Slice", ["all", "first", "count", "first"], ["index"], name="opened"),
        helper.make_node("ScatterND", ["data", "index", "new"], ["y"], name="write"),
    ]
    constants = {"all": np.array(places)[:, None], "first": np.array([0])}
    model = small(nodes, {"data": ("batch", 3), "new": ("batch", 3)}, constants)
    improve(model)
    assert {kind: count for kind, count in kinds(model).items() if kind not in ("Shape", "Slice")} == wanted


def test_a_write_that_leaves_many_parts_is_one_selection():
    index = np.arange(0, 40, 2)[:, None]
    model = small(
        [helper.make_node("ScatterND", ["data", "index", "new"], ["y"], name="write")],
        {"data": (40, 2), "new": (20, 2)},
        {"index": index},
    )
    improve(model)
    assert kinds(model) == {"Concat": 1, "Gather": 1}
    data, new = np.zeros((40, 2), np.float32), np.ones((20, 2), np.float32)
    (found,) = run(model, {"data": data, "new": new})
    np.testing.assert_array_equal(found[:, 0], np.arange(40) % 2 == 0)
