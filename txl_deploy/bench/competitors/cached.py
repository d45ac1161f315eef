"""Eager PyTorch with K/V memory: the best that plain PyTorch does with the same weights.

This competitor saves the same work as a bundle: keys and values are kept instead of projected again, the product W_r·R
of relative positions is computed once per length, and the attention scale is folded into W_q, u and v. New rows are
written behind the old rows, into a buffer with room for M more rows, so that memory is copied only once in M tokens.
Attention is `scaled_dot_product_attention` with the relative scores as its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from torch import Tensor
from torch.nn import functional as F

from txl_deploy.bench.competitors.shared_layers import Eager, SharedLayers

KEPT = 5
"""Maximum number of cached tables, and of cached masks: while memory fills, each length is used only once."""
Join = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function (index of a layer, its new keys, its new values [B, H, L, d_head]) → keys and values of all rows."""
Place = Callable[[Tensor], Tensor]
"""A function (scores per distance [B, H, L, distances]) → scores per key [B, H, L, K], -inf for hidden keys."""


class KeyValue(Eager):
    """The competitor that keeps keys and values, in plain eager PyTorch."""

    name = "torch-kv"
    description = "eager PyTorch, K/V memory, W_r·R folded, nothing of size M copied"

    def __init__(self, parts: SharedLayers, batch_size: int) -> None:
        state, scale = parts.state, parts.config.d_head**-0.5
        self.joined = parts.joined({"query": scale, "key": 1.0, "value": 1.0})
        # scaled biases u and v of each layer, [H, 1, d_head]
        self.content = [(state[f"{name}.content_bias"] * scale)[:, None] for name in parts.attention]
        self.position = [(state[f"{name}.position_bias"] * scale)[:, None] for name in parts.attention]
        self._tables, self._mask = lru_cache(KEPT)(parts.tables), lru_cache(KEPT)(self._find_mask)
        super().__init__(parts, batch_size)

    def reset(self) -> None:
        self._buffers = self._allocate(2 * self.parts.memory_length + 1)
        self.rows = self._end = 0
        if self.parts.dialect.memory_start == "zeros":
            self._remember_zeros()

    def segment(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if self._end + length > self._buffers[0].shape[2]:
            self._make_room(length)
        mask = self._mask(length, self.rows)

        def place(scores: Tensor) -> Tensor:
            return shift(scores) if mask is None else shift(scores) + mask

        hidden = self.layers(tokens, self._tables(self.rows + length), self._join, place)
        self._end += length
        self.rows = min(self.rows + length, self.parts.memory_length)
        return hidden

    def step_bytes(self, length: int) -> int:
        c, m = self.parts.config, self.parts.memory_length
        # rows that are read: keys and values of all sequences, and relative positions
        rows = c.n_layer * (2 * self.batch_size * m + m + length) * c.n_head * c.d_head
        return self.parts.read_bytes(".position.weight", ".position.bias") + rows * self.parts.dtype.itemsize

    def layers(self, tokens: Tensor, tables: list[Tensor], join: Join, place: Place) -> Tensor:
        """Run all layers on a segment [B, T] → [B, T, D]; `tables` has W_r·R of each layer, [H, d_head, distances].

        For example, [4, 5] → [4, 5, 32].
        """
        parts = self.parts
        hidden = parts.embed(tokens)
        for i, name in enumerate(parts.attention):
            query, key, value = self._project(i, hidden)
            keys, values = join(i, key, value)
            scores = place(by_distance(query + self.position[i], tables[i]))  # relative scores [B, H, L, K]
            mixed = F.scaled_dot_product_attention(query + self.content[i], keys, values, scores, scale=1.0)
            attended = parts.linear(f"{name}.output", mixed.transpose(1, 2).flatten(2))
            hidden = parts.feed_forward(i, hidden, attended)
        return parts.final(hidden)

    def memory(self) -> list[Tensor]:
        """Return the keys and values of all layers, alternating, contiguous [B, H, rows, d_head].

        For example, 4 layers have 8 tensors [4, 2, 16, 16].
        """
        rows = slice(self._end - self.rows, self._end)
        return [buffer[:, :, rows].contiguous() for buffer in self._buffers]

    def _project(self, i: int, hidden: Tensor) -> tuple[Tensor, ...]:
        """Project layer i's input [B, T, D] to queries, keys and values, [B, H, T, d_head] each."""
        parts = self.parts
        source = parts.norm(f"{parts.attention[i]}.norm", hidden) if parts.config.pre_lnorm else hidden
        joined = F.linear(source, *self.joined[i])
        return joined.view(*hidden.shape[:2], 3, *parts.heads).permute(2, 0, 3, 1, 4).unbind(0)

    def _join(self, i: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        first, last = self._end - self.rows, self._end + key.shape[2]
        keys, values = self._buffers[2 * i], self._buffers[2 * i + 1]
        keys[:, :, self._end : last] = key
        values[:, :, self._end : last] = value
        return keys[:, :, first:last], values[:, :, first:last]

    def _allocate(self, room: int) -> list[Tensor]:
        c = self.parts.config
        return [self.parts.zeros(self.batch_size, c.n_head, room, c.d_head) for _ in range(2 * c.n_layer)]

    def _make_room(self, length: int) -> None:
        """Move memory rows to the front of the buffers; if a segment still does not fit, make larger buffers."""
        memory, room = self.memory(), 2 * self.parts.memory_length + length
        if self._buffers[0].shape[2] < room:
            self._buffers = self._allocate(room)
        for buffer, rows in zip(self._buffers, memory, strict=True):
            buffer[:, :, : self.rows] = rows
        self._end = self.rows

    def _remember_zeros(self) -> None:
        """Store the keys and values of M zero inputs. With pre-norm or biases, these keys and values are not zero."""
        m = self.parts.memory_length
        zeros = self.parts.zeros(1, 1, self.parts.config.d_model)
        for i in range(self.parts.config.n_layer):
            _, self._buffers[2 * i][:, :, :m], self._buffers[2 * i + 1][:, :, :m] = self._project(i, zeros)
        self.rows = self._end = m

    def _find_mask(self, length: int, rows: int) -> Tensor | None:
        """Return the mask [L, K] that is added to scores, -inf for hidden keys; None if no key is hidden."""
        if self.parts.sees_all(length, rows):
            return None
        unseen = self.parts.unseen(length, rows)
        return self.parts.zeros(*unseen.shape).masked_fill(unseen, float("-inf"))


def by_distance(query: Tensor, table: Tensor) -> Tensor:
    """Multiply queries [B, H, L, d_head] by a table [H, d_head, distances], without a copy of the table per sequence.

    For example, [4, 2, 5, 16] and [2, 16, 21] give [4, 2, 5, 21].
    """
    batch, heads, length, width = query.shape
    rows = query.transpose(0, 1).reshape(heads, batch * length, width)
    return (rows @ table).view(heads, batch, length, -1).transpose(0, 1)


def shift(x: Tensor) -> Tensor:
    """Turn columns of distances K-1 … 0 into columns of keys, for each query: [B, H, L, K] → [B, H, L, K].

    For example, [4, 2, 5, 21] keeps its shape.
    """
    batch, heads, length, keys = x.shape
    if length == 1:
        return x
    padded = F.pad(x, (1, 0)).view(batch, heads, keys + 1, length)
    return padded[:, :, 1:].reshape(x.shape)
