"""Eager PyTorch with hidden memory: the cost of serving a Transformer-XL with its training code.

This competitor computes what the released code of Transformer-XL computes, in the same layout: every step projects the
whole memory to keys and values again, one qkv_net also makes queries for the memory's rows, r_net projects the
sinusoids of all distances in every layer and step, and scores are [query, key, batch, head].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_deploy.bench.competitors.shared_layers import Eager, SharedLayers


class TimeFirstHidden(Eager):
    """The competitor in the released code's layout: activations [T, B, D], scores [query, key, batch, head].

    Entry i of the memory holds the inputs of layer i. The memory grows to M rows by one cat and one slice per layer and
    step.
    """

    name = "torch"
    description = "eager PyTorch, hidden memory, the released code's layout"

    def __init__(self, parts: SharedLayers, batch_size: int) -> None:
        self.joined = parts.joined({"query": 1.0, "key": 1.0, "value": 1.0})
        self.scale = parts.config.d_head**-0.5
        super().__init__(parts, batch_size)

    def reset(self) -> None:
        c = self.parts.config
        rows = self.parts.memory_length if self.parts.dialect.memory_start == "zeros" else 0
        self.memory = [self.parts.zeros(rows, self.batch_size, c.d_model) for _ in range(c.n_layer)]

    def step_bytes(self, length: int) -> int:
        c, m = self.parts.config, self.parts.memory_length
        return self.parts.read_bytes() + c.n_layer * self.batch_size * m * c.d_model * self.parts.dtype.itemsize

    def segment(self, tokens: Tensor) -> Tensor:
        hidden = self.parts.embed(tokens.t().contiguous())
        length, rows = len(hidden), len(self.memory[0])
        positions = self.parts.positions(rows + length)
        unseen = self.parts.unseen(length, rows)[:, :, None, None]
        first, after = max(0, rows + length - self.parts.memory_length), []
        for i, remembered in enumerate(self.memory):
            context = torch.cat([remembered, hidden])
            after.append(context[first:].detach())
            if self.parts.config.pre_lnorm:
                context = self.parts.norm(f"{self.parts.attention[i]}.norm", context)
            hidden = self.parts.feed_forward(i, hidden, self._attend(i, context, positions, unseen))
        self.memory = after
        return self.parts.final(hidden).transpose(0, 1)

    def _attend(self, i: int, context: Tensor, positions: Tensor, unseen: Tensor) -> Tensor:
        """Compute the attention of the segment's rows over the whole context: [rows, B, D] → [T, B, D]."""
        parts, name = self.parts, self.parts.attention[i]
        (rows, batch), length = context.shape[:2], len(unseen)
        q, k, v = F.linear(context, *self.joined[i]).chunk(3, dim=-1)
        query = q[-length:].view(length, batch, *parts.heads)
        key, value = k.view(rows, batch, *parts.heads), v.view(rows, batch, *parts.heads)
        relative = parts.linear(f"{name}.position", positions).view(rows, *parts.heads)

        content = torch.einsum("ibnd,jbnd->ijbn", query + parts.state[f"{name}.content_bias"], key)
        distance = torch.einsum("ibnd,jnd->ijbn", query + parts.state[f"{name}.position_bias"], relative)
        scores = (content + _shift(distance)) * self.scale
        scores = scores.float().masked_fill(unseen, float("-inf")).type_as(scores)
        mixed = torch.einsum("ijbn,jbnd->ibnd", scores.softmax(dim=1), value)
        return parts.linear(f"{name}.output", mixed.contiguous().view(length, batch, -1))


def _shift(x: Tensor) -> Tensor:
    """Turn columns of distances rows-1 … 0 into columns of keys, for each query: [i, j, b, n] → [i, j, b, n]."""
    padded = torch.cat([x.new_zeros(x.shape[0], 1, *x.shape[2:]), x], dim=1)
    return padded.view(x.shape[1] + 1, x.shape[0], *x.shape[2:])[1:].view_as(x)
