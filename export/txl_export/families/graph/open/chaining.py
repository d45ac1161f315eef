"""Whether segments of a graph, one after another, compute what it computes of all their positions at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from txl_runtime.errors import CheckError, UsageError, printable, some
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Array

from txl_export.families.graph.open.hidden import Hidden, named
from txl_export.families.graph.open.measuring import RECURRENT
from txl_export.families.graph.take.file_module import Call, FileStep
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states, random_inputs
from txl_export.families.own_module.spec import StepSpec

_Found = Mapping[str, Array]
LIMIT = 1e-5
"""How far chained outputs may be from those of all positions at once, relative to the largest."""
SEGMENTS, LEAST = 6, 48
"""Segments that are chained; more of short ones, until they have so many positions: a window of 8 is full then."""
WHOLE = 3
"""Segments that are also run in shorter ones, or as often as many as it takes for these to end with them."""
POSITIONS = 12
"""Calls that are chained where one is one position."""


@dataclass(frozen=True)
class Opened:
    """A graph whose hidden states are explicit.

    Attributes:
        model: the graph.
        hidden: its states that were hidden.
        start: makes a graph run.
    """

    model: ir.Model
    hidden: Sequence[Hidden]
    start: Callable[[ir.Model], Call]

    def __str__(self) -> str:
        return some([one.input for one in self.hidden])


def check_opened(
    spec: StepSpec, step: FileStep, batch: int, lengths: Sequence[int], whole: Call, opened: Opened
) -> None:
    """Hold the graph with its hidden states open against the file, which forgets them after each call.

    Args:
        spec: of the graph.
        step: what it and the file call their tensors.
        batch: B.
        lengths: of segments.
        whole: the file, for positions of several segments; where a call is one position, for one.
        opened: the graph.

    Raises:
        UsageError: nothing shows what a chain should return.
        CheckError: a chain returns something else.
    """
    if not any(entry.axes.positions for entry in spec.inputs):
        _check_alone(spec, step, batch, whole, opened)
        return
    for length in lengths:
        segments = max(SEGMENTS, -(-LEAST // length))
        inputs, states = _given(spec, batch, length * segments), _starts(spec, step, batch, opened)
        try:
            wanted = whole(_feeds(step, inputs, states, step.shown))
        except UsageError as error:
            raise UsageError(
                f"--open made {opened} explicit, and nothing shows that a chain is right, because the file does not "
                f"run with {length * segments} positions at once ({error}); export it with an open length, or the "
                "module that it was made of"
            ) from None
        found = _chained(spec, inputs, states, batch, length)
        for side in step.outputs:
            name = f"{side.port} of {segments} segments of {length}"
            _check(opened, name, found[side.spec.name], wanted[side.port], "the file's own run over all of them")


def _check_alone(spec: StepSpec, step: FileStep, batch: int, whole: Call, opened: Opened) -> None:
    """Of a file whose call is one position: run each recurrence alone over all positions that the chain gave it.

    What lies around the recurrences is the same graph in the chain and in the file, whose first call is compared too.
    """
    if others := [one.input for one in opened.hidden if one.op not in RECURRENT]:
        raise UsageError(
            f"--open made {others[0]} explicit, and nothing shows that a chain is right, because a call of the file is "
            "one position; give --position-axis NAME=N where positions stand, or export the module that it was made of"
        )
    graph, names = (model := opened.model.clone()).graph, {one.node for one in opened.hidden}
    nodes = {named(node): node for node in graph if node.op_type in RECURRENT and named(node) in names}
    for name, node in nodes.items():
        ends = [(f"in.{at}", value) for at, value in enumerate(node.inputs)]
        for place, value in [*ends, *((f"out.{at}", value) for at, value in enumerate(node.outputs))]:
            if value is not None and value.const_value is None:
                value.name = value.name or f"{place} {name}."
                graph.append(shown := ir.node("Identity", [value]))
                shown.outputs[0].name = f"{place} {name}"
                graph.outputs.append(shown.outputs[0])
    draws, after, calls = np.random.default_rng(3), {side.port: output for side, output in step.states}, list[_Found]()
    run, states = opened.start(model), _starts(spec, step, batch, opened)
    held = first = _feeds(step, {}, states, after)
    for _ in range(POSITIONS):
        given = _feeds(step, random_inputs(spec, batch, 1, draws, spec.samples), states, ())
        calls.append(run({**given, **held}))
        held = {name: calls[-1][output] for name, output in after.items()}
        if len(calls) == 1:
            own = whole({**given, **{name: first[name] for name in step.shown}})
            for side in step.outputs:
                _check(opened, side.port, calls[0][side.port], own[side.port], "the file's own first call")
    for name, node in nodes.items():
        alone = _alone(node)
        feeds = {str(value.name): calls[0][f"{value.name} {name}"] for value in alone.graph.inputs}
        results = opened.start(alone)({**feeds, "in.0": np.concatenate([call[f"in.0 {name}"] for call in calls])})
        for place, wanted in results.items():
            steps = [call[f"{place} {name}"] for call in calls]
            found = np.concatenate(steps) if place == "out.0" else steps[-1]
            other = f"{node.op_type} {printable(name)!r} alone over {POSITIONS} positions"
            _check(opened, place, found, wanted, other)


def _starts(spec: StepSpec, step: FileStep, batch: int, opened: Opened) -> dict[str, Tensor | None]:
    """First states; of those that were hidden what the file begins with, where the user says another first value."""
    states, own = dict(fresh_states(spec, batch)), {one.input: one.initial for one in opened.hidden}
    for side, _ in step.states:
        first = states[side.spec.name]
        if side.port in own and first is not None:
            start = np.zeros(()) if (said := own[side.port]) is None else said
            states[side.spec.name] = torch.from_numpy(np.broadcast_to(start, first.shape).astype(first.numpy().dtype))
    return states


def _alone(node: ir.Node) -> ir.Model:
    """A recurrence alone, whose inputs and outputs are called after their places, as in.0 and out.1."""
    kind = ir.TensorType(next(value.const_value.dtype for value in node.inputs[1:] if value and value.const_value))
    taken = [
        value and ir.Value(name=f"in.{at}", type=kind, const_value=value.const_value)
        for at, value in enumerate(node.inputs)
    ]
    alone = ir.node(node.op_type, taken, dict(node.attributes), num_outputs=len(node.outputs))
    for at, value in enumerate(alone.outputs):
        value.name, value.type = f"out.{at}", kind
    given = [value for value in taken if value is not None]
    inputs, constants = ([value for value in given if (value.const_value is None) == bare] for bare in (True, False))
    graph = ir.Graph(inputs, alone.outputs, nodes=[alone], initializers=constants, opset_imports={"": 18}, name="alone")
    return ir.Model(graph, ir_version=8)


def _check(opened: Opened, name: str, found: Array, wanted: Array, other: str) -> None:
    if not (apart := _apart(found, wanted)) <= LIMIT:
        raise CheckError(
            f"with {opened} carried on, {name} is {apart:.1g} from {other}, expected at most {LIMIT:g}: something else "
            "begins anew in each call, or needs positions that come later; leave out --open, or export the module that "
            "it was made of"
        )


def divisible(spec: StepSpec, batch: int, length: int, shorter: int) -> bool:
    """Whether shorter segments give what longer ones give of the same positions, so that part of a segment can run.

    Several segments are run, because a first one may return the same and leave other states behind.
    """
    total = math.lcm(length, shorter) * WHOLE
    inputs, states = _given(spec, batch, total), fresh_states(spec, batch)
    try:
        wanted, found = (_chained(spec, inputs, states, batch, each) for each in (length, shorter))
    except UsageError:
        return False
    return all(_apart(found[name], values) <= LIMIT for name, values in wanted.items())


def _given(spec: StepSpec, batch: int, length: int) -> dict[str, Tensor]:
    samples = spec.samples
    enough = samples is not None and all(
        np.shape(samples[entry.name])[axis] >= length for entry in spec.inputs for axis in entry.axes.positions
    )
    return random_inputs(spec, batch, length, np.random.default_rng(3), samples if enough else None)


def _feeds(
    step: FileStep, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], taken: Collection[str]
) -> dict[str, Array]:
    """By the file's names: inputs, as far as they are given, and the states that are taken."""
    sides = [(side, inputs.get(side.spec.name)) for side in step.inputs]
    sides += [(side, states[side.spec.name]) for side, _ in step.states if side.port in taken]
    return {side.port: tensor.numpy().astype(side.dtype) for side, tensor in sides if tensor is not None}


def _chained(
    spec: StepSpec, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], batch: int, length: int
) -> dict[str, Array]:
    """Outputs of all segments, one behind the other."""
    eager, held, parts = Eager(spec), dict(states), list[dict[str, Tensor]]()
    counts = torch.full((batch,), length, dtype=torch.int32)
    axes = {entry.name: entry.axes.positions for entry in spec.inputs}
    total = max(inputs[name].shape[places[0]] for name, places in axes.items() if places)
    for first in range(0, total, length):
        given = {
            name: tensor.narrow(axes[name][0], first, length) if axes[name] else tensor
            for name, tensor in inputs.items()
        }
        outputs, after = eager(given, held, counts)
        held = dict(after)
        parts.append(outputs)
    joined = {}
    for entry in spec.outputs:
        assert not isinstance(entry, str)
        pieces, places = [part[entry.name] for part in parts], entry.axes.positions
        joined[entry.name] = (torch.cat(pieces, places[0]) if places else pieces[-1]).numpy()
    return joined


def _apart(found: Array, wanted: Array) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return relative_difference(found, wanted.astype(found.dtype))
