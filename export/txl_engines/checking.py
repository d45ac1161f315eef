"""Checks a graph against its program before a library reads it.

TensorRT's parser accepts some wrong graphs silently: an empty file, an opset that it does not know, double inputs that
become float. Every fault that can be found in the file is named here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from txl_runtime.bundle.bindings import Binding, check_bindings
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.engines.sidecar import GivenWeight
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BackendError, BundleError

OLDEST_OPSET = 9
"""Oldest opset that the libraries' parsers support."""
MOST_BYTES = 1 << 31
"""Size in bytes from which protobuf cannot hold a graph: 2 GiB."""
ADVICE = "export the model again"


@dataclass(frozen=True)
class Graph:
    """A checked graph.

    Attributes:
        data: the graph's bytes.
        path: the place of the graph's file (which need not exist); its folder contains the graph's external weights.
        sha256: SHA-256 of the composed bytes, before rewrites.
        weights: SHA-256 of each file of external weights.
        nodes: name and operator of each node, in the parser's order.
        attention_layers: number of attentions, counted as softmaxes between two products.
        scatters: number of TensorScatter nodes, i.e. of states that are updated in place.
        states: names of these states, as inputs and as outputs.
        given: weights that became inputs of the graph.
        weight_bytes: bytes of all other weights, which the engine holds.
        saved_bytes: bytes by which rounded matrices are smaller than in the bundle's weight file.
        rounded: offset in the weight file, and shape, of each matrix that was rounded.
    """

    data: bytes
    path: Path
    sha256: str
    weights: dict[str, str]
    nodes: tuple[tuple[str, str], ...]
    attention_layers: int
    scatters: int
    states: tuple[str, ...] = ()
    given: tuple[GivenWeight, ...] = ()
    weight_bytes: int = 0
    saved_bytes: int = 0
    rounded: tuple[tuple[int, tuple[int, ...]], ...] = ()


def read_graph(
    data: bytes, program: Program, folder: Path, newest_opset: int, hashes: Mapping[str, str] | None = None
) -> Graph:
    """Check a graph against its program. Its arguments are as for `CompiledEngines.read`.

    Raises:
        BundleError: the graph is unreadable, does not match its program, or has an opset outside the range.
        BackendError: onnx is not installed.
    """
    path = folder / program.file
    model = decode_graph(data, path)
    _check_opset(model, path, newest_opset)
    check_graph(model, path, program)
    files, known = _check_weights(model, path), hashes or {}
    updates = [node for node in model.graph.node if node.op_type == "TensorScatter"]
    return Graph(
        data=data,
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        weights={name: known.get(name) or file_sha256(folder / name) for name in files},
        nodes=tuple((node.name, node.op_type) for node in model.graph.node),
        attention_layers=_attention_layers(model.graph),
        scatters=len(updates),
        states=tuple(name for node in updates for name in (node.input[0], node.output[0])),
        weight_bytes=outside(model.graph.initializer, path),
    )


def import_onnx() -> Any:
    """Import onnx; return the module.

    Raises:
        BackendError: onnx is not installed.
    """
    try:
        import onnx
    except ModuleNotFoundError:
        raise BackendError("onnx is not installed, expected it to read graphs; pip install onnx") from None
    return onnx


def decode_graph(data: bytes, path: Path) -> Any:
    """Decode a graph's bytes into onnx's ModelProto; `path` is for messages."""
    onnx = import_onnx()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

    if not data:
        raise BundleError(f"{path}: 0 bytes, expected an ONNX graph; {ADVICE}")
    if len(data) >= MOST_BYTES:
        raise BundleError(f"{path}: {len(data)} bytes, expected less than 2 GiB with the weights beside it; {ADVICE}")
    try:
        model = onnx.load_model_from_string(data)
    except (DecodeError, ValueError):
        raise BundleError(f"{path}: {len(data)} bytes that are no ONNX graph, expected one; {ADVICE}") from None
    if not model.graph.output:
        raise BundleError(f"{path}: a graph without outputs, expected those of a program; {ADVICE}")
    return model


