"""A layer of the surveys' models: attention and a feed-forward half; files beside this one have their own `found`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.q, self.kv = heads, nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.mix, self.norm, self.up = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, rows: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """x [B, L, D], with all rows [B, K, D] that there are; their positions [B, 1, L, 1] and [B, 1, 1, K]."""
        found = self.found(self.split(self.q(x)), *map(self.split, self.kv(rows).chunk(2, 2)), now, then)
        x = x + self.mix(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def split(self, x: Tensor) -> Tensor:
        """[B, K, D] → [B, H, K, d]."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def found(self, q: Tensor, k: Tensor, v: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """q [B, H, L, d], k and v [B, H, K, d] → [B, H, L, d]."""
        return weigh(q @ k.mT * q.shape[3] ** -0.5, (then >= 0) & (then <= now)) @ v


def weigh(score: Tensor, seen: Tensor) -> Tensor:
    """The shares of what is seen."""
    return torch.where(seen, score, -1e9).softmax(-1)
