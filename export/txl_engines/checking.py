"""An ONNX file, held against its program before a library sees it.

TensorRT's parser takes some graphs without a word that are not what they should be: an empty file, an opset it does
not know, double inputs that become float. What can be told from the file is told here, by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.tables import Program
from txl_runtime.device.engines.facts import Facts
from txl_runtime.errors import BackendError, BundleError

__all__ = ["Graph", "check_bindings", "import_onnx", "load_graph", "read_graph", "restamp"]

OLDEST_OPSET = 9
MOST_BYTES = 1 << 31
ADVICE = "export the model again"


@dataclass(frozen=True)
class Graph:
    """A checked graph.

    Attributes:
        data: the file's bytes, restamped and with prefixes of other weights inside where the library needs it.
        path: where the file is or would be; external weights lie beside it.
        sha256: of the file's bytes as found.
        weights: SHA-256 of each file of external weights.
        nodes: name and operator of each node, as the parser counts them.
        attention_layers: attentions in it, counted as softmaxes between two products.
        scatters: TensorScatter nodes: states that are updated in place.
    """

    data: bytes
    path: Path
    sha256: str
    weights: dict[str, str]
    nodes: tuple[tuple[str, str], ...]
    attention_layers: int
    scatters: int


def read_graph(
    source: Path | bytes,
    program: Program,
    facts: Facts,
    folder: Path | None = None,
    hashes: Mapping[str, str] | None = None,
) -> Graph:
    """Read a graph and check it against its program and a library's facts.

    Args:
        source: the file, or its bytes.
        program: what the graph should be.
        facts: of the library that will build it.
        folder: where the external weights of bytes lie.
        hashes: SHA-256 of weight files that are known already.

    Raises:
        BundleError: the graph is unreadable or not what its program says.
        BackendError: the library is too old for it, or onnx is not installed.
    """
    path = source if isinstance(source, Path) else (folder or Path()) / program.file
    found = data = _read(source) if isinstance(source, Path) else source
    model = _decode(data, path)
    opset = _check_opset(model, path, facts)
    check_bindings(model, path, program)
    files = _check_weights(model, path)
    known = hashes or {}
    weights = {name: known.get(name) or file_sha256(path.parent / name) for name in files}
    changed = _separate(model, path)
    if opset > facts.opset:
        model, changed = restamp(model, facts.opset, str(path)), True
    if changed:
        data = model.SerializeToString()
    return Graph(
        data=data,
        path=path,
        sha256=hashlib.sha256(found).hexdigest(),
        weights=weights,
        nodes=tuple((node.name, node.op_type) for node in model.graph.node),
        attention_layers=_attention_layers(model.graph),
        scatters=sum(node.op_type == "TensorScatter" for node in model.graph.node),
    )


def import_onnx() -> Any:
    """The onnx module.

    Raises:
        BackendError: it is not installed.
    """
    try:
        import onnx
    except ModuleNotFoundError:
        raise BackendError("onnx is not installed, expected it to read graphs; pip install onnx") from None
    return onnx


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BundleError(f"{path}: no such file, expected an ONNX graph; check the path or {ADVICE}") from None
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; expected a readable ONNX graph") from None


def _decode(data: bytes, path: Path) -> Any:
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


def _check_opset(model: Any, path: Path, facts: Facts) -> int:
    """The graph's opset; the parsers take any number silently."""
    versions = {entry.domain or "ai.onnx": int(entry.version) for entry in model.opset_import}
    opset = versions.pop("ai.onnx", 0)
    if versions:
        raise BundleError(f"{path}: uses the operators of {sorted(versions)}, expected ONNX's own alone; {ADVICE}")
    newest = max(facts.opset, 18 if facts.weakly_typed else 0)  # 18 is restamped where only 17 is known
    if not OLDEST_OPSET <= opset <= newest:
        raise BundleError(
            f"{path}: opset {opset}, expected {OLDEST_OPSET} to {newest}, which this library's parser is made for; "
            "use a newer library, or --update rolled, whose graphs have opset 18"
        )
    return opset


def load_graph(path: Path) -> Any:
    """A graph without its external weights.

    Raises:
        BundleError: it cannot be read.
    """
    return _decode(_read(path), path)


def check_bindings(model: Any, path: Path, program: Program) -> None:
    """Hold a graph's inputs and outputs against its program's; sizes called "rows" may stay open in both.

    Raises:
        BundleError: they differ.
    """
    names = {tensor.name for tensor in model.graph.initializer}
    found = {
        "inputs": [_spec(value) for value in model.graph.input if value.name not in names],
        "outputs": [_spec(value) for value in model.graph.output],
    }
    for side, promised in (("inputs", program.inputs), ("outputs", program.outputs)):
        wants = [(spec.name, spec.dtype, spec.shape) for spec in promised]
        if found[side] == wants:
            continue
        for has, want in zip(found[side], wants, strict=False):
            if has != want:
                raise BundleError(
                    f"{path}: one of its {side} is {_shown(has)}, expected {_shown(want)} as the manifest has it; "
                    f"{ADVICE}"
                )
        raise BundleError(f"{path}: has {len(found[side])} {side}, expected the {len(wants)} of the manifest; {ADVICE}")


def _spec(value: Any) -> tuple[str, str, tuple[Any, ...]]:
    onnx = import_onnx()
    kind = value.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim)
    return value.name, {"float": "float32", "double": "float64"}.get(dtype, dtype), shape


def _shown(spec: tuple[str, str, tuple[Any, ...]]) -> str:
    name, dtype, shape = spec
    return f"{name} {dtype}[{', '.join(map(str, shape))}]"


