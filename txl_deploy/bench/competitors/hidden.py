"""Eager PyTorch with hidden memory: what a Transformer-XL costs where its training code also serves it.

Every step projects the whole memory to keys and values again. `TimeFirstHidden` computes what the released code
computes, in its layout: one qkv_net makes queries for the rows of the memory too, r_net projects the sinusoids of all
distances in every layer and step, and scores are [query, key, batch, head]. `BatchFirstHidden` is the same model as one
would write it with that memory today: scores are [batch, head, query, key], only the segment has queries, and W_r·R is
computed once per length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_deploy.bench.competitors.shared_layers import Eager, SharedLayers


class _Hidden(Eager):
    """Entry i of the memory is the input of layer i. It grows to M rows by one cat and one slice per layer and step."""

    rows_axis = 0
    together: tuple[str, ...] = ()
    """The projections of the whole context that are one matrix product."""

    def __init__(self, parts: SharedLayers, batch_size: int) -> None:
        self.joined = parts.joined(dict.fromkeys(self.together, 1.0))
        self.scale = parts.config.d_head**-0.5
        super().__init__(parts, batch_size)

    def reset(self) -> None:
        c = self.parts.config
        rows = self.parts.memory_length if self.parts.dialect.memory_start == "zeros" else 0
        shape = (rows, self.batch_size) if self.rows_axis == 0 else (self.batch_size, rows)
        self.memory = [self.parts.zeros(*shape, c.d_model) for _ in range(c.n_layer)]

    def step_bytes(self, length: int) -> int:
        c, m = self.parts.config, self.parts.memory_length
        return self.parts.read_bytes() + c.n_layer * self.batch_size * m * c.d_model * self.parts.dtype.itemsize

    def _layers(self, hidden: Tensor) -> Tensor:
        """All layers over an embedded segment, and the memory after it."""
        length, rows = hidden.shape[self.rows_axis], self.memory[0].shape[self.rows_axis]
        self._prepare(length, rows)
        after = []
        for i, remembered in enumerate(self.memory):
            context = torch.cat([remembered, hidden], dim=self.rows_axis)
            first = max(0, rows + length - self.parts.memory_length)
            after.append(context.narrow(self.rows_axis, first, rows + length - first).detach())
            if self.parts.config.pre_lnorm:
                context = self.parts.norm(f"{self.parts.attention[i]}.norm", context)
            attended = self._attend(i, context, length)
            hidden = self.parts.feed_forward(i, hidden, attended)
        self.memory = after
        return self.parts.final(hidden)

    def _prepare(self, length: int, rows: int) -> None:
        """What all layers share: positions and mask."""
        raise NotImplementedError

    def _attend(self, i: int, context: Tensor, length: int) -> Tensor:
        """Attention of the last `length` rows over all of the context."""
        raise NotImplementedError


class TimeFirstHidden(_Hidden):
    """The released code's own layout: [T, B, D], scores [i, j, b, n] by einsum, relative shift by cat and view."""

    name = "torch"
    description = "eager PyTorch, hidden memory, the released code's layout"
    together = ("query", "key", "value")

    def segment(self, tokens: Tensor) -> Tensor:
        return self._layers(self.parts.embed(tokens.t().contiguous())).transpose(0, 1)

    def _prepare(self, length: int, rows: int) -> None:
        self._positions = self.parts.positions(rows + length)
        self._unseen = self.parts.unseen(length, rows)[:, :, None, None]

    def _attend(self, i: int, context: Tensor, length: int) -> Tensor:
        parts, name = self.parts, self.parts.attention[i]
        rows, batch = context.shape[:2]
        q, k, v = F.linear(context, *self.joined[i]).chunk(3, dim=-1)
        query = q[-length:].view(length, batch, *parts.heads)
        key, value = k.view(rows, batch, *parts.heads), v.view(rows, batch, *parts.heads)
        relative = parts.linear(f"{name}.position", self._positions).view(rows, *parts.heads)

        content = torch.einsum("ibnd,jbnd->ijbn", query + parts.state[f"{name}.content_bias"], key)
        distance = torch.einsum("ibnd,jnd->ijbn", query + parts.state[f"{name}.position_bias"], relative)
        scores = (content + self._shift(distance)) * self.scale
        scores = scores.float().masked_fill(self._unseen, float("-inf")).type_as(scores)
        mixed = torch.einsum("ijbn,jbnd->ibnd", scores.softmax(dim=1), value)
        return parts.linear(f"{name}.output", mixed.contiguous().view(length, batch, -1))

    @staticmethod
    def _shift(x: Tensor) -> Tensor:
        """Columns of distances rows-1 … 0 → columns of keys, per query: [i, j, b, n] → the same shape."""
        padded = torch.cat([x.new_zeros(x.shape[0], 1, *x.shape[2:]), x], dim=1)
        return padded.view(x.shape[1] + 1, x.shape[0], *x.shape[2:])[1:].view_as(x)


class BatchFirstHidden(_Hidden):
    """The same model with [B, T, D] and scores [B, H, L, K] by batched matrix products."""

    name = "torch-bhlk"
    description = "eager PyTorch, hidden memory, scores [B, H, L, K], W_r·R folded"
    rows_axis = 1
    together = ("key", "value")

    _of: tuple[int, int] | None = None
    _tables: list[Tensor]
    _unseen: Tensor | None

    def segment(self, tokens: Tensor) -> Tensor:
        return self._layers(self.parts.embed(tokens))

    def _prepare(self, length: int, rows: int) -> None:
        if self._of == (length, rows):
            return
        self._tables = self.parts.tables(rows + length)
        self._unseen = None if self.parts.sees_all(length, rows) else self.parts.unseen(length, rows)
        self._of = (length, rows)

    def _attend(self, i: int, context: Tensor, length: int) -> Tensor:
        parts, name = self.parts, self.parts.attention[i]
        query = self._heads(parts.linear(f"{name}.query", context[:, -length:]))
        key, value = map(self._heads, F.linear(context, *self.joined[i]).chunk(2, dim=-1))
        content = (query + parts.state[f"{name}.content_bias"][:, None]) @ key.transpose(2, 3)
        distance = by_distance(query + parts.state[f"{name}.position_bias"][:, None], self._tables[i])
        scores = (content + shift(distance)) * self.scale
        if self._unseen is not None:
            scores = scores.masked_fill(self._unseen, float("-inf"))
        mixed = scores.softmax(dim=-1) @ value
        return parts.linear(f"{name}.output", mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], *self.parts.heads).transpose(1, 2)


def by_distance(query: Tensor, table: Tensor) -> Tensor:
    """[B, H, L, d_head] times [H, d_head, distances], without a copy of the table per sequence."""
    batch, heads, length, width = query.shape
    rows = query.transpose(0, 1).reshape(heads, batch * length, width)
    return (rows @ table).view(heads, batch, length, -1).transpose(0, 1)


def shift(x: Tensor) -> Tensor:
    """Columns of distances K-1 … 0 → columns of keys, per query: [B, H, L, K] → the same shape."""
    batch, heads, length, keys = x.shape
    if length == 1:
        return x
    padded = F.pad(x, (1, 0)).view(batch, heads, keys + 1, length)
    return padded[:, :, 1:].reshape(x.shape)
