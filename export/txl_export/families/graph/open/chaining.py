"""Checks that segments of a graph, one after another, compute what the graph computes for all positions at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from txl_runtime.errors import CheckError, UsageError, printable, some
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Array

from txl_export.families.graph.find.nodes import RECURRENT, name_of
from txl_export.families.graph.open.hidden import Hidden
from txl_export.families.graph.take.file_module import Call, FileStep
from txl_export.families.own_module.module_call import Eager, Held
from txl_export.families.own_module.sizes import fresh_states, random_inputs
from txl_export.families.own_module.spec import StateSpec, StepSpec

_Found = Mapping[str, Array]
LIMIT = 1e-5
"""Largest difference of outputs of a chain from outputs for all positions at once, relative to the largest value."""
SMALL = 1e-3
"""Largest difference of results whose largest value is below 1, relative to that value."""
SEGMENTS, LEAST = 6, 48
"""Least number of segments of a chain, and of its positions; a window of 8 positions is full at the end of such a
chain."""
WHOLE = 3
"""Least number of segments that are compared with shorter segments over the same positions."""
POSITIONS = 12
"""Number of chained calls if a call is one position."""


@dataclass(frozen=True)
class OpenedGraph:
    """A graph with explicit hidden states (`model`), these states, and a function that opens a graph to run it."""

    model: ir.Model
    hidden: Sequence[Hidden]
    start: Callable[[ir.Model], Call]

    def __str__(self) -> str:
        return some([one.input for one in self.hidden])


def check_opened(
    spec: StepSpec, step: FileStep, batch: int, lengths: Sequence[int], whole: Call, opened: OpenedGraph
) -> None:
    """Compare the graph with explicit states with the file, which forgets its hidden states after each call.

    Args:
        spec: the specification of the opened graph.
        step: names of tensors in the file.
        batch: the batch size B.
        lengths: segment lengths.
        whole: runs the file over the positions of several segments; over one position if a call is one position.
        opened: the opened graph.

    Raises:
        UsageError: nothing can show what a chain should return.
        CheckError: a chain returns other results than the file.
    """
    own = {one.input: one.initial for one in opened.hidden}
    firsts = {side.spec.name: own[side.port] for side, _ in step.states if side.port in own}
    spec = replace(
        spec, states=[_as_found(entry, firsts[entry.name]) if entry.name in firsts else entry for entry in spec.states]
    )
    if not spec.has_length:
        _check_alone(spec, step, batch, whole, opened)
        return
    for length in lengths:
        segments = max(SEGMENTS, -(-LEAST // length))
        try:
            wanted = whole(_feeds(step, *_start_of(spec, batch, length * segments), step.shown))
        except UsageError as error:
            raise UsageError(
                f"--open made {opened} explicit, and nothing shows that a chain is right, because the file does not "
                f"run with {length * segments} positions at once ({error}); export it with an open length, or the "
                "module that it was made of"
            ) from None
        results = _chained(spec, batch, length * segments, length)
        for side in step.outputs:
            name = f"{side.port} of {segments} segments of {length}"
            _check(opened, name, results[side.spec.name], wanted[side.port], "the file's own run over all of them")


def _check_alone(spec: StepSpec, step: FileStep, batch: int, whole: Call, opened: OpenedGraph) -> None:
    """Check a file whose call is one position: run each recurrence by itself over all positions that the chain gave it.

    All other nodes are the same in chain and file; the first call of both is compared, too.
    """
    if others := [one.input for one in opened.hidden if one.op not in RECURRENT]:
        raise UsageError(
            f"--open made {others[0]} explicit, and nothing shows that a chain is right, because a call of the file is "
            "one position; give --position-axis NAME=N where positions stand, or export the module that it was made of"
        )
    graph, names = (model := opened.model.clone()).graph, {one.node for one in opened.hidden}
    nodes = [node for node in graph if node.op_type in RECURRENT and name_of(node) in names]
    both = (end for node in nodes for end in (*node.inputs, *node.outputs) if end is not None and end.name)
    ends = [*dict.fromkeys(end for end in both if end.const_value is None)]
    for end in ends:
        graph.append(shown := ir.node("Identity", [end]))
        shown.outputs[0].name = f"{end.name} shown"
        graph.outputs.append(shown.outputs[0])
    draws, after, calls = np.random.default_rng(3), {side.port: output for side, output in step.states}, list[_Found]()
    run, states = opened.start(model), fresh_states(spec, batch)
    held = first = _feeds(step, {}, states, after)
    for _ in range(POSITIONS):
        segment = _feeds(step, random_inputs(spec, batch, 1, draws, spec.samples), states, ())
        calls.append(run({**segment, **held}))
        held = {name: calls[-1][output] for name, output in after.items()}
        if len(calls) == 1:
            own = whole({**segment, **{name: first[name] for name in step.shown}})
            for side in step.outputs:
                _check(opened, side.port, calls[0][side.port], own[side.port], "the file's own first call")
    for node in nodes:
        inputs, outputs = ([end for end in side if end in ends] for side in (node.inputs, node.outputs))
        feeds = {str(end.name): calls[0][f"{end.name} shown"] for end in inputs}
        feeds[str(inputs[0].name)] = np.concatenate([call[f"{inputs[0].name} shown"] for call in calls])
        results = opened.start(_alone(inputs, outputs))(feeds)
        for end in outputs:
            steps = [call[f"{end.name} shown"] for call in calls]
            values = np.concatenate(steps) if end is node.outputs[0] else steps[-1]
            other = f"{node.op_type} {printable(name_of(node))!r} alone over {POSITIONS} positions"
            _check(opened, printable(str(end.name)), values, results[str(end.name)], other)


def _alone(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
    """Return a recurrence as a model with these inputs, of which the last is a hidden state, and these results."""
    kind = inputs[-1].type
    for end in (*inputs, *outputs):
        end.type, end.shape = end.type or kind, None
    return ir.Model(ir.convenience.extract(outputs[0].graph, inputs, outputs), ir_version=8)  # type: ignore[arg-type]


def _as_found(entry: StateSpec, first: Array | None) -> StateSpec:
    """Return a state with the file's initial value in place of the user's."""
    return replace(entry, initial=0.0 if first is None else torch.from_numpy(first.astype(np.float32)))


def _check(opened: OpenedGraph, name: str, values: Array, wanted: Array, other: str) -> None:
    if not (apart := _apart(values, wanted)) <= LIMIT:
        raise CheckError(
            f"with {opened} carried on, {name} is {apart:.1g} from {other}, expected at most {LIMIT:g}: something else "
            "begins anew in each call, or needs positions that come later; leave out --open, or export the module that "
            "it was made of"
        )


def divisible(spec: StepSpec, batch: int, length: int, shorter: int) -> bool:
    """Return whether shorter segments compute the same as longer segments over the same positions.

    Several segments are run, because the first may return the same and leave different states.
    """
    total = math.lcm(length, shorter) * WHOLE
    try:
        wanted, chain = (_chained(spec, batch, total, each) for each in (length, shorter))
    except UsageError:
        return False
    return all(_apart(chain[name], values) <= LIMIT for name, values in wanted.items())


def _start_of(spec: StepSpec, batch: int, length: int) -> tuple[Mapping[str, Tensor], Held]:
    """Return inputs of `length` positions and initial states, equal in every call.

    The inputs come from samples if these are long enough.
    """
    samples = spec.samples
    enough = samples is not None and all(
        np.shape(samples[entry.name])[axis] >= length for entry in spec.inputs for axis in entry.axes.positions
    )
    drawn = random_inputs(spec, batch, length, np.random.default_rng(3), samples if enough else None)
    return drawn, fresh_states(spec, batch)


def _feeds(
    step: FileStep, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], taken: Collection[str]
) -> dict[str, Array]:
    """Return arrays by the file's names for inputs and for the states in `taken`."""
    sides = [(side, inputs.get(side.spec.name)) for side in step.inputs]
    sides += [(side, states[side.spec.name]) for side, _ in step.states if side.port in taken]
    return {side.port: tensor.numpy().astype(side.dtype) for side, tensor in sides if tensor is not None}


