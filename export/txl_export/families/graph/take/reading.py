"""Reads an ONNX file as a model in memory, without running it; of external weights only the size is checked.

onnx parses the bytes once. Limits on nodes, inputs and nested graphs keep memory small; a file that exceeds one is
refused in one line.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from onnx.external_data_helper import load_external_data_for_tensor
from txl_runtime.errors import CheckpointError, brief, one_line, printable

from txl_export.families.graph.take.worker import MOST_PARTS, graphs, parts
from txl_export.graphs.tracing import quiet
from txl_export.regular import read_regular

MOST_BYTES = 2**31 - 1
"""Maximum number of bytes of a protocol buffer; weights may lie in separate files."""
MOST_SIDES = 2**10
"""Maximum number of inputs, and of outputs, of a graph."""
MOST_AXES, MOST_NAME = 64, 2**10
"""Maximum number of axes of an input, output or constant, and of characters of a name of an input, output or size."""
MOST_NUMBERS = 2**24
"""Maximum number of values of an input, and of all inputs that are drawn together."""
SMALL = 2**9
"""Maximum number of bytes of a tensor in a separate file that is loaded into the graph."""
ADVICE = "expected an ONNX model; check the path"
Size = int | str


@dataclass(frozen=True)
class Port:
    """An input or output of a graph.

    Attributes:
        name: the name in the file.
        dtype: NumPy's name; "" if it is no tensor, or NumPy lacks the dtype.
        shape: sizes; a text is a symbol. A symbol without a name in the file is named after its place.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Foreign:
    """An ONNX graph that somebody else exported.

    Attributes:
        path: the file.
        sha256: the hash of the file's bytes.
        data: the bytes, including small weights from separate files; a proof runs them.
        model: the graph; its larger tensors stay in separate files.
        inputs, outputs: the graph's inputs and outputs, without optional inputs.
        optional: inputs for which the file has a default value.
        bytes: the size of the file and of separate files of weights.
    """

    path: Path
    sha256: str
    data: bytes
    model: ir.Model
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    bytes: int
    optional: tuple[Port, ...] = ()

    def of(self, model: ir.Model) -> Foreign:
        """Return a record of a different graph made from this file; large weights stay in their files."""
        initializers = model.graph.initializers
        inputs = [(str(value.name) in initializers, _port(value, "input")) for value in model.graph.inputs]
        return replace(
            self,
            model=model,
            inputs=tuple(port for optional, port in inputs if not optional),
            outputs=tuple(_port(value, "output") for value in model.graph.outputs),
            optional=tuple(port for optional, port in inputs if optional),
        )


def read_foreign(path: Path) -> Foreign:
    """Read an ONNX file.

    Raises:
        CheckpointError: the file cannot be read, is no ONNX model, or exceeds a limit.
    """
    try:
        data = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}, {ADVICE}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    sha256 = hashlib.sha256(data).hexdigest()
    model, beside, data = parse(data, path)
    for value in model.graph.inputs:
        fixed = math.prod(size for size in value.shape or () if isinstance(size, int))
        if fixed > MOST_NUMBERS:
            shown_name = brief(printable(str(value.name)))
            raise CheckpointError(f"{path}: {shown_name} has {fixed:.3g} numbers, expected at most {MOST_NUMBERS}")
    for values, side in ((model.graph.inputs, "inputs"), (model.graph.outputs, "outputs")):
        axes = max((len(value.shape or ()) for value in values), default=0)
        longest = max((len(str(text)) for one in values for text in (one.name, *(one.shape or ()))), default=0)
        if len(values) > MOST_SIDES or axes > MOST_AXES or longest > MOST_NAME:
            raise CheckpointError(
                f"{path}: {len(values)} {side} of at most {axes} axes, with names of at most {longest} characters, "
                f"expected at most {MOST_SIDES}, {MOST_AXES} and {MOST_NAME}; no model has more"
            )
    return Foreign(path, sha256, data, model, (), (), len(data) + beside).of(model)


