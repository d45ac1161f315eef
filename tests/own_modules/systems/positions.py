"""Forms of position, by config["kind"]; each depends on distances alone, so rows are carried as they are.

relative (Transformer-XL, arXiv 1901.02860), shaw (1803.02155), rope (2104.09864), alibi (2108.12409), distance
(DA-Transformer, 2010.06925) and span (adaptive spans, 1905.07799).
"""

import carried
import torch
from attention import Attention, weigh
from torch import Tensor, nn
from txl_export import StepSpec


def waves(places: Tensor, width: int) -> Tensor:
    """Sines, then cosines of places [...] → [..., width]."""
    angles = places[..., None] * 1e4 ** (-torch.arange(0, width, 2).to(places.dtype) / width)
    return torch.cat((angles.sin(), angles.cos()), -1)


def turned(x: Tensor, places: Tensor) -> Tensor:
    """Rows x [B, H, K, d] at places [B, K], turned."""
    (a, b), (sin, cos) = x.chunk(2, -1), waves(places[:, None].to(x.dtype), x.shape[3]).chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Layer(Attention):
    def __init__(self, kind: str, reach: int = 6, width: int = 16, heads: int = 2) -> None:
        super().__init__(width, heads)
        self.kind, self.reach, self.r = kind, reach, nn.Linear(width, width, bias=False)
        self.u, self.v = (nn.Parameter(torch.randn(heads, 1, width // heads)) for _ in range(2))  # relative
        self.near = nn.Parameter(torch.randn(2, reach + 1, width // heads))  # shaw: of keys and of values
        self.a, self.b = (nn.Parameter(torch.rand(heads, 1, 1)) for _ in range(2))  # distance and span
        self.register_buffer("slopes", 2 ** (-8 * torch.arange(1, heads + 1) / heads)[:, None, None])  # alibi

    def found(self, q: Tensor, k: Tensor, v: Tensor, now: Tensor, then: Tensor) -> Tensor:
        kind, ahead, scale = self.kind, (now - then).clamp(min=0), q.shape[3] ** -0.5
        far, near, score, start = ahead.to(q.dtype), ahead[:, 0].clamp(max=self.reach), q @ k.mT, now[:, 0, :1, 0]
        if kind == "relative":
            r = self.r(waves(far[:, 0], self.r.in_features)).unflatten(3, (self.heads, -1))
            score = (q + self.u) @ k.mT + torch.einsum("bhld,blkhd->bhlk", q + self.v, r)
        if kind == "shaw":
            score = score + torch.einsum("bhld,blkd->bhlk", q, self.near[0][near])
        if kind == "rope":
            score = turned(q, now[:, 0, :, 0] - start) @ turned(k, then[:, 0, 0] - start).mT
        if kind == "distance":
            score = score.relu() * (1 + self.a.exp()) / (1 + (self.a - self.b * far).exp())
        score = score * scale - far * self.slopes if kind == "alibi" else score * scale
        shares = weigh(score, (then >= 0) & (then <= now))
        if kind == "span":
            shares = shares * ((self.reach * self.a - far) / 2 + 1).clamp(0, 1)  # a ramp of 2 positions
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-8)
        return shares @ v + (torch.einsum("bhlk,blkd->bhld", shares, self.near[1][near]) if kind == "shaw" else 0)


def make(kind: str) -> carried.Model:
    return carried.Model([Layer(kind) for _ in range(2)], rows=6)


def build(weights: str) -> StepSpec:
    return carried.built(make, weights)
