"""From a step to an ONNX file that any engine can read.

torch traces the network. This module then changes the graph into what the manifest promises: stable names, one opset,
int32 indices, nothing that tells of the machine it was exported on, and weights that are byte ranges of the bundle's
one safetensors file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass
from torch import Tensor, nn
from txl_runtime.bundle.open_batch import BATCH
from txl_runtime.bundle.tables import Program
from txl_runtime.bundle.weight_header import read_header
from txl_runtime.errors import TxlError

from txl_export.graphs.bounds import bound_by_max_and_min
from txl_export.graphs.quantised_matmul import has_many_rows, initializer, multiply_quantised

SEGMENT = "segment"
"""What graphs call the segment's length where they leave it open."""
HALVES = {"F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
"""Half precision, as safetensors files call it."""
IR_VERSIONS = {18: 10, 19: 10, 20: 10, 21: 10, 22: 10, 23: 11, 24: 12}
"""The oldest that an opset can be written in: readers refuse what is newer than they are."""


class Traceable(nn.Module):
    """A network that a graph can be traced from.

    Attributes:
        marking: whether `forward` returns the values that `landmarks` names as well, behind its results.
    """

    landmarks: tuple[str, ...] = ()
    """Names in the graph for values inside of it."""
    translations: Mapping[Callable[..., Any], Callable[..., Any]] = {}
    """What `torch.onnx.export` needs to know of operators that are not torch's."""
    dynamic_shapes: Any = None
    """What `torch.export` may not take for fixed, per argument; None where everything is."""
    marking = False

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Arguments of the right shapes and dtypes, to trace with."""
        raise NotImplementedError


class WeightFile:
    """The bundle's weight file as graphs refer to it: their parameters are byte ranges of it, not copies.

    Args:
        parts: further tensors that are rows [first, last) of one of the file's: name → (that one, first, last).
    """

    def __init__(self, path: Path, parts: Mapping[str, tuple[str, int, int]]) -> None:
        stored = read_header(path)
        self._path = path
        self._ranges = {name: (tensor.offset, tensor.length) for name, tensor in stored.items()}
        self._halves = {name: HALVES[tensor.dtype] for name, tensor in stored.items() if tensor.dtype in HALVES}
        for name, (table, first, last) in parts.items():
            row = stored[table].length // stored[table].shape[0]
            self._ranges[name] = (stored[table].offset + first * row, (last - first) * row)
            if table in self._halves:
                self._halves[name] = self._halves[table]

    def point_into(self, graph: ir.Graph) -> None:
        """Let the graph's parameters be ranges of the file. They get the file's names: the graph has "/" for "."."""
        for value in list(graph.initializers.values()):
            half = self._halves.get((value.name or "").replace("/", "."))
            if half is not None and value.dtype == ir.DataType.FLOAT:
                _widen(graph, value, half)
        for value in list(graph.initializers.values()):
            assert value.name is not None
            name = value.name.replace("/", ".")
            if name in self._ranges:
                assert value.dtype is not None
                assert value.shape is not None
                file, folder, where = self._path.name, self._path.parent, self._ranges[name]
                value.const_value = ir.ExternalTensor(
                    file, *where, value.dtype, shape=value.shape, name=name, base_dir=folder
                )
                value.name = name


def _widen(graph: ir.Graph, value: ir.Value, half: ir.DataType) -> None:
    """Let a graph that computes in float32 read a parameter that is stored in half precision."""
    assert value.name is not None
    assert value.shape is not None
    name = value.name
    del graph.initializers[name]
    stored = ir.tensor(np.zeros(value.shape.numpy(), np.uint16).view(half.numpy()), half, name=name)
    narrow = ir.Value(name=name, type=ir.TensorType(half), shape=value.shape, const_value=stored)
    graph.register_initializer(narrow)
    node = ir.node("Cast", [narrow], attributes={"to": ir.DataType.FLOAT})
    wide = node.outputs[0]
    wide.name, wide.type, wide.shape = f"{name}.float", value.type, value.shape
    ir.convenience.replace_all_uses_with(value, wide)
    graph.insert_before(graph[0], node)


def trace(network: Traceable, opset: int) -> ir.Model:
    """Trace a network into a graph of an opset of the standard, with landmarks named; see `write_graph`."""
    model = _trace(network, opset)
    for name in reversed(network.landmarks):
        model.graph.outputs.pop().name = name
    return model


def write_graph(
    traced: ir.Model,
    program: Program,
    weights: WeightFile,
    path: Path,
    parts: Mapping[str, Tensor],
) -> None:
    """Write a traced network as the program's file.

    Args:
        traced: from `trace`; stays as it is, because int8 multiplies one trace in two ways.
        program: names, shapes and dtypes of its inputs and outputs.
        weights: the file that its parameters are in.
        parts: the parameters as the weight file has them, some quantised.
    """
    model = traced.clone()
    graph = model.graph
    model.producer_name, model.producer_version = "txl-deploy", None
    model.ir_version = IR_VERSIONS[model.opset_imports[""]]
    graph.name = program.name
    for value, spec in zip(graph.inputs, program.inputs, strict=True):
        value.name = spec.name
    for value, spec in zip(graph.outputs, program.outputs, strict=True):
        value.name = spec.name
    _name_open_sizes(graph, program)
    int32_indices(graph)
    bound_by_max_and_min(graph)
    RemoveUnusedNodesPass()(model)
    multiply_quantised(graph, parts, has_many_rows(program))
    forget_origins(model)
    weights.point_into(graph)
    model.metadata_props["txl-deploy.program"] = program.note()
    ir.save(model, path)


def _trace(network: Traceable, opset: int) -> ir.Model:
    network.eval()
    network.marking = True
    with quiet(), quick():
        exported = torch.export.export(
            network, network.example_inputs(), dynamic_shapes=network.dynamic_shapes, strict=False
        )
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=opset,
            verbose=False,
            external_data=False,
            custom_translation_table=dict(network.translations),
        )
    if program is None:
        raise TxlError("torch.onnx.export returned nothing, expected a graph; check the installed torch and onnxscript")
    model: ir.Model = program.model
    found = model.opset_imports.get("", 0)
    if found != opset:
        raise TxlError(f"torch.onnx.export wrote opset {found}, expected {opset}; install another torch or onnxscript")
    return model


def _name_open_sizes(graph: ir.Graph, program: Program) -> None:
    """Name the sizes that are not fixed by where inputs have them; torch only numbers them, an input's its own way."""
    places = (BATCH, SEGMENT) if program.segment_length else ("rows",)
    names = {
        str(size.value): name
        for value in graph.inputs
        for size, name in zip(value.shape or (), places, strict=False)
        if isinstance(size, ir.SymbolicDim)
    }
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            for axis, size in enumerate(value.shape):
                if isinstance(size, ir.SymbolicDim) and size.value is not None:
                    value.shape[axis] = names.get(str(size.value))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's warnings: of packages that it does not need, and of deprecations in its own code."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnx_ir"))}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """With what takes a third of a small capture left out: most collections of garbage, and torch's second table.

    torch builds a table of its operators anew for every capture. Another torch may have it elsewhere: it takes longer.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(ImportError, AttributeError):
                from torch.onnx._internal.exporter._registration import ONNXRegistry

                build = ONNXRegistry.from_torchlib
                setattr(ONNXRegistry, "from_torchlib", functools.partial(_table, build))  # noqa: B010 - a method to mypy
                stack.callback(setattr, ONNXRegistry, "from_torchlib", build)
            yield
    finally:
        gc.set_threshold(*threshold)


def _table(build: Callable[..., Any], **options: Any) -> Any:
    """A copy of torch's table, which a capture may add to."""
    made = copy.copy(_built(build, **options))
    made.functions = {name: list(found) for name, found in made.functions.items()}
    return made


@functools.cache
def _built(build: Callable[..., Any], **options: Any) -> Any:
    return build(**options)


def int32_indices(graph: ir.Graph) -> None:
    """Give Gather and GatherElements int32 indices: drop the casts to int64, narrow the constants.

    The indices are the largest constants in the file, and a device takes int32 as it is.
    """

    def narrow(constant: ir.Value) -> ir.Value:
        assert constant.name is not None
        assert constant.const_value is not None
        return initializer(graph, f"{constant.name}.int32", constant.const_value.numpy().astype(np.int32))

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


def forget_origins(model: ir.Model) -> None:
    """Drop what the exporter notes about source files: it names paths, and differs from machine to machine."""
    ClearMetadataAndDocStringPass()(model)
    model.doc_string = None
    model.metadata_props.clear()
    graph = model.graph
    results = (output for node in graph for output in node.outputs)
    for value in (*graph.inputs, *graph.initializers.values(), *results):
        value.metadata_props.clear()
        value.doc_string = None
