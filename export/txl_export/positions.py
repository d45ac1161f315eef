"""Sinusoidal positions (Vaswani et al. 2017; Dai et al. 2019, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sinusoid"]


def sinusoid(length: int, width: int) -> Tensor:
    """Rows for distances 0 … length-1: float32 [length, width], the sines first and the cosines after them.

    Built in float32 as every original does, also where the model then runs in another precision. `width` is even.
    """
    frequencies = 1 / (10000 ** (torch.arange(0.0, width, 2.0) / width))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
