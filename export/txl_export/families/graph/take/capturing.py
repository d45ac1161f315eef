"""Makes a bundle's programs from an ONNX graph: with fixed sizes, and with operators that bundles allow.

For each program ONNX Runtime folds the graph anew, in the helper process: with fixed sizes, most of the arithmetic on
shapes that exporters write vanishes. Nodes around the graph add what a bundle requires: its dtypes, normalised logits,
and idle sequences that keep their states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.errors import UsageError

from txl_export.families.graph.take.file_module import FileStep
from txl_export.families.graph.take.fixing import forget_sizes
from txl_export.families.graph.take.reading import copied
from txl_export.families.graph.take.running import Helper, RunError
from txl_export.families.own_module.capture import Capture, Captured
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.rehearsal import Example, RehearsalError, rehearse
from txl_export.families.own_module.spec import VALID, OutputSpec
from txl_export.graphs.opsets import READABLE, as_standard
from txl_export.graphs.quantised_matmul import initializer
from txl_export.graphs.settling import settle
from txl_export.graphs.unsettled import UnsettledError

_TYPES = {"float32": ir.DataType.FLOAT, "int32": ir.DataType.INT32, "bool": ir.DataType.BOOL}


def capturing(graph: ir.Model, step: FileStep, plan: Plan, helper: Helper) -> Capture:
    """Return a function that makes programs' graphs, each from a copy of the file's graph."""

    def again(name: str, network: StepNetwork, _: Example) -> ir.Model:
        try:
            model = helper.fold(_sized(graph, step, network))
        except RunError as error:
            raise UsageError(f"{name} cannot be made of the file: {error}") from None
        ir.external_data.load_to_model(model)
        as_standard(model.graph)
        _put_around(model.graph, step, plan, network)
        TopologicalSortPass()(model)
        settle(model, name, network.inputs, network.outputs, READABLE)
        return model

    def make(network: StepNetwork, name: str, examples: Sequence[Example]) -> Captured:
        try:
            model = again(name, network, examples[0])
            rehearse(model, network, examples)
        except (UnsettledError, RehearsalError) as error:
            raise UsageError(
                f"{name} cannot be made of the file: {error}; expected operators that a bundle's graphs may have, see "
                "docs/bundle-forms.json"
            ) from None
        return Captured(name, network, examples, model, "the file", partial(again, name))

    return make


def _sized(graph: ir.Model, step: FileStep, network: StepNetwork) -> ir.Model:
    """Return a copy of the graph with a program's sizes."""
    model = copied(graph)
    sizes = {spec.name: spec.shape for spec in network.inputs}
    shapes = {side.port: sizes[side.spec.name] for side in step.inputs}
    shapes |= {side.port: sizes[f"state.{side.spec.name}.in"] for side, _ in step.states}
    for value in model.graph.inputs:
        value.shape = ir.Shape(shapes[str(value.name)])
    for value in model.graph.outputs:
        value.shape = None
    forget_sizes(model.graph)
    return model


def _put_around(graph: ir.Graph, step: FileStep, plan: Plan, network: StepNetwork) -> None:
    """Replace a graph's inputs and outputs by the program's, in its order, in place."""
    graph_inputs = {
        spec.name: ir.Value(name=spec.name, type=ir.TensorType(_TYPES[spec.dtype])) for spec in network.inputs
    }
    kinds = {spec.name: _TYPES[spec.dtype] for spec in network.outputs}
    states = {state.name: state for state in plan.states}
    ports = {side.port: graph_inputs[side.spec.name] for side in step.inputs}
    ports |= {side.port: graph_inputs[states[side.spec.name].input] for side, _ in step.states}
    results = {str(value.name): value for value in graph.outputs}

    def node(op: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        graph.append(result := ir.node(op, inputs, attributes=attributes))
        return result.outputs[0]

    def number(values: int | list[int], kind: ir.DataType) -> ir.Value:
        return initializer(graph, f"around.{len(graph.initializers)}", ir.tensor(values, dtype=kind).numpy())

    def cast(value: ir.Value, kind: ir.DataType | None) -> ir.Value:
        return value if kind is None or value.dtype == kind else node("Cast", value, to=kind.value)

    def after(state: StateTensor, port: str) -> ir.Value:
        """Return the state after the step; for an idle sequence, the state before the step."""
        value = cast(results[port], kinds[state.output])
        if plan.streams != "independent" or state.batch_axis is None:
            return value
        live = node("Greater", graph_inputs[VALID], number(0, ir.DataType.INT32))
        if axes := [axis for axis in range(len(state.shape)) if axis != state.batch_axis]:
            live = node("Unsqueeze", live, number(axes, ir.DataType.INT64))
        return node("Where", live, value, graph_inputs[state.input])

    for own in graph.inputs:
        cast_value = cast(ports[str(own.name)], own.dtype)
        ir.convenience.replace_all_uses_with(own, cast_value, replace_graph_outputs=True)
        results = {port: cast_value if value is own else value for port, value in results.items()}
    returned = [
        node("LogSoftmax", results[side.port], axis=-1)
        if isinstance(side.spec, OutputSpec) and side.spec.role == "logits"
        else cast(results[side.port], kinds[side.spec.name])
        for side in step.outputs
    ]
    returned += [after(states[side.spec.name], port) for side, port in step.states]
    for ends, values in ((graph.inputs, graph_inputs.values()), (graph.outputs, returned)):
        ends.clear()
        ends.extend(values)
