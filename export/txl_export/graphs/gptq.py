"""GPTQ (Frantar et al. 2022): rounding of a matrix to 4 bits that changes its products with given inputs least.

Inputs are rounded one after another, each in all outputs at once. The error of one is made up for by those that are
not rounded yet, as far as inputs are correlated: that minimises the error of x @ W where plain rounding minimises W's.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOP = 15
"""The largest code of 4 bits; the smallest is 0."""

DAMPING = 0.01
"""Share of the mean square of the inputs that is added to each, so that inputs that never varied can be solved for."""


def round_to_inputs(matrix: Tensor, inputs: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix; return codes, scales and zero points, which stand for (code - zero) · scale.

    An input that was always 0 is rounded plainly, and has no part in other inputs' errors.

    Args:
        matrix: float32 [in, out].
        inputs: float64 [in, in], the sum of x xᵀ over rows x [in] that the matrix was multiplied by; finite.
        block: number of inputs that share a scale and a zero point, for each output.

    Returns:
        uint8 [out, blocks, block], float32 [out, blocks], uint8 [out, blocks]; in a last block that inputs do not fill
        the codes behind them are the zero point.
    """
    size, width = matrix.shape
    left = matrix.double()  # with the errors of those that are rounded already
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
    """Return the upper Cholesky factor of the inverse of the damped inputs, float64 [in, in]."""
    damping = DAMPING * float(inputs.diagonal().mean()) or 1.0  # inputs that are all 0: plain rounding
    damped = inputs + damping * torch.eye(len(inputs), dtype=torch.float64)
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return factor
