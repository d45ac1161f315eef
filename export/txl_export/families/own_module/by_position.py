"""Makes steps of segments from a step that takes one position: x ("B", 12) becomes x ("B", "L", 12).

In eager mode the module is called position by position. A bundle's graph is made in a special way: the step is captured
once, with one position and many sequences, and `graphs.positions` makes each program from that graph. In all other
respects the step is proven and written like any step of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
import torch
from txl_runtime.errors import UsageError, one_line
from txl_runtime.guard.forms import OPSETS

from txl_export.families.own_module.any_batch import of_sequences
from txl_export.families.own_module.capture import Capture, Captured
from txl_export.families.own_module.module_call import called
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.rehearsal import Example, RehearsalError, rehearse
from txl_export.families.own_module.spec import VALID, InputSpec, Named, Shape, StepSpec
from txl_export.families.own_module.stages import Transition
from txl_export.graphs.opening import open_batch
from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.positions import UnliftedError, lifted
from txl_export.graphs.settling import settle
from txl_export.graphs.unsettled import UnsettledError


def by_position(spec: StepSpec, lengths: Sequence[int]) -> StepSpec:
    """Return a step of segments for a step of one position, if segments are longer than 1; else `spec` itself.

    Args:
        spec: the step; a step with "L" in an input is returned as it is.
        lengths: the segment lengths L of the export; () for the lengths of the specification.

    Raises:
        UsageError: the step's positions cannot be computed side by side.
    """
    longest = max(lengths or spec.segment_lengths, default=1)
    if spec.has_length or longest < 2:
        return spec
    for what, entries in (("input", spec.inputs), ("state", spec.states), ("output", spec.output_specs)):
        for entry in entries:
            if entry.shape is not None and entry.axes.batch is None:
                _refuse(f"{what} {entry.name} is shared by all sequences")
    for state in spec.states:
        if state.grows is not None or state.initial is None:
            _refuse(f"state {state.name} {'grows' if state.grows is not None else 'is absent at first'}")
    if spec.lengths:
        _refuse("the module takes valid")
    input_specs = [replace(one, shape=_with_positions(one.shape)) for one in spec.inputs]
    output_specs = [
        one if one.shape is None else replace(one, shape=_with_positions(one.shape)) for one in spec.output_specs
    ]
    samples = spec.samples and {one.name: _in_a_row(one, spec.samples[one.name], longest) for one in spec.inputs}
    places = {one.name: (one.axes.batch or 0) + 1 for one in (*spec.inputs, *spec.output_specs)}

    def step(module: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
        one, results = replace(spec, module=module), list[Named]()
        for position in range(next(iter(inputs.values())).shape[places[input_specs[0].name]]):
            here = {name: values.select(places[name], position) for name, values in inputs.items()}
            outputs, states = called(one, here, states, None)
            results.append({name: values.clone() for name, values in outputs.items()})
        return {name: torch.stack([each[name] for each in results], places[name]) for name in results[0]}, states

    return replace(spec, inputs=input_specs, outputs=output_specs, samples=samples, step=step)


def lifting(plan: Plan, make: Callable[[Plan], Capture]) -> Capture:
    """Return the function that makes the graphs of the programs of a step that `by_position` returned.

    Args:
        plan: the plan of segments.
        make: returns the capturing function for a plan of one position.

    Raises:
        UsageError: sequences depend on one another. The returned function raises it, too, if the step's graph takes
            only one number of sequences, or computes something else for positions.
    """
    if plan.streams != "independent":
        _refuse(f"the sequences run all or none: {plan.reason}")
    # B + 1, because any_batch captures with one sequence more
    one, most = _of_one(plan), max(plan.segment_lengths) * (plan.batch_size + 1)
    axes = {entry.name: entry.axes for entry in (*plan.spec.inputs, *plan.outputs)}

    @cache
    def opened() -> Captured:
        try:
            network, examples = of_sequences(one, 1, most, 2)
        except UsageError as error:
            _refuse(f"positions become sequences, and it does not take {most}, L · (B + 1): {error}")
        graph = make(one)(network, "step-1", examples)
        try:
            network, examples = of_sequences(one, 1, most + 1)
            open_batch(graph.model, graph.again(network, examples[0]), most)
        except Exception as error:  # the user's code may allow only one B, and torch raises many kinds of errors
            _refuse(f"B has to be an axis of its own, or fold with others as B · H, B first: {one_line(error)}")
        return graph

    def again(name: str, network: StepNetwork, *_: Example) -> ir.Model:
        first = network.inputs[0]
        batch = int(first.shape[axes[first.name].batch or 0])
        program = lifted(opened().model, len(plan.states), axes, batch, network.length)
        _keep_idle(program.graph, plan)
        settle(program, name, network.inputs, network.outputs, OPSETS)
        return program

    def made(network: StepNetwork, name: str, examples: Sequence[Example]) -> Captured:
        try:
            model = again(name, network)
            rehearse(model, network, examples)
        except (UnliftedError, UnsettledError, RehearsalError) as error:
            _refuse(str(error))
        return Captured(name, network, examples, model, opened().route, partial(again, name))

    return made


def _of_one(plan: Plan) -> Plan:
    """Return the plan of the step of one position, in which no sequence is ever idle."""
    spec = plan.spec
    places = {entry.name: entry.axes.positions[0] for entry in (*spec.inputs, *plan.outputs)}

    def step(module: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
        singles = {name: values.unsqueeze(places[name]) for name, values in inputs.items()}
        outputs, after = called(replace(spec, module=module), singles, states, None)
        return {name: values.select(places[name], 0) for name, values in outputs.items()}, after

    one = replace(
        spec,
        inputs=[replace(entry, shape=entry.axes.still.shape) for entry in spec.inputs],
        outputs=[replace(entry, shape=entry.axes.still.shape) for entry in plan.outputs],
        samples=spec.samples and {name: np.take(values, 0, places[name]) for name, values in spec.samples.items()},
        step=step,
        segment_lengths=(1,),
    )
    stage = plan.transitions[0].stage
    return replace(plan, spec=one, segment_lengths=(1,), transitions=(Transition(stage, 1, stage),), streams="lockstep")


def _keep_idle(graph: ir.Graph, plan: Plan) -> None:
    """Keep the states of idle sequences: add the input `valid`, and a Where before each state's output."""
    build, inputs = Builder(graph, "idle"), {value.name: value for value in graph.inputs}
    valid = ir.Value(name=VALID, type=ir.TensorType(ir.DataType.INT32))
    graph.inputs.append(valid)
    live = build.op("Greater", [valid, build.constant(np.array(0, np.int32))])
    live.type = ir.TensorType(ir.DataType.BOOL)
    for place, state in enumerate(plan.states, len(plan.results)):
        rows = [-1 if axis == state.batch_axis else 1 for axis in range(len(state.shape))]
        flags = build.reshape(live, rows) if len(rows) > 1 else live
        state_after = build.op("Where", [flags, graph.outputs[place], inputs[state.input]])
        state_after.type = inputs[state.input].type
        graph.outputs[place] = state_after


def _with_positions(shape: Shape) -> Shape:
    """Return a shape with "L" after "B": ("B", "L", 12) for ("B", 12)."""
    behind = shape.index("B") + 1
    return (*shape[:behind], "L", *shape[behind:])


def _in_a_row(entry: InputSpec, samples: Any, length: int) -> Any:
    """Return samples of an input, e.g. [n, 12], as positions of one sequence, [1, n, 12]; repeated up to `length`."""
    axis, values = entry.axes.batch or 0, np.asarray(samples)
    if values.ndim != len(entry.shape) or not values.shape[axis]:
        return values  # check_spec refuses such samples with a message
    rows = np.arange(max(values.shape[axis], length)) % values.shape[axis]
    return np.expand_dims(np.take(values, rows, axis), axis)


def _refuse(reason: str) -> NoReturn:
    raise UsageError(
        f"segments of several positions cannot be made of this step of one: {reason}; export it with "
        '--segment-length 1, or give it inputs with "L"'
    )