def _check_weights(model: Any, path: Path) -> tuple[str, ...]:
    """Names of the files that hold the graph's external weights; each has to be there and long enough."""
    ends: dict[str, int] = {}
    for tensor in _tensors(model.graph):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if not entries:
            continue
        name = entries.get("location", "")
        plain = PurePosixPath(name)
        if not name or plain.is_absolute() or ".." in plain.parts or "\\" in name:
            raise BundleError(f"{path}: {tensor.name} lies in {name!r}, expected a file beside the graph; {ADVICE}")
        end = _whole(entries.get("offset", "0"), path) + _whole(entries.get("length", "0"), path)
        ends[name] = max(ends.get(name, 0), end)
    for name, end in ends.items():
        file = path.parent / name
        if not file.is_file():
            raise BundleError(f"{file}: missing, expected the weights of {path.name}; copy the bundle again")
        if (size := file.stat().st_size) < end:
            raise BundleError(
                f"{file}: {size} bytes, expected at least {end}, which {path.name} reads; copy the bundle again"
            )
    return tuple(sorted(ends))


def _separate(model: Any, path: Path) -> bool:
    """Put weights that are the beginning of others into the graph itself; whether there were any.

    Graphs share rows of one weight file, but the parsers know weights by where they start, and take no two of
    different length ("Weights of same values but of different counts").
    """
    onnx = import_onnx()
    places: dict[tuple[str, int], list[Any]] = {}
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            start = (entries["location"], _whole(entries.get("offset", "0"), path))
            places.setdefault(start, []).append((_whole(entries.get("length", "0"), path), tensor))
    changed = False
    for (name, offset), found in places.items():
        longest = max(length for length, _ in found)
        for length, tensor in found:
            if length != longest:
                with (path.parent / name).open("rb") as stream:
                    stream.seek(offset)
                    tensor.raw_data = stream.read(length)
                del tensor.external_data[:]
                tensor.data_location = onnx.TensorProto.DEFAULT
                changed = True
    return changed


def _whole(text: str, path: Path) -> int:
    if not text.isdecimal():
        raise BundleError(f"{path}: {text!r} as a place in a weight file, expected a whole number; {ADVICE}")
    return int(text)


def _tensors(graph: Any) -> Iterator[Any]:
    onnx = import_onnx()
    yield from graph.initializer
    for node in graph.node:
        yield from (attribute.t for attribute in node.attribute if attribute.type == onnx.AttributeProto.TENSOR)


def _attention_layers(graph: Any) -> int:
    """Softmaxes, cast or not, whose result a product reads; ONNX's own Attention too."""
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def weighs(name: str) -> bool:
        return any(
            node.op_type == "MatMul" or (node.op_type in ("Cast", "Identity") and weighs(node.output[0]))
            for node in readers.get(name, [])
        )

    kinds = [(node.op_type, node) for node in graph.node]
    return sum(kind == "Attention" or (kind == "Softmax" and weighs(node.output[0])) for kind, node in kinds)


def restamp(model: Any, opset: int, source: str = "the graph") -> Any:
    """The same graph as one of an older opset, when each of its operators means the same there.

    An operator does when its definition is the same one, or when the older definition has every input and attribute
    that is used. A Split into equal parts says so by having no sizes (before opset 18) or by their number (since).

    Raises:
        BackendError: an operator is newer or means something else.
    """
    onnx = import_onnx()
    found = next(int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    older_model = onnx.ModelProto()
    older_model.CopyFrom(model)
    lengths = _lengths(older_model.graph)
    for node in older_model.graph.node:
        if node.op_type == "Split" and opset < 18 and _splits_evenly(node, lengths):
            kept = [attribute for attribute in node.attribute if attribute.name != "num_outputs"]
            del node.attribute[:]
            node.attribute.extend(kept)
        try:
            newer = onnx.defs.get_schema(node.op_type, max_inclusive_version=found, domain="")
            older = onnx.defs.get_schema(node.op_type, max_inclusive_version=opset, domain="")
        except onnx.defs.SchemaError:
            raise BackendError(
                f"{source}: node {node.name!r} is {node.op_type}, which opset {opset} lacks; use a newer TensorRT"
            ) from None
        if newer.since_version == older.since_version:
            continue
        strange = sorted({attribute.name for attribute in node.attribute} - set(older.attributes))
        if strange or not older.min_input <= len(node.input) <= older.max_input:
            what = f"attribute {strange[0]}" if strange else f"{len(node.input)} inputs"
            raise BackendError(
                f"{source}: node {node.name!r} is {node.op_type} with {what}, which opset {opset} does not have; "
                "use a newer TensorRT"
            )
    del older_model.opset_import[:]
    older_model.opset_import.append(onnx.helper.make_opsetid("", opset))
    older_model.ir_version = min(older_model.ir_version, 8)
    return older_model


def _lengths(graph: Any) -> dict[str, list[int]]:
    """The lengths of every value whose shape the graph states; 0 stands for a length that is open."""
    return {
        value.name: [int(dimension.dim_value) for dimension in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output, *graph.value_info)
    }


def _splits_evenly(node: Any, lengths: dict[str, list[int]]) -> bool:
    """Whether a Split without sizes makes equal parts; False where the graph does not tell."""
    axis = next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 0)
    parts = [lengths[name][axis] if lengths.get(name) else 0 for name in node.output]
    return len(node.input) == 1 and parts[0] > 0 and len(set(parts)) == 1