def check_graph(model: Any, path: Path, program: Program) -> None:
    """Compare a graph's inputs and outputs with its program's; an axis named "rows" may be open in both.

    Raises:
        BundleError: they differ.
    """
    names = {tensor.name for tensor in model.graph.initializer}
    inputs = [binding_of(value) for value in model.graph.input if value.name not in names]
    outputs = [binding_of(value) for value in model.graph.output]
    check_bindings(str(path), inputs, outputs, program, ADVICE, order=True)


def place_of(tensor: Any, path: Path) -> tuple[str, int, int] | None:
    """Return file, offset and length of a tensor outside the graph; None for a tensor inside it."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries:
        return None
    offset, length = (_whole(entries.get(key, "0"), path) for key in ("offset", "length"))
    return entries.get("location", ""), offset, length


def outside(tensors: Iterable[Any], path: Path) -> int:
    """Return the number of bytes of all tensors that are stored outside the graph."""
    return sum(place[2] for tensor in tensors if (place := place_of(tensor, path)))


def opset_of(model: Any) -> int:
    """Return the version of ONNX's own operators that a graph uses; 0 if it uses none."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _check_opset(model: Any, path: Path, newest: int) -> None:
    """Refuse foreign operators, and an opset outside the range, because the parsers accept any opset silently."""
    others = {entry.domain for entry in model.opset_import} - {"", "ai.onnx"}
    if others:
        raise BundleError(f"{path}: uses the operators of {sorted(others)}, expected ONNX's own alone; {ADVICE}")
    opset = opset_of(model)
    if not OLDEST_OPSET <= opset <= newest:
        raise BundleError(
            f"{path}: opset {opset}, expected {OLDEST_OPSET} to {newest}, which this library's parser is made for; "
            "use a newer library, or --update rolled, whose graphs have opset 18"
        )


def binding_of(value: Any) -> Binding:
    """Return name, type and shape of a graph's input or output."""
    onnx = import_onnx()
    kind = value.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim)
    return Binding(value.name, {"float": "float32", "double": "float64"}.get(dtype, dtype), shape)


def _check_weights(model: Any, path: Path) -> tuple[str, ...]:
    """Return the names of the files of external weights; refuse a file that is missing or too short."""
    ends: dict[str, int] = {}
    for tensor in _tensors(model.graph):
        place = place_of(tensor, path)
        if place is None:
            continue
        name, offset, length = place
        plain = PurePosixPath(name)
        if not name or plain.is_absolute() or ".." in plain.parts or "\\" in name:
            raise BundleError(f"{path}: {tensor.name} lies in {name!r}, expected a file beside the graph; {ADVICE}")
        ends[name] = max(ends.get(name, 0), offset + length)
    for name, end in ends.items():
        file = path.parent / name
        if not file.is_file():
            raise BundleError(f"{file}: missing, expected the weights of {path.name}; copy the bundle again")
        if (size := file.stat().st_size) < end:
            raise BundleError(
                f"{file}: {size} bytes, expected at least {end}, which {path.name} reads; copy the bundle again"
            )
    return tuple(sorted(ends))


def _whole(text: str, path: Path) -> int:
    if not text.isdecimal():
        raise BundleError(f"{path}: {text!r} as a place in a weight file, expected a whole number; {ADVICE}")
    return int(text)


def _tensors(graph: Any) -> Iterator[Any]:
    onnx = import_onnx()
    yield from graph.initializer
    for node in graph.node:
        yield from (attribute.t for attribute in node.attribute if attribute.type == onnx.AttributeProto.TENSOR)


def readers_of(graph: Any) -> dict[str, list[tuple[Any, int]]]:
    """Return the nodes that read each value, and its place among their inputs: MatMul(x, w) gives (MatMul, 1) for w."""
    readers: dict[str, list[tuple[Any, int]]] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, index))
    return readers


def _attention_layers(graph: Any) -> int:
    """Return the number of softmaxes (with or without a cast) that a product reads, and of ONNX's Attention."""
    readers = readers_of(graph)

    def weighs(name: str) -> bool:
        return any(
            node.op_type == "MatMul" or (node.op_type in ("Cast", "Identity") and weighs(node.output[0]))
            for node, _ in readers.get(name, [])
        )

    return sum(
        node.op_type == "Attention" or (node.op_type == "Softmax" and weighs(node.output[0])) for node in graph.node
    )
