"""Programs of a foreign graph: its sizes made those of a program, its operators those that a bundle's graphs may have.

The graph is folded anew for each program, by ONNX Runtime in the helper process: with sizes that are numbers, most of
what exporters compute of sizes vanishes. What the file does not do is put around it: types of a bundle, normalised
logits, and states of idle sequences that stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass
from txl_runtime.errors import UsageError
from txl_runtime.guard.forms import OPSETS

from txl_export.families.graph.take.file_module import FileStep, Side
from txl_export.families.graph.take.fixing import copied, forget_sizes
from txl_export.families.graph.take.forms import to_forms
from txl_export.families.graph.take.running import Helper, RunError
from txl_export.families.own_module.capture import Capture, Captured
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.rehearsal import Example, RehearsalError, rehearse
from txl_export.families.own_module.spec import VALID, OutputSpec
from txl_export.graphs.quantised_matmul import initializer
from txl_export.graphs.settling import UnsettledError, settle

_TYPES = {
    "float32": ir.DataType.FLOAT,
    "int32": ir.DataType.INT32,
    "bool": ir.DataType.BOOL,
}


def capturing(graph: ir.Model, step: FileStep, plan: Plan, helper: Helper) -> Capture:
    """What makes the graphs of a file's programs.

    Args:
        graph: of the file, which stays as it is.
        step: what it takes and returns.
        plan: of the bundle.
        helper: folds graphs.
    """

    def again(name: str, network: StepNetwork, _: Example) -> ir.Model:
        try:
            model = helper.fold(_sized(graph, step, network))
        except RunError as error:
            raise UsageError(f"{name} cannot be made of the file: {error}") from None
        ir.external_data.load_to_model(model)
        to_forms(model)
        _Around(model.graph, step, plan, network).put()
        TopologicalSortPass()(model)
        settle(model, name, network.inputs, network.outputs, OPSETS)
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
    """The graph with a program's sizes as its own."""
    model = copied(graph)
    sizes = {spec.name: spec.shape for spec in network.inputs}
    taken = {side.port: sizes[side.spec.name] for side in step.inputs}
    taken |= {side.port: sizes[f"state.{side.spec.name}.in"] for side, _ in step.states}
    for value in model.graph.inputs:
        value.shape = ir.Shape(taken[str(value.name)])
    for value in model.graph.outputs:
        value.shape = None
    forget_sizes(model.graph)
    return model


class _Around:
    """Puts a program's inputs and outputs around a graph's."""

    def __init__(self, graph: ir.Graph, step: FileStep, plan: Plan, network: StepNetwork) -> None:
        self._graph, self._step, self._plan, self._network = graph, step, plan, network
        self._ports = {str(value.name): value for value in graph.inputs}
        self._given = {spec.name: self._input(spec.name, spec.dtype) for spec in network.inputs}
        self._results = {str(value.name): value for value in graph.outputs}

    def put(self) -> None:
        """In place: inputs and outputs are the program's then, in its order."""
        step, states = self._step, {state.name: state for state in self._plan.states}
        for side in step.inputs:
            self._enter(side, side.spec.name)
        for side, _ in step.states:
            self._enter(side, states[side.spec.name].input)
        results = [self._output(side) for side in step.outputs]
        results += [self._after(side, port) for side, port in step.states]
        for ends, values in ((self._graph.inputs, self._given.values()), (self._graph.outputs, results)):
            ends.clear()
            ends.extend(values)

    def _input(self, name: str, dtype: str) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(_TYPES[dtype]))

    def _enter(self, side: Side, name: str) -> None:
        """Let the graph read a program's input where it read its own."""
        given, own = self._given[name], self._ports[side.port]
        kind = own.dtype
        own.name = f"{side.port}.cast"
        made = given if kind == given.dtype else self._node("Cast", [given], to=kind.value if kind else 1)
        ir.convenience.replace_all_uses_with(own, made, replace_graph_outputs=True)
        for port, value in self._results.items():
            self._results[port] = made if value is own else value

    def _output(self, side: Side) -> ir.Value:
        value = self._results[side.port]
        if isinstance(side.spec, OutputSpec) and side.spec.role == "logits":
            return self._node("LogSoftmax", [value], axis=-1)
        return self._as(value, self._dtype(side.spec.name))

    def _after(self, side: Side, port: str) -> ir.Value:
        """The state after the step, that before it for a sequence that is idle."""
        (state,) = (one for one in self._plan.states if one.name == side.spec.name)
        value = self._as(self._results[port], state.dtype)
        if self._plan.streams != "independent" or state.batch_axis is None:
            return value
        live = self._node("Greater", [self._given[VALID], self._number(0, ir.DataType.INT32)])
        axes = [axis for axis in range(len(state.shape)) if axis != state.batch_axis]
        if axes:
            live = self._node("Unsqueeze", [live, self._number(axes, ir.DataType.INT64)])
        return self._node("Where", [live, value, self._given[state.input]])

    def _dtype(self, name: str) -> str:
        return next(spec.dtype for spec in self._network.outputs if spec.name == name)

    def _as(self, value: ir.Value, dtype: str) -> ir.Value:
        kind = _TYPES[dtype]
        return value if value.dtype == kind else self._node("Cast", [value], to=kind.value)

    def _number(self, values: int | list[int], kind: ir.DataType) -> ir.Value:
        return initializer(
            self._graph, f"around.{len(self._graph.initializers)}", ir.tensor(values, dtype=kind).numpy()
        )

    def _node(self, op: str, inputs: Sequence[ir.Value], **attributes: int) -> ir.Value:
        node = ir.node(op, inputs, attributes=attributes)
        self._graph.append(node)
        return node.outputs[0]
