"""Computes the sinusoids of positions, and the largest distance that has a position of its own.

The sinusoids are those of Vaswani et al. 2017 and of Dai et al. 2019, section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig


def last_distance(config: ModelConfig, dialect: Dialect) -> int | None:
    """Return the largest distance with its own position, which larger distances share; None if there is no limit."""
    clamp = dialect.clamp_length
    if config.attn_type == 1:
        return (config.position_rows if clamp is None else min(clamp, config.position_rows)) - 1
    return config.position_rows - 1 if config.attn_type == 3 else clamp


def sinusoid(length: int, width: int) -> Tensor:
    """Return rows for distances 0 … length-1: float32 [length, width], width/2 sines and then width/2 cosines.

    The rows are computed in float32, as in every original code, whatever the model's precision. `width` is even.

    Example:
        >>> sinusoid(2, 4)
        tensor([[0.0000, 0.0000, 1.0000, 1.0000],
                [0.8415, 0.0100, 0.5403, 0.9999]])
    """
    frequencies = 1 / (10000 ** (torch.arange(0.0, width, 2.0) / width))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
