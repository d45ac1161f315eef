"""Modules whose tensors have the names that another package gave them, and what their attention has in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Config = Mapping[str, Any]


class Loaded(nn.Module):
    """A module that holds tensors under their own dotted names: `self.tensor("layers.0.norm.weight")`."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            *path, last = name.split(".")
            holder: nn.Module = self
            for part in path:
                if not hasattr(holder, part):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            if tensor.is_floating_point():
                holder.register_parameter(last, nn.Parameter(tensor.clone(), requires_grad=False))
            else:
                holder.register_buffer(last, tensor.clone())

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer by its dotted name."""
        found: Tensor = reduce(getattr, name.split("."), self)
        return found

    def has(self, name: str) -> bool:
        """Return whether there is such a parameter or buffer."""
        *path, last = name.split(".")
        holder: Any = self
        for part in path:
            holder = getattr(holder, part, None)
        return getattr(holder, last, None) is not None

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The linear layer of that name, with its bias where it has one."""
        bias = self.tensor(f"{name}.bias") if self.has(f"{name}.bias") else None
        return F.linear(x, self.tensor(f"{name}.weight"), bias)

    def normed(self, x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        """The layer norm of that name; its scale is called weight or gamma."""
        scale, shift = ("gamma", "beta") if self.has(f"{name}.gamma") else ("weight", "bias")
        bias = self.tensor(f"{name}.{shift}") if self.has(f"{name}.{shift}") else None
        return F.layer_norm(x, x.shape[-1:], self.tensor(f"{name}.{scale}"), bias, eps)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H·d] → [B, H, T, d]."""
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[B, H, T, d] → [B, T, H·d]."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the distance of each key behind each query, [queries, keys]; the last query and key stand together."""
    last = torch.arange(keys - queries, keys, device=device)
    return last[:, None] - torch.arange(keys, device=device)[None, :]


def attend(scores: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Scores [B, H, T, K] of the keys that are visible, and values [B, H, K, d] → [B, H, T, d]."""
    return torch.where(visible, scores, torch.full_like(scores, -1e30)).softmax(-1) @ values


def sinusoids(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Sines, then cosines of positions × frequencies."""
    angles = positions.to(frequencies.dtype)[..., None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), -1)


def geometric(width: int, like: Tensor) -> Tensor:
    """The frequencies 10000^(-2i/width) in the dtype of another tensor."""
    steps = torch.arange(0, width, 2, device=like.device).to(like.dtype)
    return torch.exp(steps * (-math.log(10000.0) / width))


def gru_cell(x: Tensor, state: Tensor, into: Tensor, within: Tensor, bias_into: Tensor, bias_within: Tensor) -> Tensor:
    """One step of a GRU whose gates are stacked as reset, update, new."""
    r, z, n = F.linear(x, into, bias_into).chunk(3, -1)
    hr, hz, hn = F.linear(state, within, bias_within).chunk(3, -1)
    update = torch.sigmoid(z + hz)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (1 - update) * new + update * state


def newest(rows: Tensor, axis: int, most: int) -> Tensor:
    """The last rows along an axis, as many as there are up to a most."""
    return rows[(slice(None),) * axis + (slice(-most, None),)]
