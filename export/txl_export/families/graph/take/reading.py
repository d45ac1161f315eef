"""An ONNX file from outside, read as plain tables: nothing in it is run, of what it points to the size is looked at.

The bytes are parsed by onnx. What is kept of them is bounded: a file with more nodes, inputs or nested graphs than any
model has is refused in one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from txl_runtime.errors import CheckpointError, brief, printable

from txl_export.regular import read_regular

MOST_BYTES = 2**31 - 1
"""What a protocol buffer can have; weights may lie beside it."""
MOST_NODES, MOST_SIDES = 2**16, 2**10
"""Nodes with those of nested graphs, and inputs or outputs of the graph."""
ADVICE = "expected an ONNX model; check the path"
Size = int | str


@dataclass(frozen=True)
class Port:
    """An input or output of a graph.

    Attributes:
        name: as the file has it.
        dtype: NumPy's name, or ONNX's where NumPy has none; "" for what is no tensor.
        shape: sizes; a text is a symbol, and one that the file leaves unnamed is called after its place.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Foreign:
    """A foreign graph.

    Attributes:
        path: of the file.
        model: as onnx has it.
        inputs, outputs: without inputs that have a value in the file.
        optional: inputs that have one, which is taken where a call does not give another.
        bytes: of the file, and of the weights beside it.
    """

    path: Path
    model: Any
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    bytes: int
    optional: tuple[Port, ...] = ()


def read_foreign(path: Path) -> Foreign:
    """An ONNX file and what its graph takes and returns.

    Raises:
        CheckpointError: it cannot be read, is no ONNX model, or is larger than any model should be.
    """
    try:
        data = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}, {ADVICE}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    model = parse(data, str(path))
    graph = model.graph
    given = {tensor.name for tensor in graph.initializer} | {tensor.values.name for tensor in graph.sparse_initializer}
    inputs = tuple(_port(value, "input") for value in graph.input if value.name not in given)
    optional = tuple(_port(value, "input") for value in graph.input if value.name in given)
    outputs = tuple(_port(value, "output") for value in graph.output)
    for ports, side in ((inputs, "inputs"), (outputs, "outputs")):
        if len({port.name for port in ports}) != len(ports):
            raise CheckpointError(f"{path}: two of its {side} have one name, expected a name for each; export it again")
        if len(ports) > MOST_SIDES:
            raise CheckpointError(f"{path}: {len(ports)} {side}, expected at most {MOST_SIDES}; no model has so many")
    return Foreign(path, model, inputs, outputs, len(data) + _beside(model, path), optional)


def parse(data: bytes, where: str) -> Any:
    """A model's bytes as onnx has them; `where` is for messages.

    Raises:
        CheckpointError: they are no ONNX model, or it has more nodes than it may.
    """
    try:
        model = onnx.load_model_from_string(data)
    except (DecodeError, ValueError):
        raise CheckpointError(f"{where}: {len(data)} bytes that are no ONNX model, {ADVICE}") from None
    if not model.graph.output or not model.opset_import:
        raise CheckpointError(f"{where}: no graph with outputs and an opset in {len(data)} bytes, {ADVICE}")
    count, texts = 0, [model.producer_name, model.producer_version, *(entry.domain for entry in model.opset_import)]
    for graph in _graphs(model.graph):
        count += len(graph.node)
        texts += _texts(graph)
        if count > MOST_NODES:
            raise CheckpointError(f"{where}: {count} nodes or more, expected at most {MOST_NODES}; no step has so many")
    if not all(isinstance(text, str) for text in texts):  # onnx has them as bytes
        raise CheckpointError(f"{where}: a name in it is no UTF-8, expected text; export it again")
    return model


def subgraphs(node: Any) -> list[Any]:
    """The graphs that a node holds, such as the branches of an If."""
    return [graph for attribute in node.attribute for graph in _held(attribute)]


def _held(attribute: Any) -> list[Any]:
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those that its nodes hold."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def _texts(graph: Any) -> Iterator[Any]:
    """Every name in a graph, without those of nested ones."""
    for value in (*graph.input, *graph.output):
        yield value.name
        yield from (size.dim_param for size in value.type.tensor_type.shape.dim)
    for tensor in graph.initializer:
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))
    for node in graph.node:
        yield from (node.name, node.op_type, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)


def _port(value: Any, side: str) -> Port:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return Port(value.name, "", ())
    try:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name)
    except KeyError:
        dtype = ""
    shape = tuple(
        max(size.dim_value, 0) if size.HasField("dim_value") else size.dim_param or f"{side} {value.name} axis {axis}"
        for axis, size in enumerate(kind.shape.dim)
    )
    return Port(value.name, dtype, shape)


def _location(tensor: Any) -> str:
    """The file that a tensor lies in, or ""."""
    return next((str(entry.value) for entry in tensor.external_data if entry.key == "location"), "")


def _beside(model: Any, path: Path) -> int:
    """Bytes of the files that weights lie in; each has to be there, beside the graph.

    Raises:
        CheckpointError: one is not, or lies elsewhere.
    """
    found: dict[str, int] = {}
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key != "location" or entry.value in found:
                continue
            plain = PurePosixPath(entry.value)
            beside = path.parent / entry.value
            inside = not (plain.is_absolute() or ".." in plain.parts or "\\" in entry.value or "\0" in entry.value)
            if not inside or not beside.is_file():
                told = brief(printable(entry.value))
                raise CheckpointError(f"{path}: its weights lie in {told!r}, expected a file beside it; copy it too")
            found[entry.value] = beside.stat().st_size
        said = {entry.key: int(entry.value) for entry in tensor.external_data if entry.value.isdecimal()}
        place, ends = _location(tensor), said.get("offset", 0) + said.get("length", 0)
        if place in found and ends > found[place]:
            told = f"{printable(place)} has {found[place]} bytes, of which its weights take {ends} or more"
            raise CheckpointError(f"{path}: {told}, expected all of them; copy it again")
    return sum(found.values())
