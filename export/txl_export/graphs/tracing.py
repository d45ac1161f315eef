"""Traces a network to an ONNX file that any engine can read.

torch traces the network. This module then makes the graph what the manifest promises: fixed names, one opset, int32
indices, no traces of the exporting machine, and weights as byte ranges of the bundle's safetensors file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
"""The name of the segment's length in graphs that leave it open."""
HALVES = {"F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
"""Half precision dtypes by their names in safetensors files."""
IR_VERSIONS = {18: 10, 19: 10, 20: 10, 21: 10, 22: 10, 23: 11, 24: 12}
"""The oldest IR version for each opset; readers refuse versions newer than they know."""


class Traceable(nn.Module):
    """A network that a graph can be traced from.

    Attributes:
        marking: whether `forward` also returns the values that `landmarks` names, after its results.
    """

    landmarks: tuple[str, ...] = ()
    """Names in the graph for inner values."""
    translations: Mapping[Callable[..., Any], Callable[..., Any]] = {}
    """Translations of custom operators for `torch.onnx.export`."""
    dynamic_shapes: Any = None
    """The sizes of each argument that `torch.export` must leave open; None if all are fixed."""
    marking = False

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return arguments of the right shapes and dtypes for tracing.

        For example, tokens int32 [2, 5] and memory float32 [2, 16, 32].
        """
        raise NotImplementedError


class WeightFile:
    """The bundle's weight file, to which graphs refer: their parameters are byte ranges of it.

    Args:
        path: the file.
        parts: tensors that are rows [first, last) of a tensor in the file: name → (that tensor's name, first, last).
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
        """Make the graph's parameters byte ranges of the file, under the file's names ("." where the graph has "/")."""
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
    """Add a Cast for a parameter that is stored in half precision and read in float32."""
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
    """Trace a network to a graph of a standard opset, and name its landmarks."""
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

    For example, a program with tokens int32 [4, 1] and logprobs float32 [4, 1, 256].

    Args:
        traced: a graph by `trace`; it is copied, because int8 writes two files from one trace.
        program: the program, with names, shapes and dtypes of its inputs and outputs.
        weights: the file with the parameters.
        parts: the parameters as the weight file stores them, some quantised.
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
    with quiet(), quick(), exact():
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
    opset_found = model.opset_imports.get("", 0)
    if opset_found != opset:
        raise TxlError(
            f"torch.onnx.export wrote opset {opset_found}, expected {opset}; install another torch or onnxscript"
        )
    return model


def _name_open_sizes(graph: ir.Graph, program: Program) -> None:
    """Name open sizes by their place in the inputs ("batch", …); torch only numbers them."""
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
    """Silence the exporter's warnings about packages it does not need and deprecations in its own code."""
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
    """Speed small captures up by a third: collect garbage rarely, and build torch's table of operators only once.

    torch builds this table for every capture. If a future version moves it, captures only take longer.
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


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Keep onnxscript from taking x + 1e-8 for x, by which 0 / (0 + 1e-8) became NaN.

    Rules of onnxscript compare constants with 0 and 1 within a tolerance. A test fails if a future version compares
    them at a new place.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):
            from onnxscript.rewriter import _matcher

            stack.enter_context(mock.patch.object(_matcher, "math", SimpleNamespace(isclose=_is_close)))
        yield


def _is_close(value: float, wanted: float, **tolerances: float) -> bool:
    return value == wanted if wanted in (0, 1) else math.isclose(value, wanted, **tolerances)


def _table(build: Callable[..., Any], **options: Any) -> Any:
    """Return a copy of torch's table of operators, because a capture may add to it."""
    table = copy.copy(_built(build, **options))
    table.functions = {name: list(found) for name, found in table.functions.items()}
    return table


@functools.cache
def _built(build: Callable[..., Any], **options: Any) -> Any:
    return build(**options)


def int32_indices(graph: ir.Graph) -> None:
    """Give Gather and GatherElements int32 indices, by dropping Casts to int64 and narrowing constants.

    The indices are the largest constants in the file, and devices take int32 directly.
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
            # Such an index is too large for the exporter to fold, so the constant before the Expand is converted.
            source.replace_input_with(0, narrow(origin))
            index.dtype = ir.DataType.INT32


def forget_origins(model: ir.Model) -> None:
    """Remove the exporter's notes about source files: they contain paths, and differ between machines."""
    ClearMetadataAndDocStringPass()(model)
    model.doc_string = None
    model.metadata_props.clear()
    graph = model.graph
    results = (output for node in graph for output in node.outputs)
    for value in (*graph.inputs, *graph.initializers.values(), *results):
        value.metadata_props.clear()
        value.doc_string = None
