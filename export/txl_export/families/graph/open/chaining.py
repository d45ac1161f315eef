"""Proof that segments of a graph, one after the other, compute what it computes of all their positions at once."""

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
"""Chained outputs may be this far from those of all positions at once, relative to the largest."""
SMALL = 1e-3
"""The same for results whose largest is below 1, relative to that."""
SEGMENTS, LEAST = 6, 48
"""Segments that are chained; more of short ones, until they have so many positions: a window of 8 is full then."""
WHOLE = 3
"""Segments that are also run in shorter ones, or as often as many as it takes for these to end with them."""
POSITIONS = 12
"""Calls that are chained where one is one position."""


@dataclass(frozen=True)
class Opened:
    """A graph whose hidden states are explicit, these states, and what makes a graph run."""

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
        spec: of the opened graph.
        step: what it and the file call their tensors.
        batch: B.
        lengths: of segments.
        whole: runs the file over positions of several segments; where a call is one position, over one.
        opened: see there.

    Raises:
        UsageError: nothing shows what a chain should return.
        CheckError: a chain returns something else.
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
            wanted = whole(_feeds(step, *_given(spec, batch, length * segments), step.shown))
        except UsageError as error:
            raise UsageError(
                f"--open made {opened} explicit, and nothing shows that a chain is right, because the file does not "
                f"run with {length * segments} positions at once ({error}); export it with an open length, or the "
                "module that it was made of"
            ) from None
        found = _chained(spec, batch, length * segments, length)
        for side in step.outputs:
            name = f"{side.port} of {segments} segments of {length}"
            _check(opened, name, found[side.spec.name], wanted[side.port], "the file's own run over all of them")


def _check_alone(spec: StepSpec, step: FileStep, batch: int, whole: Call, opened: Opened) -> None:
    """Run each recurrence alone over all positions that the chain gave it, for a file whose call is one position.

    What lies around the recurrences is the same graph in the chain and in the file, whose first call is compared too.
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
        given = _feeds(step, random_inputs(spec, batch, 1, draws, spec.samples), states, ())
        calls.append(run({**given, **held}))
        held = {name: calls[-1][output] for name, output in after.items()}
        if len(calls) == 1:
            own = whole({**given, **{name: first[name] for name in step.shown}})
            for side in step.outputs:
                _check(opened, side.port, calls[0][side.port], own[side.port], "the file's own first call")
    for node in nodes:
        taken, made = ([end for end in side if end in ends] for side in (node.inputs, node.outputs))
        feeds = {str(end.name): calls[0][f"{end.name} shown"] for end in taken}
        feeds[str(taken[0].name)] = np.concatenate([call[f"{taken[0].name} shown"] for call in calls])
        results = opened.start(_alone(taken, made))(feeds)
        for end in made:
            steps = [call[f"{end.name} shown"] for call in calls]
            found = np.concatenate(steps) if end is node.outputs[0] else steps[-1]
            other = f"{node.op_type} {printable(name_of(node))!r} alone over {POSITIONS} positions"
            _check(opened, printable(str(end.name)), found, results[str(end.name)], other)


def _alone(taken: Sequence[ir.Value], made: Sequence[ir.Value]) -> ir.Model:
    """The recurrence between some inputs, of which the last one is a hidden state, and its results, as a model."""
    kind = taken[-1].type
    for end in (*taken, *made):
        end.type, end.shape = end.type or kind, None
    return ir.Model(ir.convenience.extract(made[0].graph, taken, made), ir_version=8)  # type: ignore[arg-type]


def _as_found(entry: StateSpec, first: Array | None) -> StateSpec:
    """A state that begins as in the file, where the user says other first numbers."""
    return replace(entry, initial=0.0 if first is None else torch.from_numpy(first.astype(np.float32)))


def _check(opened: Opened, name: str, found: Array, wanted: Array, other: str) -> None:
    if not (apart := _apart(found, wanted)) <= LIMIT:
        raise CheckError(
            f"with {opened} carried on, {name} is {apart:.1g} from {other}, expected at most {LIMIT:g}: something else "
            "begins anew in each call, or needs positions that come later; leave out --open, or export the module that "
            "it was made of"
        )


def divisible(spec: StepSpec, batch: int, length: int, shorter: int) -> bool:
    """Tell if shorter segments give what longer ones give of the same positions, so that part of a segment can run.

    Several segments are run, because a first one may return the same and leave other states behind.
    """
    total = math.lcm(length, shorter) * WHOLE
    try:
        wanted, found = (_chained(spec, batch, total, each) for each in (length, shorter))
    except UsageError:
        return False
    return all(_apart(found[name], values) <= LIMIT for name, values in wanted.items())


def _given(spec: StepSpec, batch: int, length: int) -> tuple[Mapping[str, Tensor], Held]:
    """Inputs of as many positions, from the samples where these have them, and first states: the same each time."""
    samples = spec.samples
    enough = samples is not None and all(
        np.shape(samples[entry.name])[axis] >= length for entry in spec.inputs for axis in entry.axes.positions
    )
    drawn = random_inputs(spec, batch, length, np.random.default_rng(3), samples if enough else None)
    return drawn, fresh_states(spec, batch)


def _feeds(
    step: FileStep, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], taken: Collection[str]
) -> dict[str, Array]:
    """Inputs that are given and states that are taken, by the file's names."""
    sides = [(side, inputs.get(side.spec.name)) for side in step.inputs]
    sides += [(side, states[side.spec.name]) for side, _ in step.states if side.port in taken]
    return {side.port: tensor.numpy().astype(side.dtype) for side, tensor in sides if tensor is not None}


def _chained(spec: StepSpec, batch: int, total: int, length: int) -> dict[str, Array]:
    """Outputs of segments of a length over the positions of `_given`, one behind the other."""
    eager, parts = Eager(spec), list[Mapping[str, Tensor]]()
    inputs, held = _given(spec, batch, total)
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


def _apart(found: Array, wanted: Array) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    apart = relative_difference(found, wanted.astype(found.dtype))
    largest = float(np.abs(wanted).max(initial=0.0))
    # Results below 1 are held against 1 there: of ones of 1e-6 everything would pass.
    return max(apart, apart / largest * LIMIT / SMALL) if 0 < largest < 1 else apart
