"""GPTQ (Frantar et al. 2022) rounds a matrix to 4 bits so that its products with given inputs change least.

Rows of the matrix, one per input, are rounded one after another. The rows that are not yet rounded compensate for the
error, as far as their inputs are correlated. So the error of x @ W is small, where plain rounding makes W's error
small.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOP = 15
"""The largest 4-bit number (code); the smallest is 0."""

DAMPING = 0.01
"""Share of the inputs' mean square that is added to every input's square, so that their matrix is invertible."""


def round_to_inputs(matrix: Tensor, inputs: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix W; return codes (4-bit numbers), scales and zero points, so that W ≈ (code - zero) · scale.

    The row of an input that was always 0 is rounded plainly and compensates for no error. For example, a matrix
    [64, 96] in blocks of 32 inputs has scales for 2 blocks of each of 96 columns.

    Args:
        matrix: float32 [in, out].
        inputs: float64 [in, in], the sum of x xᵀ over rows x [in] that were multiplied by the matrix; finite.
        block: number of inputs that share a scale and a zero point per output.

    Returns:
        uint8 [out, blocks, block], float32 [out, blocks], uint8 [out, blocks]; if inputs do not fill the last block,
            the remaining codes are the zero point.
    """
    size, width = matrix.shape
    left = matrix.double()  # the loop adds the errors of rows that are already rounded
    factor = _factor(inputs)
    count = -(-size // block)
    codes, scales, zeros = torch.empty(count, block, width), torch.empty(count, width), torch.empty(count, width)
    for number in range(count):
        first, last = number * block, min((number + 1) * block, size)
        some, errors = left[first:last], torch.empty(last - first, width, dtype=torch.float64)
        lowest, highest = some.amin(0).clamp(max=0), some.amax(0).clamp(min=0)
        scales[number] = ((highest - lowest) / TOP).clamp(min=torch.finfo(torch.float32).tiny)
        scale = scales[number].double()
        zeros[number] = zero = (-lowest / scale).round().clamp(0, TOP)
        codes[number] = zero
        for index, place in enumerate(range(first, last)):
            code = (some[index] / scale).round().add(zero).clamp(0, TOP)
            codes[number, index] = code
            errors[index] = (some[index] - (code - zero) * scale) / factor[place, place]
            some[index + 1 :] -= factor[place, place + 1 : last, None] * errors[index]
        left[last:] -= factor[first:last, last:].T @ errors
    codes, zeros = codes.permute(2, 0, 1).contiguous(), zeros.T.contiguous()
    return codes.to(torch.uint8), scales.T.contiguous(), zeros.to(torch.uint8)


def _factor(inputs: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of `inputs` + damping · identity, float64 [in, in]."""
    damping = DAMPING * float(inputs.diagonal().mean()) or 1.0  # 1.0 if all inputs were 0: all rows round plainly
    damped = inputs + damping * torch.eye(len(inputs), dtype=torch.float64)
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return factor
