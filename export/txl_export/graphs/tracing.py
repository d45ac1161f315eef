"""From a step to an ONNX file that any engine can read.

Tracing is torch's; what is done here afterwards makes the file what the manifest promises: stable names, one opset,
int32 indices, no traces of the machine that exported it, and weights that are byte ranges of the bundle's one
safetensors file instead of copies.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.external_data_helper import uses_external_data
from torch import Tensor
from txl_runtime.bundle.reading import WEIGHTS
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import TxlError

from txl_export.families.transformer_xl.network import Network
from txl_export.families.transformer_xl.ring import TRANSLATIONS
from txl_export.graphs.quantised_matmul import MICROSOFT, has_many_rows, multiply_quantised

__all__ = ["WeightFile", "check_graph", "write_graph"]

_Spec = tuple[str, str, tuple[int | str, ...]]

IR_VERSIONS = {18: 10, 24: 12}
"""The oldest that an opset can be written in: readers refuse what is newer than they are."""


class WeightFile:
    """Where each tensor of a safetensors file lies, so that graphs can point into it.

    Args:
        path: the file.
        parts: further tensors that are rows [first, last) of one of the file's: name → (that one, first, last).
    """

    def __init__(self, path: Path, parts: Mapping[str, tuple[str, int, int]] | None = None) -> None:
        self.path = path
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = msgspec.json.decode(stream.read(size))
        self._ranges = {
            name: (8 + size + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        for name, (table, first, last) in (parts or {}).items():
            offset, length = self._ranges[table]
            row = length // header[table]["shape"][0]
            self._ranges[name] = (offset + first * row, (last - first) * row)

    def __contains__(self, name: str) -> bool:
        return name in self._ranges

    def tensor(self, name: str, dtype: ir.DataType, shape: Any) -> ir.ExternalTensor:
        """A reference to a tensor of the file."""
        offset, length = self._ranges[name]
        return ir.ExternalTensor(
            self.path.name, offset, length, dtype, shape=shape, name=name, base_dir=self.path.parent
        )


def write_graph(
    network: Network,
    program: Program,
    weights: WeightFile,
    path: Path,
    facts: Mapping[str, str],
    opset: int,
    parts: Mapping[str, Tensor],
) -> None:
    """Trace a network and write it as the program's file.

    Args:
        network: what to trace.
        program: names, shapes and dtypes of its inputs and outputs.
        weights: the file that its parameters are in.
        path: where to write.
        facts: go into the file's metadata.
        opset: of the standard.
        parts: the parameters as the weight file has them, some quantised.
    """
    model = _trace(network, opset)
    graph = model.graph
    for name in reversed(network.landmarks):
        graph.outputs.pop().name = name
    model.producer_name, model.producer_version = "txl-deploy", None
    model.ir_version = IR_VERSIONS[opset]
    graph.name, graph.doc_string = program.name, None
    for value, spec in zip(graph.inputs, program.inputs, strict=True):
        value.name = spec.name
    for value, spec in zip(graph.outputs, program.outputs, strict=True):
        value.name = spec.name
    _name_open_sizes(graph, program)
    _int32_indices(graph)
    multiply_quantised(graph, parts, has_many_rows(program))
    _forget_origins(model)
    _point_into(graph, weights)
    model.metadata_props.update(facts)
    ir.save(model, path)


def _trace(network: Network, opset: int) -> ir.Model:
    network.eval()
    network.marking = True
    with _quiet():
        exported = torch.export.export(
            network, network.example_inputs(), dynamic_shapes=network.dynamic_shapes, strict=False
        )
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=opset,
            verbose=False,
            external_data=False,
            custom_translation_table=TRANSLATIONS,
        )
    if program is None:
        raise TxlError("torch.onnx.export returned nothing, expected a graph; check the installed torch and onnxscript")
    model: ir.Model = program.model
    found = model.opset_imports.get("", 0)
    if found != opset:
        raise TxlError(f"torch.onnx.export wrote opset {found}, expected {opset}; install another torch or onnxscript")
    return model


def _name_open_sizes(graph: ir.Graph, program: Program) -> None:
    """Call what is not fixed what it is; torch numbers it."""
    name = "segment" if program.segment_length else "rows"
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            for axis, size in enumerate(value.shape):
                if isinstance(size, ir.SymbolicDim) and size.value is not None:
                    value.shape[axis] = name if str(size.value).isidentifier() else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of packages it does not need and of its own deprecations; neither is the user's business."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _int32_indices(graph: ir.Graph) -> None:
    """Give Gather and GatherElements int32 indices: drop the casts to int64, narrow the constants.

    TensorRT 8.6 has no int64, and the indices are the largest constants in the file.
    """
    narrowed: dict[str, ir.Value] = {}

    def narrow(constant: ir.Value) -> ir.Value:
        assert constant.name is not None
        assert constant.const_value is not None
        if constant.name not in narrowed:
            tensor = ir.tensor(constant.const_value.numpy().astype(np.int32), name=f"{constant.name}.int32")
            value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), const_value=tensor)
            value.shape = ir.Shape(tensor.shape.numpy())
            graph.register_initializer(value)
            narrowed[constant.name] = value
        return narrowed[constant.name]

    for node in graph:
        if node.op_type not in ("Gather", "GatherElements"):
            continue
        index = node.inputs[1]
        assert index is not None
        source = index.producer()
        origin = None if source is None else source.inputs[0]
        if source is None:
            if index.const_value is not None and index.dtype == ir.DataType.INT64:
                node.replace_input_with(1, narrow(index))
        elif origin is None:
            continue
        elif source.op_type == "Cast" and origin.dtype == ir.DataType.INT32:
            node.replace_input_with(1, origin)
        elif source.op_type == "Expand" and origin.const_value is not None and origin.dtype == ir.DataType.INT64:
            # Too large for the exporter to fold; only such nodes as this one ask for it.
            source.replace_input_with(0, narrow(origin))
            index.dtype = ir.DataType.INT32
    for node in reversed(list(graph)):
        if node.op_type == "Cast" and not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]


def _forget_origins(model: ir.Model) -> None:
    """Drop what the exporter notes about source files: it names paths, and differs from machine to machine."""
    model.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.doc_string = None
        node.metadata_props.clear()
        for output in node.outputs:
            output.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None


def _point_into(graph: ir.Graph, weights: WeightFile) -> None:
    """Let parameters be byte ranges of the weight file; names are the weight file's."""
    for value in list(graph.initializers.values()):
        assert value.name is not None
        name = value.name.replace("/", ".")
        if name in weights:
            assert value.dtype is not None
            tensor = weights.tensor(name, value.dtype, value.shape)
            value.name = name
            value.const_value = tensor