def _chained(spec: StepSpec, batch: int, total: int, length: int) -> dict[str, Array]:
    """Return the outputs of segments, one after another, over the positions of `_start_of`."""
    eager, parts = Eager(spec), list[Mapping[str, Tensor]]()
    inputs, held = _start_of(spec, batch, total)
    counts = torch.full((batch,), length, dtype=torch.int32)
    axes = {entry.name: entry.axes.positions for entry in (*spec.inputs, *spec.output_specs)}
    for first in range(0, total, length):
        given = {
            name: tensor.narrow(axes[name][0], first, length) if axes[name] else tensor
            for name, tensor in inputs.items()
        }
        outputs, held = eager(given, held, counts)
        parts.append(outputs)
    return {
        name: (torch.cat([part[name] for part in parts], axes[name][0]) if axes[name] else last).numpy()
        for name, last in parts[-1].items()
    }


def _apart(values: Array, wanted: Array) -> float:
    if values.shape != wanted.shape:
        return float("inf")
    apart = relative_difference(values, wanted.astype(values.dtype))
    largest = float(np.abs(wanted).max(initial=0.0))
    # Relative to the largest result if that is below 1: an absolute limit would pass any result around 1e-6.
    return max(apart, apart / largest * LIMIT / SMALL) if 0 < largest < 1 else apart
