"""Sparse patterns, by config["kind"]: local, strided (arXiv 1904.10509), block (1911.02972), global (a window and the
first positions: ETC, 2004.08483, and Longformer, 2004.05150), random (BigBird, 2007.14062: these, and drawn blocks).

What is seen depends on positions alone. Longformer and BigBird as readers of whole texts, whose first positions see
what comes later, have nothing to carry; this is their form for one position after another.
"""

import carried
import torch
from attention import Attention, weigh
from torch import Tensor
from txl_export import StepSpec

REACH, FIRST, BLOCK, BLOCKS = 5, 2, 6, 4
ALL = BLOCK * BLOCKS
ROWS = {"local": REACH, "strided": ALL, "block": BLOCK, "global": FIRST + REACH, "random": FIRST + ALL}
"""Slots: what a later position may see. Strided and random patterns see everything; the newest ALL are kept."""


class Layer(Attention):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("drawn", torch.rand(BLOCKS, BLOCKS) < 0.4)  # which block sees which, anew each BLOCKS

    def found(self, q: Tensor, k: Tensor, v: Tensor, now: Tensor, then: Tensor) -> Tensor:
        far, block, other = now - then, now // BLOCK, then // BLOCK
        seen = block == other if self.kind == "block" else far < REACH
        if self.kind == "strided":
            seen = seen | (far % REACH == 0)
        if self.kind in ("global", "random"):
            seen = seen | (then < FIRST)
        if self.kind == "random":
            seen = seen | self.drawn[block % BLOCKS, other % BLOCKS]
        return weigh(q @ k.mT * q.shape[3] ** -0.5, seen & (then >= 0) & (far >= 0)) @ v


def make(kind: str) -> carried.Model:
    return carried.Model([Layer(kind) for _ in range(2)], ROWS[kind], FIRST if kind in ("global", "random") else 0)


def build(weights: str) -> StepSpec:
    return carried.built(make, weights)
