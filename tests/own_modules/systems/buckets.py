"""Attention within buckets, by config["kind"]: lsh (Reformer, arXiv 2001.04451) and cluster (Routing, 2003.05997).

The keys are those of the papers' formulas: of the query's bucket in any round, before it. Sorted chunks (Reformer) and
the most similar w of a cluster (Routing) depend on what comes later; they are how whole texts are trained. Rotations
and centroids are buffers of the checkpoint: rotations drawn anew in each call would be refused as noise.
"""

import carried
import torch
from attention import Attention, weigh
from torch import Tensor
from torch.nn import functional as F
from txl_export import StepSpec


class Layer(Attention):
    def __init__(self, kind: str, rounds: int = 2, buckets: int = 4, width: int = 16, heads: int = 2) -> None:
        super().__init__(width, heads)
        self.kind = kind
        self.register_buffer("turns", torch.randn(rounds, 1, heads, width // heads, buckets // 2))
        self.register_buffer("centroids", F.normalize(torch.randn(1, 1, heads, width // heads, buckets), dim=3))

    def bucket(self, x: Tensor) -> Tensor:
        """x [B, H, K, d] → [rounds, B, H, K]."""
        near = x @ (self.turns if self.kind == "lsh" else self.centroids)
        return (torch.cat((near, -near), -1) if self.kind == "lsh" else near).argmax(-1)

    def forward(self, x: Tensor, rows: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """As every layer, but keys are the queries of all rows: both papers share them."""
        q, v = self.split(self.q(rows)), self.split(self.kv(rows).chunk(2, 2)[1])
        k, length = F.normalize(q, dim=3), x.shape[1]
        bucket = self.bucket(k)
        same = (bucket[..., -length:, None] == bucket[..., None, :]).any(0)
        score = (q if self.kind == "lsh" else k)[:, :, -length:] @ k.mT * k.shape[3] ** -0.5
        score = torch.where(now == then, -5e4, score) if self.kind == "lsh" else score  # itself where nothing else is
        found = weigh(score, same & (then >= 0) & (then <= now)) @ v
        x = x + self.mix(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make(kind: str) -> carried.Model:
    return carried.Model([Layer(kind) for _ in range(2)], rows=12)


def build(weights: str) -> StepSpec:
    return carried.built(make, weights)
