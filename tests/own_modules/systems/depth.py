"""Layers that a position may leave early, by config["kind"]: act (Universal, arXiv 1807.03819), classifier
(depth-adaptive, 1910.10073) and confidence (CALM, 2207.07061).

A graph has no branch that a value takes: all layers run, and a position that has left keeps its row. So results and the
carried rows are exact, and no time is saved. The number of layers that each position took is an output.
"""

from typing import Any

import carried
import torch
from attention import Attention
from torch import Tensor, nn
from txl_export import OutputSpec, StepSpec


class Model(carried.Model):
    def __init__(self, kind: str, hops: int = 3, width: int = 16) -> None:
        super().__init__([Attention() for _ in range(hops)], rows=6)
        self.kind, self.halt, self.times = kind, nn.Linear(width, 1), nn.Parameter(torch.randn(hops, width))
        nn.init.normal_(self.halt.weight)  # so that positions leave at different layers

    def through(self, x: Tensor, memory: Tensor, now: Tensor, then: Tensor) -> Any:
        recurs, spent, took, mixed, below = self.kind == "act", torch.zeros_like(x[..., 0]), 0, torch.zeros_like(x), []
        for hop, rows in enumerate(memory):
            running = spent < 1
            took = took + running
            x = x + self.times[hop] if recurs else x
            below.append(x)
            layer = self.layers[0 if recurs else hop]
            y = layer(x, torch.cat((rows, x), 1), now[:, None, :, None], then[:, None, None])
            if recurs:  # all positions go on; what counts is the mean of a position's hops, by the shares that it spent
                p = torch.sigmoid(self.halt(x))[..., 0]
                ends = running & (spent + p > 0.99)
                share = torch.where(ends, 1 - spent, p * running)
                x, mixed = y, share[..., None] * y + (1 - share[..., None]) * mixed
                spent = torch.where(ends, 1.0, spent + share)
            else:
                x = torch.where(running[..., None], y, x)
                first, second = self.head(x).softmax(-1).topk(2).values.unbind(-1)
                spent = spent + (self.halt(x)[..., 0] > 0 if self.kind == "classifier" else first - second > 0.02)
        return mixed if recurs else x, below, took


def build(weights: str) -> StepSpec:
    return carried.built(Model, weights, OutputSpec("layers"))
