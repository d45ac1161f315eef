"""Rounds matrices of TensorRT-RTX's engines to int8, fp8 or int4, in the forms that its compiler reads in place.

Activations keep the bundle's precision. Each matrix becomes codes (numbers of 8 or 4 bits) and a DequantizeLinear,
which the compiler takes into the product (docs/measurements/rtx.md has the counts):

* int8 and fp8 have one scale for the whole matrix, so engines can share the codes as an input [in, out]. With a scale
  for each column the matrix would be unpacked by a kernel of its own in a step of one position.
* int4 has a scale for each column of 64 rows, and is a constant of the engine. As an input it would be unpacked, too.
* A recurrent operator over several positions is a loop, which does not build with codes of a GRU. There the engine
  holds the rounded values in the bundle's precision, so that programs of all lengths compute the same function.

Of a Transformer-XL the matrices of its layers are rounded, as int8 and int4 of the CPU do; of any other step, every
matrix that only products and recurrent operators read.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.engines.sidecar import CODES, GivenWeight, Rounding
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import ENGINES, MANIFEST, Bundle
from txl_runtime.bundle.tables import STATE_DTYPES, Program
from txl_runtime.device.dtypes import LARGEST, from_float32, stored_type, to_float32
from txl_runtime.errors import UsageError
from txl_runtime.types import Array

from txl_engines.checking import Graph, binding_of, decode_graph, import_onnx, outside, place_of, readers_of
from txl_engines.given_weights import LEAST_BYTES, is_odd

LEAST = 1 << 14
"""Least size in bytes of a matrix that is rounded: the bytes of a smaller matrix hardly change the time of a step."""
BLOCK = 64
"""Rows of an int4 matrix that share a scale in each column: the compiler takes 16, 32, 64 and 128."""
FOURS = 7
"""Largest code of int4; the smallest is -7, because codes are symmetric."""
LAYERS = "layers."
"""Beginning of the names of a Transformer-XL's matrices that are rounded."""
RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
PRODUCTS = frozenset({("MatMul", 1), ("Gemm", 1), *((name, place) for name in RECURRENT for place in (1, 2))})
"""Operators that multiply by a matrix, with the matrix's place among their inputs."""
LAYOUT = frozenset({"Concat", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that only change a layout; the compiler still recognises codes behind them."""
OPSETS: Mapping[Rounding, int] = {"int8": 19, "fp8": 19, "int4": 21}
"""Oldest opset whose DequantizeLinear has these codes and scales of half precision."""
ONNX_TYPES: Mapping[Rounding, str] = {"int8": "INT8", "fp8": "FLOAT8E4M3FN", "int4": "INT4"}


class Judged(NamedTuple):
    """Findings about a copy with rounded matrices on the CPU, which become `Sidecar.reached` and `Sidecar.judged`."""

    reached: tuple[float, float]
    judged: dict[str, float | None]


Judge: TypeAlias = Callable[[Path], Judged]
"""A function that compares a copy with rounded matrices, given its folder, with the bundle; CheckError if it fails."""


def round_matrix(stored: Array, rounding: Rounding, dtype: str) -> tuple[Array, Array, Array]:
    """Round a matrix [in, out] of a half-precision type in its stored form.

    Returns:
        codes: int8 [in, out], or the bits of fp8 as uint8.
        scales: scales of the bundle's type, [] or for int4 [in / 64, out].
        values: the values that codes and scales stand for, of the bundle's type.
    """
    matrix, code = to_float32(stored, dtype), CODES.get(rounding, "int8")
    most, rows = (FOURS, BLOCK) if rounding == "int4" else (LARGEST[code], matrix.size)
    parts = matrix.reshape(-1, rows, matrix.shape[1] if rounding == "int4" else 1)  # each column of a part has a scale
    factors = to_float32(from_float32(np.abs(parts).max(axis=1, keepdims=True) / np.float32(most), dtype), dtype)
    factors = np.where(factors, factors, np.float32(1))  # a part of zeros would have the factor 0
    codes = from_float32(np.clip(parts / factors, -most, most), code)
    values = from_float32(to_float32(codes, code) * factors, dtype)
    scales = from_float32(factors, dtype).reshape((len(parts), -1) if rounding == "int4" else ())
    return codes.reshape(matrix.shape), scales, values.reshape(matrix.shape)


def check_rounding(manifest: Manifest, rounding: Rounding, target: str, source: str) -> None:
    """Raise UsageError if a target or a bundle has no such precision; messages begin with `source`, the bundle."""
    own = any(program.kind == "step" for program in manifest.programs)
    if target != "rtx" or (own and rounding == "int4"):
        what, expected = ("a step of its own", "int8 or fp8") if target == "rtx" else (f"built for {target}", "rtx")
        raise UsageError(f"{source}: is {what}, and --precision is {rounding}, expected {expected}; leave it out")
    if manifest.precision not in STATE_DTYPES:
        raise UsageError(
            f"{source}: its precision is {manifest.precision}, expected fp16 or bf16 for --precision {rounding}; "
            "export it again with --precision fp16"
        )


def round_weights(graph: Graph, program: Program, rounding: Rounding, shared: str) -> Graph:
    """Replace the matrices of a composed graph by codes; `sha256` stays the hash of the bytes before.

    Args:
        graph: the graph, with its weights in the bundle's weight file.
        rounding: the precision of the codes.
        shared: the weight file whose int8 and fp8 codes become inputs; "" to keep all in the engine.
    """
    onnx, model = import_onnx(), decode_graph(graph.data, graph.path)
    readers = readers_of(model.graph)
    returned = {value.name for value in model.graph.output}
    initializers, nodes, weights, places = (
        list[Any](),
        list[Any](),
        list[GivenWeight](),
        list[tuple[int, tuple[int, ...]]](),
    )
    held = saved = 0
    for tensor in model.graph.initializer:
        name, shape = tensor.name, tuple(tensor.dims)
        dtype = _half(tensor, program, rounding)
        ends = set(_ends(name, readers, returned)) if dtype else set()
        if not ends or not ends <= PRODUCTS:
            initializers.append(deepcopy(tensor))
            continue
        file, offset, size = place_of(tensor, graph.path) or ("", 0, 0)
        data = np.fromfile(graph.path.parent / file, stored_type(dtype), size // 2, offset=offset)
        codes, scales, values = round_matrix(data.reshape(shape), rounding, dtype)
        places.append((offset, shape))
        if program.segment_length > 1 and any(operator in RECURRENT for operator, _ in ends):
            initializers.append(_tensor(name, tensor.data_type, values))
            held += size
            continue
        saved += size - size // (4 if rounding == "int4" else 2)
        coded, scale = f"{name}.{rounding}", f"{name}.scale"
        kind = onnx.TensorProto.DataType.Value(ONNX_TYPES[rounding])
        direct = all((node.op_type, place) in PRODUCTS for node, place in readers[name])
        if shared and rounding != "int4" and direct and size >= LEAST_BYTES and not is_odd(shape):
            value = onnx.helper.make_tensor_value_info(coded, kind, shape)
            model.graph.input.append(value)
            more = {"offset": offset, "turned": False, "scale": float(to_float32(scales, dtype))}
            weights.append(msgspec.convert(binding_of(value)._asdict() | more, GivenWeight))
        else:
            if rounding == "int4":  # two codes share a byte, the first in its low half
                pairs = codes.reshape(-1, 2) & 15
                codes = pairs[:, 0] | pairs[:, 1] << 4
            initializers.append(_tensor(coded, kind, codes, shape))
            held += codes.nbytes
        initializers.append(_tensor(scale, tensor.data_type, scales))
        blocks = {"axis": 0, "block_size": BLOCK} if rounding == "int4" else {}
        nodes.append(onnx.helper.make_node("DequantizeLinear", [coded, scale], [name], name, **blocks))
    nodes += map(deepcopy, model.graph.node)
    for field, entries in ((model.graph.initializer, initializers), (model.graph.node, nodes)):
        del field[:]
        field.extend(entries)
    standard = next(entry for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    standard.version = max(standard.version, OPSETS[rounding])
    return dataclasses.replace(
        graph,
        data=model.SerializeToString(deterministic=True),
        nodes=tuple((node.name, node.op_type) for node in nodes),
        given=tuple(weights),
        weight_bytes=outside(initializers, graph.path) + held,
        saved_bytes=saved,
        rounded=tuple(places),
    )


@contextmanager
def rounded_copy(bundle: Bundle, places: Collection[tuple[int, tuple[int, ...]]], rounding: Rounding) -> Iterator[Path]:
    """Yield a copy of a bundle, without engines, whose matrices have the values that an engine's codes stand for.

    Args:
        places: the offset in the weight file and the shape of each matrix.
    """
    dtype, weights = STATE_DTYPES[bundle.manifest.precision], bundle.manifest.weights
    with tempfile.TemporaryDirectory(prefix=f"txl-deploy-{rounding}-") as place:
        copy = Path(place) / bundle.path.name
        shutil.copytree(bundle.path, copy, ignore=shutil.ignore_patterns("engines"))
        with (copy / weights).open("r+b") as file:
            for offset, shape in places:
                file.seek(offset)
                stored = np.frombuffer(file.read(2 * int(np.prod(shape))), stored_type(dtype)).reshape(shape)
                file.seek(offset)
                file.write(round_matrix(stored, rounding, dtype)[2].tobytes())
        document = msgspec.json.decode((copy / MANIFEST).read_bytes())
        files = {name: record for name, record in document["files"].items() if not name.startswith(ENGINES)}
        files[weights]["sha256"] = file_sha256(copy / weights)
        (copy / MANIFEST).write_bytes(msgspec.json.encode(document | {"files": files}))
        yield copy


def _half(tensor: Any, program: Program, rounding: Rounding) -> str:
    """Return the type of a matrix of half precision that may be rounded; "" for any other tensor."""
    onnx = import_onnx()
    dtype = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}.get(tensor.data_type, "")
    *alone, rows, _ = tensor.dims if len(tensor.dims) > 1 else (0, 0, 0)
    fits = set(alone) <= {1} and (rounding != "int4" or (not alone and rows % BLOCK == 0))
    named = program.kind == "step" or tensor.name.startswith(LAYERS)
    large = bool(tensor.external_data) and 2 * int(np.prod(tensor.dims)) >= LEAST
    return dtype if fits and named and large else ""


def _ends(
    name: str, readers: Mapping[str, Sequence[tuple[Any, int]]], returned: Collection[str]
) -> Iterator[tuple[str, int]]:
    """Yield each operator that computes with a value, maybe after a change of layout, and the value's place there."""
    if name in returned:
        yield "output", 0
    for node, place in readers.get(name, ()):
        if node.op_type in LAYOUT:
            yield from _ends(node.output[0], readers, returned)
        else:
            yield node.op_type, place


def _tensor(name: str, kind: int, values: Array, shape: Sequence[int] | None = None) -> Any:
    tensor = import_onnx().TensorProto(name=name, data_type=kind, dims=values.shape if shape is None else shape)
    tensor.raw_data = values.tobytes()
    return tensor
