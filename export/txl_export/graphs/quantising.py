"""Quantises weights to int8 and int4 for the CPU, and defines how they are stored; the family chooses the matrices.

int4 has a scale and a zero point per block of inputs. `gptq` rounds matrices whose inputs are known, ONNX Runtime's own
quantiser all others; both return the same parts. int8 has a scale per column (output). For long segments int8 is stored
in two forms of the same numbers, for ONNX Runtime's two operators (`quantised_matmul`): blocks for few rows at a time,
as in decoding, and plain columns for many.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor
from txl_runtime.errors import UsageError

from txl_export.graphs.gptq import round_to_inputs

QUANTISED = ("int8", "int4")
BITS = {"int8": 8, "int4": 4}
BLOCKS = (128, 64, 32)
COLUMNS = "columns"
"""Suffix of the name of int8 codes in the matrix's own layout, [in, out]."""


def gain_error(folded: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> float:
    """Return the largest |gain - 1| of the quantised matrices: 0.02 if a matrix is 2 % too large.

    The gain is the slope of a line through the origin, fitted to quantised over original values. Rounding cancels out
    in the gain, so a wrong scale shows. The proof's other limits are loose for few bits, and a wrong scale could pass.
    """
    worst = 0.0
    for name, kind in codes_in(parts):
        original, quantised = folded[name].double(), _matrix(parts, name, kind).double()
        slope = float((quantised * original).sum() / original.square().sum().clamp_min(1e-30))
        worst = max(worst, abs(slope - 1))
    return worst


def codes_in(parts: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each quantised matrix's name and kind of codes, e.g. ("w", "int8"); an int8 matrix may have two kinds."""
    for part in parts:
        name, _, kind = part.rpartition(".")
        if f"{name}.shape" in parts and kind in (*QUANTISED, COLUMNS):
            yield name, kind


def quantise(
    folded: Mapping[str, Tensor],
    precision: str,
    matrices: Collection[str],
    keep: Collection[str] = (),
    many: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the parameters with matrices replaced by their quantised parts.

    Codes are the quantised numbers. NAME.int8 or NAME.int4 are codes in blocks, uint8 [out, blocks, bytes of a block].
    Beside them stand NAME.scale, float32 [out · blocks], NAME.zero, packed zero points (only int4), and NAME.shape,
    int32 [2], in and out. NAME.columns are int8 codes [in, out], with NAME.column_scale, float32 [out].

    Args:
        folded: the parameters that graphs compute with.
        precision: int8 or int4; any other precision changes nothing.
        matrices: names of matrices that may be quantised.
        keep: beginnings of names that stay float32, e.g. "layers.03".
        many: store int8 also as columns, for products of many rows.
        inputs: for int4, the sums of x xᵀ over a matrix's inputs, float64 [in, in], by its name (`gptq`).

    Raises:
        UsageError: no matrix's name begins with an entry of `keep`.
    """
    for start in keep:
        if not any(is_kept(name, [start]) for name in matrices):
            raise UsageError(f"--keep {start} names no matrix; expected e.g. layers.00 or layers.00.feed_forward.inner")
    parts: dict[str, Tensor] = {}
    for name, tensor in folded.items():
        if precision not in QUANTISED or name not in matrices or is_kept(name, keep):
            parts[name] = tensor
            continue
        parts[f"{name}.shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
        if precision == "int4":
            known = (inputs or {}).get(name)
            codes, scale, zero = _blocks(tensor.numpy()) if known is None else _blocks_for(tensor, known)
            parts |= {f"{name}.int4": codes, f"{name}.scale": scale, f"{name}.zero": zero}
            continue
        columns, scale = _columns(tensor)
        codes = _in_blocks(columns)
        parts |= {f"{name}.int8": codes, f"{name}.scale": scale.repeat_interleave(codes.shape[1])}
        if many:
            parts |= {f"{name}.{COLUMNS}": columns, f"{name}.column_scale": scale}
    return parts


def is_kept(name: str, keep: Collection[str]) -> bool:
    """Return whether a matrix stays float32: `keep` has its name, or the name of a part of the model around it."""
    return any(name == start or name.startswith(f"{start}.") for start in keep)


def dequantise(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters with quantised matrices as float32: the inverse of `quantise` up to rounding.

    For example, "w.int8", "w.scale" and "w.shape" [32, 96] become "w" float32 [32, 96].
    """
    plain = {name: tensor for name, tensor in parts.items() if f"{name.rpartition('.')[0]}.shape" not in parts}
    return plain | {name: _matrix(parts, name, kind) for name, kind in codes_in(parts)}


def block_of(size: int) -> int:
    """Return the number of inputs that share a scale: the largest of `BLOCKS` that divides `size`, or else 32.

    Example:
        >>> block_of(512)
        128
    """
    return next((block for block in BLOCKS if size % block == 0), BLOCKS[-1])


def _columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes [in, out] and a symmetric scale per column, [out]."""
    scale = matrix.abs().amax(dim=0) / 127
    return (matrix / scale.clamp_min(torch.finfo(scale.dtype).tiny)).round().to(torch.int8), scale


def _in_blocks(columns: Tensor) -> Tensor:
    """Return the codes as uint8 [out, blocks, block], with 128 for zero; the last block is filled up with zeros."""
    size, width = columns.shape
    block = block_of(size)
    codes = torch.full((width, -(-size // block) * block), 128, dtype=torch.uint8)
    codes[:, :size] = (columns.T.to(torch.int16) + 128).to(torch.uint8)
    return codes.reshape(width, -1, block)


def _blocks_for(matrix: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of an int4 matrix as `_blocks` does, fitted to the sum of x xᵀ over the matrix's inputs."""
    codes, scale, zero = round_to_inputs(matrix, inputs, block_of(len(matrix)))
    if zero.shape[1] % 2:  # fill the last byte as ONNX Runtime's quantiser does
        zero = torch.nn.functional.pad(zero, (0, 1), value=8)
    return codes[..., ::2] | codes[..., 1::2] << 4, scale, zero[:, ::2] | zero[:, 1::2] << 4


def _blocks(matrix: NDArray[np.float32]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ONNX Runtime's int4 codes, uint8 [out, blocks, bytes per block], scales and packed zero points."""
    size, width = matrix.shape
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "one product",
        [value("x", onnx.TensorProto.FLOAT, [1, size])],
        [value("y", onnx.TensorProto.FLOAT, [1, width])],
        [onnx.numpy_helper.from_array(matrix, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    with _quiet_logging():
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantiser = MatMulNBitsQuantizer(model, bits=4, block_size=block_of(size), is_symmetric=False, accuracy_level=4)
        quantiser.process()
    (product,) = quantiser.model.model.graph.node
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in quantiser.model.model.graph.initializer}
    codes, scale, zero = (torch.from_numpy(arrays[name].copy()) for name in product.input[1:4])
    return codes, scale, zero


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """Silence the quantiser's messages, and restore the process's logging, which importing the quantiser changes."""
    root = logging.getLogger()
    handlers, level, off = list(root.handlers), root.level, logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(off)
        root.handlers[:] = handlers
        root.setLevel(level)


def _matrix(parts: Mapping[str, Tensor], base: str, kind: str) -> Tensor:
    """Return the matrix that codes of one kind represent, float32 [in, out]."""
    if kind == COLUMNS:
        return parts[f"{base}.{COLUMNS}"].float() * parts[f"{base}.column_scale"]
    size, width = (int(n) for n in parts[f"{base}.shape"])
    codes, zero = parts[f"{base}.{kind}"], parts.get(f"{base}.zero")
    zero = torch.tensor([[128]]) if zero is None else zero.reshape(width, -1)
    if BITS[kind] == 4:  # two codes per byte, the low half first
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(start_dim=2)
        zero = torch.stack([zero & 15, zero >> 4], dim=-1).flatten(start_dim=1)
    zero, scale = zero[:, : codes.shape[1], None], parts[f"{base}.scale"].reshape(width, -1, 1)
    matrix = (codes.float() - zero.float()) * scale  # the matrix is still [out, blocks, inputs per block]
    return matrix.flatten(start_dim=1)[:, :size].T.contiguous()
