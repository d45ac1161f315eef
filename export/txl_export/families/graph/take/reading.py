"""An ONNX file from outside as one model in memory: nothing in it is run, of what it points to the size is looked at.

The bytes are parsed by onnx, once. What is kept of them is bounded: a file with more nodes, inputs or nested graphs
than any model has is refused in one line.
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
"""The most bytes of a protocol buffer; weights may lie beside it."""
MOST_SIDES = 2**10
"""Inputs or outputs of a graph."""
MOST_AXES, MOST_NAME = 64, 2**10
"""The most axes of an input, output or constant; the most characters of a name of an input, output or size."""
MOST_NUMBERS = 2**24
"""The most numbers of an input, and of all that are drawn together."""
SMALL = 2**9
"""The most bytes of a tensor beside the file that is read into the graph."""
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
        sha256: of the bytes that lie there.
        data: these bytes, with small weights that lie beside them; a proof runs them.
        model: the graph; its larger tensors stay in the files beside it.
        inputs, outputs: without inputs that have a value in the file.
        optional: inputs that have one, which is taken where a call does not give another.
        bytes: of the file, and of the weights beside it.
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
        """Another graph that was made of this file, whose weights stay where they are."""
        given = model.graph.initializers
        inputs = [(str(value.name) in given, _port(value, "input")) for value in model.graph.inputs]
        return replace(
            self,
            model=model,
            inputs=tuple(port for optional, port in inputs if not optional),
            outputs=tuple(_port(value, "output") for value in model.graph.outputs),
            optional=tuple(port for optional, port in inputs if optional),
        )


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
    sha256 = hashlib.sha256(data).hexdigest()
    model, beside, data = parse(data, path)
    for value in model.graph.inputs:
        fixed = math.prod(size for size in value.shape or () if isinstance(size, int))
        if fixed > MOST_NUMBERS:
            told = brief(printable(str(value.name)))
            raise CheckpointError(f"{path}: {told} has {fixed:.3g} numbers, expected at most {MOST_NUMBERS}")
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
    """A model's bytes as a graph that can be changed, how many bytes its weights have in files beside `path`, and the
    bytes with the small ones of these weights in them: ONNX Runtime looks at those, and knows of no files.

    Raises:
        CheckpointError: they are no ONNX model, it has more nodes than it may, or its parts do not fit together.
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
        if entry.domain == "ai.onnx":  # a second name of the standard
            entry.domain = ""
    texts = [model.producer_name, model.producer_version, *(entry.domain for entry in model.opset_import)]
    for graph in graphs(model.graph):
        texts += _texts(graph)
        if graph.sparse_initializer:  # which onnx-ir would leave out
            raise CheckpointError(f"{path}: has sparse weights, expected dense ones; export it again")
    if not all(isinstance(text, str) for text in texts):  # onnx has them as bytes
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
        with quiet():  # what is wrong with the graph is said in one line, by who runs it
            made = ir.from_proto(model)
            ir.external_data.set_base_dir(made.graph, str(path.parent))
    except Exception as error:  # onnx-ir raises what happens to go wrong
        raise CheckpointError(f"{path}: no graph that could be changed ({_why(error)}); export it again") from None
    return made, beside, data


def copied(model: ir.Model) -> ir.Model:
    """A graph of its own, which shares the tensors.

    Raises:
        CheckpointError: its parts do not fit together.
    """
    try:
        return model.clone()
    except Exception as error:  # as above
        raise CheckpointError(f"no graph that could be changed ({_why(error)}); export the file again") from None


def packed(model: ir.Model) -> bytes:
    """A model's bytes, without the weights that lie in files.

    Raises:
        CheckpointError: a tensor of it is not what it says.
    """
    try:
        return bytes(ir.to_proto(model).SerializeToString())
    except Exception as error:  # as above
        raise CheckpointError(f"a tensor is not what it says ({_why(error)}); export the file again") from None


def _why(error: BaseException) -> str:
    """The first error of a chain, without the graphs that onnx-ir prints around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)


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


def _length(tensor: Any) -> float:
    """The bytes of a tensor that lies beside the file, as far as it says so."""
    said = {entry.key: entry.value for entry in tensor.external_data}
    return float(said["length"]) if said.get("length", "").isdecimal() else math.inf


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
    """Bytes of the files that weights lie in; each has to be there, beside the graph.

    Raises:
        CheckpointError: one is not, or lies elsewhere, or a tensor has more axes than any has.
    """
    found: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.dims) > MOST_AXES:
            raise CheckpointError(f"{path}: a tensor has {len(tensor.dims)} axes, expected at most {MOST_AXES}")
        said = {entry.key: entry.value for entry in tensor.external_data}
        if (place := said.get("location")) is None:
            continue
        if place not in found:
            plain, beside = PurePosixPath(place), path.parent / place
            inside = not (plain.is_absolute() or ".." in plain.parts or "\\" in place or "\0" in place)
            if len(place) > MOST_NAME or not inside or not beside.is_file():
                told = brief(printable(place))
                raise CheckpointError(f"{path}: its weights lie in {told!r}, expected a file beside it; copy it too")
            found[place] = beside.stat().st_size
        ends = sum(int(said[key][:20]) for key in ("offset", "length") if said.get(key, "")[:20].isdecimal())
        if ends > found[place]:
            told = f"{printable(place)} has {found[place]} bytes, of which its weights take {ends} or more"
            raise CheckpointError(f"{path}: {told}, expected all of them; copy it again")
    return sum(found.values())
