"""Emulates half precision of a device on the CPU, with a float32 copy of the bundle that rounds every result.

ONNX Runtime has no bf16 kernels for the CPU, and with fp16 it keeps float32 between operators where a device rounds. So
the copy, in a temporary folder, has graphs of float32 values in which a Cast to half precision and back follows every
operator that computed in half precision. Operators that only move values need no rounding. All values are then numbers
of half precision; values too large for fp16 are infinite. A device's results still differ: a device keeps more
precision inside a fused kernel, and adds in a different order.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors import SafetensorError
from safetensors.torch import save_file
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import TensorSpec
from txl_runtime.bundle.weight_header import StoredTensor, read_header
from txl_runtime.errors import TxlError

from txl_export.bundle.sealing import seal
from txl_export.graphs.shared_weights import read_weight_file

_HALF = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}
_Places = Sequence[tuple[StoredTensor, StoredTensor]]

EMULATED = "bf16"
"""The precision that the CPU cannot run. The CPU runs fp16, but more exactly than a device does."""

MOVING = frozenset(
    {"Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad", "Reshape", "Slice"}
    | {"Split", "Squeeze", "TensorScatter", "Tile", "Transpose", "Unsqueeze", "Where"}
)
"""Operators that only move values, so their results need no rounding."""


@contextlib.contextmanager
def runnable(folder: Path, manifest: Manifest, backend: str, rounding: bool = False) -> Iterator[Path]:
    """Yield the bundle's folder, or the folder of a copy that the CPU can run; the copy is removed after the block.

    Args:
        folder, manifest: the bundle.
        backend: the backend that will run the bundle; backends of devices run bf16 themselves.
        rounding: also copy an fp16 bundle, so that the copy rounds as often as a device does.
    """
    if manifest.precision not in (EMULATED, "fp16" if rounding else EMULATED) or backend != "cpu":
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=f"txl-deploy-{manifest.precision}-") as place:
        _copy(folder, Path(place), manifest)
        yield Path(place)


def _copy(folder: Path, place: Path, manifest: Manifest) -> None:
    stored = read_weight_file(folder / manifest.weights)
    tensors = {name: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for name, t in stored.items()}
    try:
        save_file(tensors, place / manifest.weights, metadata={"format": "pt"})
        for name in (manifest.vocabulary, manifest.selftest):
            if name is not None and (folder / name).is_file():
                shutil.copy(folder / name, place / name)
        theirs, ours = read_header(folder / manifest.weights), read_header(place / manifest.weights)
        places = [(theirs[name], ours[name]) for name in theirs if theirs[name].length]
        for file in {program.file for program in manifest.programs}:
            rewritten = in_float32(onnx.load(folder / file, load_external_data=False), places)
            (place / file).write_bytes(rewritten.SerializeToString())
    except (OSError, SafetensorError) as error:
        raise TxlError(
            f"{place}: {getattr(error, 'strerror', None) or error}; {manifest.precision} is rounded in a float32 copy, "
            "expected room for one; set TMPDIR to where there is"
        ) from None
    states = tuple(
        msgspec.structs.replace(state, dtype="float32") if state.dtype in _HALF.values() else state
        for state in manifest.states
    )
    programs = tuple(
        msgspec.structs.replace(program, inputs=_as_float32(program.inputs), outputs=_as_float32(program.outputs))
        for program in manifest.programs
    )
    seal(place, msgspec.structs.replace(manifest, precision="fp32", states=states, programs=programs))


def _as_float32(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(
        msgspec.structs.replace(spec, dtype="float32") if spec.dtype in _HALF.values() else spec for spec in specs
    )


def in_float32(model: onnx.ModelProto, places: _Places = ()) -> onnx.ModelProto:
    """Return a float32 version of a half precision graph that rounds wherever the original would.

    Args:
        model: the graph, with all types filled in, as `tracing` writes it.
        places: for each tensor, its place in the original weight file and its place in the float32 file.
    """
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    graph = inferred.graph
    values = (*graph.value_info, *graph.input, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    del graph.value_info[:], graph.node[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _HALF:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        _widen(tensor, places)
    for original in model.graph.node:
        node = graph.node.add()
        node.CopyFrom(original)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen(attribute.t, places)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _HALF:
                attribute.i = TensorProto.FLOAT
        if node.op_type in MOVING or node.op_type == "Constant":
            continue
        for index, output in enumerate(node.output):
            if types.get(output) in _HALF:
                exact, short = f"{output}.exact", f"{output}.rounded"
                node.output[index] = exact
                graph.node.append(helper.make_node("Cast", [exact], [short], to=types[output]))
                graph.node.append(helper.make_node("Cast", [short], [output], to=TensorProto.FLOAT))
    return inferred


def _moved(offset: int, length: int, places: _Places) -> tuple[int, int]:
    """Return offset and length of a byte range in the float32 file, where half precision takes twice the bytes."""
    for before, after in places:
        inside = offset - before.offset
        if inside >= 0 and inside + length <= before.length:
            times = after.length // before.length
            return after.offset + inside * times, length * times
    raise TxlError(f"a graph reads bytes {offset} to {offset + length}, which are no weights; export again")


def _widen(tensor: onnx.TensorProto, places: _Places) -> None:
    """Convert a tensor of half precision to float32; point an external tensor to its place in the float32 file."""
    entries: Mapping[str, str] = {entry.key: entry.value for entry in tensor.external_data}
    half = tensor.data_type in _HALF
    if entries:
        offset, length = _moved(int(entries["offset"]), int(entries["length"]), places)
        del tensor.external_data[:]
        for key, text in {**entries, "offset": str(offset), "length": str(length)}.items():
            tensor.external_data.add(key=key, value=text)
        tensor.data_type = TensorProto.FLOAT if half else tensor.data_type
    elif half:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
