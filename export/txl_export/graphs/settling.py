"""Turns a captured graph into a program: sets its names, inputs, outputs, types and shapes.

Captures differ: they drop inputs that no node reads, return an input as an output, contain functions or constants as
nodes, and note sizes that hold only for the example.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
    ShapeInferencePass,
)
from txl_runtime.bundle.tables import TensorSpec
from txl_runtime.guard.forms import FORMS

from txl_export.graphs.opsets import lower
from txl_export.graphs.rewriting import REWRITES, full_name, to_forms
from txl_export.graphs.tracing import IR_VERSIONS, forget_origins, int32_indices, quiet
from txl_export.graphs.unsettled import STACK_TRACE, UnsettledError

OPSET = 18
_KINDS = {"float32": ir.DataType.FLOAT, "int32": ir.DataType.INT32, "bool": ir.DataType.BOOL}


_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)


_WITHOUT_OTHER_FORM = frozenset({"Det", "Unique"})
"""Operators that stay in the graph however the step is captured, so a second capture is useless."""


def settle(
    model: ir.Model,
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    opsets: Collection[int] = (OPSET,),
) -> None:
    """Turn a captured graph into the graph of a program, in place.

    Args:
        model: the graph; its inputs have the program's names, and some of these may be missing; its outputs are
            complete and in order.
        name: the program's name.
        inputs, outputs: the program's inputs and outputs; a size that is a word is open.
        opsets: opsets that the graph may have.

    Raises:
        UnsettledError: the graph has control flow, operators that draw random numbers or are not in the standard, or
            contradictory types.
    """
    if model.functions:
        InlinePass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    graph = model.graph
    _check_operators(graph, opsets)
    model.producer_name, model.producer_version = "txl-deploy", None
    graph.name = name
    _make_room(graph, {spec.name for spec in (*inputs, *outputs)})
    _take_inputs(graph, inputs)
    _give_outputs(graph, outputs)
    _leave_out_empty(graph)
    _choose_by_logic(graph)
    RemoveUnusedNodesPass()(model)
    opened = any(isinstance(size, str) for spec in inputs for size in spec.shape)
    if any(full_name(node) in REWRITES for node in graph):
        _complete(graph, opened)
        infer_shapes(model)
        to_forms(model)
    lower(graph)
    model.ir_version = IR_VERSIONS[graph.opset_imports.get("", OPSET)]
    int32_indices(graph)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    _check_kinds(graph)
    forget_origins(model)
    _complete(graph, opened)
    infer_shapes(model)
    unknown = [str(value.name) for node in graph for value in node.outputs if value.name and value.dtype is None]
    if unknown:
        raise UnsettledError(f"the type of '{unknown[0]}' cannot be told")


def infer_shapes(model: ir.Model) -> None:
    """Infer types and shapes of inner values; inputs and outputs keep their shapes, e.g. open sizes."""
    shapes = [(value, value.shape) for value in (*model.graph.inputs, *model.graph.outputs)]
    with quiet():
        # First without values: run alone, the pass that follows values fails on tables with several axes.
        for values in (False, True):
            ShapeInferencePass(check_type=True, strict_mode=True, data_prop=values)(model)
    for value, shape in shapes:
        value.shape = shape


def _check_operators(graph: ir.Graph, opsets: Collection[int]) -> None:
    for node in graph:
        kinds = {attribute.type for attribute in node.attributes.values()}
        if kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
            raise UnsettledError(f"it becomes the operator {node.op_type}; a bundle's graphs hold no control flow")
        if "::" in (name := full_name(node)) and name not in REWRITES:
            raise UnsettledError(f"it becomes the operator {name}, which ONNX's standard lacks")
    versions = graph.opset_imports
    if versions.get("", OPSET) not in opsets:
        wanted = " … ".join(map(str, sorted({min(opsets), max(opsets)})))
        raise UnsettledError(f"it becomes opset {versions['']}, expected {wanted}; install another torch or onnxscript")


def _check_kinds(graph: ir.Graph) -> None:
    """Refuse operators that bundles may not have, and operators that draw random numbers: no run could be repeated."""
    for node in graph:
        trace = node.metadata_props.get(STACK_TRACE, "")
        training = ir.convenience.get_const_tensor(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
        left_on = node.op_type == "Dropout" and training is not None and bool(training.numpy().any())
        if node.op_type in _RANDOM or left_on:
            raise UnsettledError(
                f"it draws random numbers ({node.op_type}), so that no two runs are the same; make the noise an input",
                trace,
                final=True,
            )
        form = FORMS[""].get(node.op_type)
        if form is None:
            raise UnsettledError(
                f"it becomes the operator {node.op_type}, which no graph of a bundle may have",
                trace,
                final=node.op_type in _WITHOUT_OTHER_FORM,
            )
        attributes = {name: entry.value for name, entry in node.attributes.items()}
        if problem := form.problem([value is not None for value in node.inputs], len(node.outputs), attributes):
            found, expected = problem
            raise UnsettledError(
                f"it becomes the operator {node.op_type} with {found}, which no graph of a bundle may have (expected "
                f"{expected})",
                trace,
            )


def _make_room(graph: ir.Graph, names: set[str]) -> None:
    """Rename inner values with the name of an input or output; give every value and node a name."""
    names_in_use = (
        names | {*graph.initializers} | {output.name for node in graph for output in node.outputs if output.name}
    )

    def inside(name: str) -> str:
        while name in names_in_use:  # a graph that is settled twice has such names from the first time
            name = f"{name}.inside"
        names_in_use.add(name)
        return name

    for number, node in enumerate(graph):
        node.name = f"{node.op_type}.{number}"
        for output in node.outputs:
            if output.name in names:
                output.name = inside(output.name)
    for value in list(graph.initializers.values()):
        if value.name in names:
            del graph.initializers[value.name]
            value.name = inside(value.name)
            graph.register_initializer(value)


def _take_inputs(graph: ir.Graph, inputs: Sequence[TensorSpec]) -> None:
    """Set all inputs in order, including those that no node reads."""
    inputs_by_name = {value.name: value for value in graph.inputs}
    graph.inputs.clear()
    for spec in inputs:
        value = inputs_by_name.get(spec.name) or ir.Value(name=spec.name)
        value.type, value.shape = ir.TensorType(_KINDS[spec.dtype]), ir.Shape(spec.shape)
        graph.inputs.append(value)


def _give_outputs(graph: ir.Graph, outputs: Sequence[TensorSpec]) -> None:
    """Make every output the result of its own node, rather than an input, a constant, or a second output."""
    seen: list[ir.Value] = []
    for index, (value, spec) in enumerate(zip(list(graph.outputs), outputs, strict=True)):
        if value.is_graph_input() or value.is_initializer() or any(value is one for one in seen):
            node = ir.node("Identity", [value], name=f"Identity.{spec.name}")
            graph.append(node)
            value = node.outputs[0]
            graph.outputs[index] = value
        seen.append(value)
        value.name, value.shape = spec.name, ir.Shape(spec.shape)
        value.type = ir.TensorType(_KINDS[spec.dtype])


def _leave_out_empty(graph: ir.Graph) -> None:
    """Drop empty operands of Concat, because engines refuse empty tensors."""
    for node in graph:
        if node.op_type == "Concat":
            inputs = [
                value for value in node.inputs if value is None or value.shape is None or 0 not in value.shape.dims
            ]
            if 0 < len(inputs) < len(node.inputs):
                for index, value in enumerate(inputs):
                    node.replace_input_with(index, value)
                node.resize_inputs(len(inputs))


def _choose_by_logic(graph: ir.Graph) -> None:
    """Replace Where on booleans by And and Or, because ONNX Runtime has no kernel for such a Where."""
    for node in list(graph):
        result = node.outputs[0]
        if node.op_type == "Where" and result.dtype == ir.DataType.BOOL:
            condition, one, other = node.inputs
            no = ir.node("Not", [condition])
            first, second = ir.node("And", [condition, one]), ir.node("And", [no.outputs[0], other])
            either = ir.node("Or", [first.outputs[0], second.outputs[0]])
            for part in (no, first, second):
                part.outputs[0].name = f"{result.name}.{part.op_type}.{'second' if part is second else 'first'}"
                part.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
            either.outputs[0].type, either.outputs[0].shape = result.type, result.shape
            name, result.name = result.name, None
            either.outputs[0].name = name
            ir.convenience.replace_nodes_and_values(
                graph, node, [node], [no, first, second, either], [result], [either.outputs[0]]
            )


def _complete(graph: ir.Graph, opened: bool) -> None:
    """Remove the inner shapes and sizes that inference has to find anew.

    Args:
        graph: the graph; its inputs and outputs have types and shapes.
        opened: whether sizes of inputs are open. If so, the shapes that the capture noted inside hold only for the
            example, and are removed.
    """
    ends = {id(value) for value in (*graph.inputs, *graph.outputs)}
    for node in graph:
        for output in node.outputs:
            if opened and id(output) not in ends:
                output.shape = None
            if output.shape is not None:
                for axis, size in enumerate(output.shape):
                    if isinstance(size, ir.SymbolicDim) and not str(size.value or "").isidentifier():
                        output.shape[axis] = None