def parse(data: bytes, path: Path) -> tuple[ir.Model, int, bytes]:
    """Parse a model.

    Returns:
        A graph that can be changed, the number of bytes of weights in separate files, and the model's bytes. The bytes
        include small weights from these files: ONNX Runtime looks at them while loading and does not find the files.

    Raises:
        CheckpointError: the bytes are no ONNX model, there are too many nodes, or the model's parts do not fit
            together.
    """
    try:
        model = onnx.load_model_from_string(data)
    except (DecodeError, ValueError):
        raise CheckpointError(f"{path}: {len(data)} bytes that are no ONNX model, {ADVICE}") from None
    if not model.graph.output or not model.opset_import:
        raise CheckpointError(f"{path}: no graph with outputs and an opset in {len(data)} bytes, {ADVICE}")
    if (count := parts(model)) > MOST_PARTS:
        raise CheckpointError(f"{path}: {count} nodes and tensors, expected at most {MOST_PARTS}; no step has so many")
    named = [*model.opset_import, *(node for graph in graphs(model.graph, *model.functions) for node in graph.node)]
    for entry in named:
        if entry.domain == "ai.onnx":  # "ai.onnx" is a second name of the standard domain ""
            entry.domain = ""
    texts = [model.producer_name, model.producer_version, *(entry.domain for entry in model.opset_import)]
    for graph in graphs(model.graph):
        texts += _texts(graph)
        if graph.sparse_initializer:  # onnx-ir would silently drop sparse weights
            raise CheckpointError(f"{path}: has sparse weights, expected dense ones; export it again")
    if not all(isinstance(text, str) for text in texts):  # onnx returns invalid UTF-8 as bytes
        raise CheckpointError(f"{path}: a name in it is no UTF-8, expected text; export it again")
    tensors = [tensor for graph in graphs(model.graph, *model.functions) for tensor in _tensors(graph)]
    beside = _beside(tensors, path)
    try:
        if small := [tensor for tensor in tensors if _length(tensor) <= SMALL]:
            for tensor in small:
                load_external_data_for_tensor(tensor, str(path.parent))
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")
            data = model.SerializeToString()
        # quiet() silences onnx-ir; whoever runs the graph reports what is wrong with it
        with quiet():
            parsed = ir.from_proto(model)
            ir.external_data.set_base_dir(parsed.graph, str(path.parent))
    except Exception as error:  # onnx-ir raises many types of errors
        raise CheckpointError(f"{path}: no graph that could be changed ({_why(error)}); export it again") from None
    return parsed, beside, data


def copied(model: ir.Model) -> ir.Model:
    """Return a copy of a graph that shares the tensors.

    Raises:
        CheckpointError: the graph's parts do not fit together.
    """
    try:
        return model.clone()
    except Exception as error:  # onnx-ir raises many types of errors
        raise CheckpointError(f"no graph that could be changed ({_why(error)}); export the file again") from None


def packed(model: ir.Model) -> bytes:
    """Return a model's bytes, without weights in separate files.

    Raises:
        CheckpointError: a tensor's data contradicts its dtype or shape.
    """
    try:
        return bytes(ir.to_proto(model).SerializeToString())
    except Exception as error:  # onnx-ir raises many types of errors
        raise CheckpointError(f"a tensor is not what it says ({_why(error)}); export the file again") from None


def _why(error: BaseException) -> str:
    """Return the message of the first error of a chain, because later messages contain whole printed graphs."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)


def _texts(graph: Any) -> Iterator[Any]:
    """Yield every name in a graph, except in nested graphs."""
    for value in (*graph.input, *graph.output):
        yield value.name
        yield from (size.dim_param for size in value.type.tensor_type.shape.dim)
    for tensor in graph.initializer:
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))
    for node in graph.node:
        yield from (node.name, node.op_type, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)


def _length(tensor: Any) -> float:
    """Return the number of bytes of a tensor in a separate file; infinity if the file does not say."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return float(entries["length"]) if entries.get("length", "").isdecimal() else math.inf


def _tensors(graph: Any) -> Iterator[Any]:
    yield from getattr(graph, "initializer", ())
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)


def _port(value: ir.Value, side: str) -> Port:
    name = str(value.name)
    if not isinstance(value.type, ir.TensorType):
        return Port(name, "", ())
    try:
        dtype = str(value.type.dtype.numpy().name)
    except TypeError:
        dtype = ""
    sizes = [size.value if isinstance(size, ir.SymbolicDim) else max(size, 0) for size in value.shape or ()]
    return Port(
        name,
        dtype,
        tuple(f"{side} {name} axis {axis}" if size in (None, "") else size for axis, size in enumerate(sizes)),
    )


def _beside(tensors: Iterable[Any], path: Path) -> int:
    """Return the number of bytes of all files of weights; each must exist next to the graph.

    Raises:
        CheckpointError: a file is missing or elsewhere, or a tensor has too many axes.
    """
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.dims) > MOST_AXES:
            raise CheckpointError(f"{path}: a tensor has {len(tensor.dims)} axes, expected at most {MOST_AXES}")
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if (place := entries.get("location")) is None:
            continue
        if place not in sizes:
            plain, beside = PurePosixPath(place), path.parent / place
            inside = not (plain.is_absolute() or ".." in plain.parts or "\\" in place or "\0" in place)
            if len(place) > MOST_NAME or not inside or not beside.is_file():
                shown_place = brief(printable(place))
                raise CheckpointError(
                    f"{path}: its weights lie in {shown_place!r}, expected a file beside it; copy it too"
                )
            sizes[place] = beside.stat().st_size
        ends = sum(int(entries[key][:20]) for key in ("offset", "length") if entries.get(key, "")[:20].isdecimal())
        if ends > sizes[place]:
            shown_place = f"{printable(place)} has {sizes[place]} bytes, of which its weights take {ends} or more"
            raise CheckpointError(f"{path}: {shown_place}, expected all of them; copy it again")
    return sum(sizes.values())