def check_graph(path: Path, program: Program, opset: int) -> None:
    """Hold a written graph against the standard and its program: checker, shapes, names, dtypes, opset, indices.

    Sizes that the graph leaves open are any.

    Raises:
        TxlError: the graph is not what it should be.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise TxlError(f"{path.name}: {' '.join(str(error).split())}; expected a valid graph; report this") from None
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if versions.pop("", 0) != opset or versions not in ({}, {MICROSOFT: 1}):
        raise TxlError(f"{path.name}: uses other opsets than {opset} of the standard: {versions}; report this")
    for side, promised, found in (
        ("inputs", program.inputs, model.graph.input),
        ("outputs", program.outputs, model.graph.output),
    ):
        wants: list[_Spec] = [(spec.name, spec.dtype, spec.shape) for spec in promised]
        has = [_spec(value) for value in found]
        if not _fit(has, wants, "segment" if program.update == "ring" else None):
            raise TxlError(f"{path.name}: {side} are {has}, expected {wants}; report this")
    wide = _wide_indices(model.graph)
    if wide:
        raise TxlError(f"{path.name}: {', '.join(wide)} gather by other indices than int32; report this")
    stray = {
        entry.value
        for tensor in model.graph.initializer
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    } - {WEIGHTS}
    if stray:
        raise TxlError(f"{path.name}: points into {sorted(stray)}, expected the bundle's weights alone; report this")


def _wide_indices(graph: onnx.GraphProto) -> list[str]:
    """Nodes that gather by anything but int32."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    gathers = [node for node in graph.node if node.op_type in ("Gather", "GatherElements")]
    return [node.name for node in gathers if kinds.get(node.input[1]) != onnx.TensorProto.INT32]


def _spec(value: onnx.ValueInfoProto) -> _Spec:
    kind = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    return value.name, dtype, tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)


def _fit(has: Sequence[_Spec], wants: Sequence[_Spec], open_size: str | None) -> bool:
    """Same names, dtypes and sizes; the segment of a ring may be open, the rows of the softmax have to be."""
    if [(name, dtype, len(shape)) for name, dtype, shape in has] != [(n, d, len(shape)) for n, d, shape in wants]:
        return False
    sizes = (pair for mine, theirs in zip(has, wants, strict=True) for pair in zip(mine[2], theirs[2], strict=True))
    return all(found in (size, open_size) for found, size in sizes)
