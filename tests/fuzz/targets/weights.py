"""Weight files: their header, beside the library's own reading of it; and the ranges that graphs have in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import external_data_helper
from safetensors import SafetensorError, safe_open
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.bundle.weight_header import read_header
from txl_runtime.errors import BundleError
from txl_runtime.guard.graph_check import check_graph

from fuzz.choices import Choices
from fuzz.edits import edited, edited_message, parsed
from fuzz.edits import written as encoded
from fuzz.targets.places import BASES, written

FILE = "weights.safetensors"


def one_input(data: bytes) -> None:
    """A header, or a graph with parameters in the weight file."""
    choices = Choices(data)
    kind = choices.number(3)
    if kind == 0:
        _header(choices.rest())
    elif kind == 1:
        _header(_changed_header(choices))
    elif kind == 2:
        _ranges(choices.rest())
    else:
        graph = parsed((BASES / "step" / "step-1.onnx").read_bytes())
        _ranges(encoded(edited_message(graph, choices)))


def seeds() -> Iterator[bytes]:
    """A weight file and its graph, and changes of both."""
    yield b"\0" + (BASES / "step" / FILE).read_bytes()[:600]
    yield b"\0" + (16).to_bytes(8, "little") + b'{"__metadata__":' + b"{}}"
    yield b"\2" + (BASES / "step" / "step-1.onnx").read_bytes()
    for number in range(9):
        yield bytes([1, 2, number, 1, number, number, 0, 7])
        yield bytes([3, 2, number * 9, number, number, 1, number])


def _header(data: bytes) -> None:
    """Check that a header that is believed lies within the file, and is the library's if the library takes the file."""
    path = written("header.safetensors", data)
    try:
        with safe_open(path, framework="numpy") as tensors:
            known = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
            facts = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in known.items()}
    except (SafetensorError, OSError):
        facts = None
    try:
        found = read_header(path)
    except BundleError:
        assert facts is None, "refused, though the library takes it"
        raise
    for name, tensor in found.items():
        assert 0 <= tensor.offset <= tensor.offset + tensor.length <= len(data), (name, tensor, len(data))
    if facts is not None:
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == facts


def _changed_header(choices: Choices) -> bytes:
    data = (BASES / "step" / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(edited(json.loads(data[8 : 8 + length]), choices, 4)).encode()
    return (len(text) + choices.pick((0, 0, 0, 1, 8, 1 << 40))).to_bytes(8, "little") + text + data[8 + length :]


def _ranges(graph: bytes) -> None:
    """Views within the file, as large as their shapes; the same as onnx reads where it understands the graph."""
    walk = check_graph(graph, "graph.onnx", _manifest().programs[0], _manifest())
    content = np.arange(1 << 12, dtype=np.uint8)
    found = walk.parameters(content)
    for name, tensor in found.items():
        assert tensor.nbytes <= content.nbytes, name
        assert np.shares_memory(tensor, content) or not tensor.size, name
    try:
        model = onnx.load_model_from_string(graph)
    except DecodeError:
        return  # notes that no engine reads, and that onnx cannot
    assert walk.read | {""} == {name for node in model.graph.node for name in node.input} | {""}
    theirs = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, tensor in found.items():
        info = external_data_helper.ExternalDataInfo(theirs[name])
        assert info.location == FILE
        start = int(info.offset or 0)
        assert bytes(content[start : start + tensor.nbytes]) == tensor.tobytes(), name
        assert tuple(theirs[name].dims) == tensor.shape


@cache
def _manifest() -> Manifest:
    path = BASES / "step" / "manifest.json"
    return decode_manifest(path.read_bytes(), str(path))
