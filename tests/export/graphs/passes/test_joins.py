"""Operators that only move numbers along an axis read the values that these come from: same bits, fewer operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from passed_graphs import kinds, run, small
from txl_export.graphs.passes import improving
from txl_export.graphs.passes.improving import improve
from txl_export.graphs.passes.joins import join_once

AXIS = 1


class Line:
    """A graph of slices, joins, splits, selections along one axis of three, put together step by step."""

    def __init__(self, sizes: dict[str, int], rank: int = 3) -> None:
        self.inputs = {name: tuple(size if axis == AXIS else 2 for axis in range(rank)) for name, size in sizes.items()}
        self.sizes, self.nodes, self.constants = dict(sizes), list[Any](), dict[str, Any]()

    def numbers(self, *numbers: int, scalar: bool = False) -> str:
        name = f"c.{len(self.constants)}"
        self.constants[name] = np.array(numbers[0] if scalar else numbers, np.int64)
        return name

    def add(self, kind: str, inputs: list[str], *sizes: int, **attributes: Any) -> list[str]:
        names = [f"{kind}.{len(self.nodes)}.{place}" for place in range(len(sizes))]
        self.nodes.append(helper.make_node(kind, inputs, names, name=f"{kind}.{len(self.nodes)}", **attributes))
        self.sizes |= dict(zip(names, sizes, strict=True))
        return names

    def slice(self, value: str, start: int, end: int, axis: int = AXIS) -> str:
        inputs = [value, self.numbers(start), self.numbers(end), self.numbers(axis)]
        return self.add("Slice", inputs, len(range(self.sizes[value])[start:end]))[0]

    def concat(self, *values: str) -> str:
        return self.add("Concat", list(values), sum(self.sizes[value] for value in values), axis=AXIS - 3)[0]

    def strided(self, value: str, start: int, step: int) -> str:
        inputs = [value, *(self.numbers(one) for one in (start, 2**31, AXIS, step))]
        return self.add("Slice", inputs, len(range(start, self.sizes[value], step)))[0]

    def reshaped(self, value: str) -> str:
        """The same size along the axis, in a form that no pass follows."""
        return self.add("Reshape", [value, self.numbers(2, self.sizes[value], 2)], self.sizes[value])[0]

    def select(self, value: str, place: int) -> str:
        """One position, with the axis dropped and added again."""
        (one,) = self.add("Gather", [value, self.numbers(place, scalar=True)], 0, axis=AXIS)
        return self.add("Unsqueeze", [one, self.numbers(AXIS)], 1)[0]

    def model(self, *results: str) -> ir.Model:
        """With each result an output of its own, one of them negated so that something is computed."""
        names = [f"y.{number}" for number in range(len(results))]
        for number, (result, name) in enumerate(zip(results, names, strict=True)):
            self.nodes.append(
                helper.make_node("Neg" if number % 2 else "Identity", [result], [name], name=f"out.{name}")
            )
        return small(self.nodes, self.inputs, self.constants, names)

    def feed(self) -> dict[str, np.ndarray]:
        draws = np.random.default_rng(0)
        return {name: draws.normal(size=shape).astype(np.float32) for name, shape in self.inputs.items()}


@st.composite
def lines(draw: st.DrawFn) -> tuple[ir.Model, dict[str, np.ndarray]]:
    line = Line({"a": draw(st.integers(1, 5)), "b": draw(st.integers(1, 5))})
    for _ in range(draw(st.integers(1, 8))):
        values = st.sampled_from([name for name, size in line.sizes.items() if size])
        value, kind = draw(values), draw(st.sampled_from(["slice", "strided", "concat", "split", "select"]))
        size = line.sizes[value]
        if kind == "slice":
            start = draw(st.integers(0, size - 1))
            end = draw(st.integers(start + 1, size))
            line.slice(value, start - size if draw(st.booleans()) else start, end if end < size else 2**63 - 1)
        elif kind == "strided":
            line.strided(value, draw(st.integers(0, size - 1)), draw(st.integers(1, 3)))
        elif kind == "concat" and size < 30:
            line.concat(value, *draw(st.lists(values, min_size=1, max_size=3)))
        elif kind == "split" and size > 1:
            first = draw(st.integers(1, size - 1))
            line.add("Split", [value, line.numbers(first, size - first)], first, size - first, axis=AXIS)
        elif kind == "select":
            line.select(value, draw(st.integers(-size, size - 1)))
    made = [name for name, size in line.sizes.items() if size]
    return line.model(*draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))), line.feed()


@settings(deadline=None, max_examples=80)
@given(lines())
def test_any_slices_joins_splits_and_selections_give_the_same_bits_and_read_no_join_of_a_join(drawn):
    model, feed = drawn
    wanted, names = run(model, feed), [value.name for value in model.graph.outputs]
    improve(model)
    found = run(model, feed)
    assert [value.name for value in model.graph.outputs] == names
    for want, got in zip(wanted, found, strict=True):
        assert got.shape == want.shape
        assert got.tobytes() == want.tobytes()
    joins = [node for node in model.graph if node.op_type == "Concat"]
    assert not any(value.producer() in joins for node in joins for value in node.inputs)
    cuts = [node for node in model.graph if node.op_type in ("Slice", "Split")]
    steps = [node for node in cuts if len(node.inputs) == 5]
    assert not any(
        node.inputs[0].producer() in cuts for node in cuts if not {node, node.inputs[0].producer()} & {*steps}
    )


@pytest.fixture(autouse=True)
def _this_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improving, "PASSES", (join_once,))


def improved(line: Line, *results: str) -> dict[str, int]:
    model = line.model(*results)
    wanted = run(model, line.feed())
    improve(model)
    for want, got in zip(wanted, run(model, line.feed()), strict=True):
        assert got.tobytes() == want.tobytes()
    found = kinds(model)
    del found["Identity"], found["Neg"]
    return found


FORMS: dict[str, tuple[Any, dict[str, int]]] = {
    "a slice of a join is what was joined": (lambda line: [line.slice(line.concat("a", "b"), 4, 9)], {}),
    "a slice within it is a slice of that": (lambda line: [line.slice(line.concat("a", "b"), 5, 7)], {"Slice": 1}),
    "one position of a join is selected from what was joined": (
        lambda line: [line.select(line.concat("a", "b"), 5)],
        {"Gather": 1, "Unsqueeze": 1},
    ),
    "a join of joins is one": (lambda line: [line.concat(line.concat("a", "b"), line.concat("b", "a"))], {"Concat": 1}),
    "slices that follow each other are none": (
        lambda line: [line.concat(line.slice("a", 0, 1), line.slice("a", 1, 3), line.slice("a", 3, 4))],
        {},
    ),
    "a slice of a slice is one": (lambda line: [line.slice(line.slice("b", 1, 5), 1, 3)], {"Slice": 1}),
    "equal slices are one": (
        lambda line: [line.concat(line.slice("b", 1, 3), "a"), line.concat("a", line.slice("b", -4, 3))],
        {"Slice": 1, "Concat": 2},
    ),
    "a slice that is read elsewhere is read again": (
        lambda line: [one := line.slice("b", 1, 3), line.concat(one, line.slice("a", 0, 4))],
        {"Slice": 1, "Concat": 1},
    ),
    "what was given another form is left in it": (
        lambda line: [line.select(line.concat("a", line.reshaped("b")), 6)],
        {"Reshape": 1, "Gather": 1, "Unsqueeze": 1},
    ),
    "positions that keep their axis stay": (
        lambda line: [line.add("Gather", [line.concat("a", "b"), line.numbers(5)], 1, axis=AXIS)[0]],
        {"Concat": 1, "Gather": 1},
    ),
    "slices along two axes at once stay": (
        lambda line: line.add(
            "Slice", [line.concat("a", "b"), *(line.numbers(*two) for two in ((4, 0), (9, 1), (1, 2)))], 5
        ),
        {"Slice": 1, "Concat": 1},
    ),
    "a slice over several of what was joined stays": (
        lambda line: [line.slice(line.concat("a", "b"), 3, 6)],
        {"Slice": 1, "Concat": 1},
    ),
    "a slice along another axis stays": (
        lambda line: [line.slice(line.concat("a", "b"), 0, 1, axis=2)],
        {"Slice": 1, "Concat": 1},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    make, wanted = FORMS[name]
    line = Line({"a": 4, "b": 5})
    assert improved(line, *make(line)) == wanted


def test_two_results_that_become_one_value_are_both_there_by_their_names():
    line = Line({"a": 4, "b": 5})
    (made,) = line.add("Neg", ["a"], 4)
    twice = [line.slice(line.concat(made, "b"), 0, 4), line.slice(line.concat("b", made), 5, 9), line.slice("a", 0, 4)]
    model = small(line.nodes, line.inputs, line.constants, twice)
    improve(model)
    a = line.feed()["a"]
    for found, wanted in zip(run(model, line.feed()), (-a, -a, a), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert [value.name for value in model.graph.outputs] == twice


def test_a_loop_that_moves_a_cache_many_times_reads_no_square_of_values():
    line = Line({"cache": 100, "x": 1})
    last = "cache"
    for _ in range(90):
        last = line.concat(line.slice(last, 1, 100), *line.add("Tanh", [line.slice(last, 0, 1)], 1))
    model = line.model(last)
    improve(model)
    assert max(len(node.inputs) for node in model.graph if node.op_type == "Concat") <= 64
