"""Defines the step with rolled memory: a segment and memories go in, outputs and new memories come out.

The segment has a fixed length. The step computes what `paper_model` computes, with operators that suit engines
(`network`).

    inputs    tokens int32 [B, L] · valid int32 [B] · fill int32 [B] · memory per layer
    outputs   logprobs float32 [B, L, V] · memory per layer

    memory    K/V: key and value, [B, H, M, d_head] each · hidden: [B, M, D]; of the network's dtype

`fill` memory rows exist before the step and stand in the LAST slots, newest last. `valid` rows of the segment count and
stand first. The new memory is rows [valid, valid + M) of (memory ‖ segment): with valid = 0 it equals the old memory,
bit for bit. Query i sees slot k iff 0 <= d < W and k >= M - fill, with d = M + i - k.

Absolute positions (attn_type 2 and 3) are counted back from a stream's last valid row, and are added to the rows of
memory and segment. The memory keeps the sums, so these models can only have hidden memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_runtime.bundle.open_batch import BATCH
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.errors import UsageError

from txl_export.families.transformer_xl.network import MemoryForm, Network, count_distances
from txl_export.families.transformer_xl.weights import layer_name


class StepShape(NamedTuple):
    """The sizes of one program: batch size B (its maximum), segment length L, memory length M in rows."""

    batch_size: int
    segment_length: int
    memory_length: int
    memory: MemoryForm

    @property
    def slots(self) -> int:
        """The number of key slots that a query meets, K = M + L."""
        return self.memory_length + self.segment_length


def open_batch(shape: StepShape) -> dict[int, Any]:
    """Return the open first axis, 1 … B sequences, as `torch.export` describes it; {} for B = 1, which is fixed."""
    return {0: torch.export.Dim(BATCH, min=1, max=shape.batch_size)} if shape.batch_size > 1 else {}


class Rows(NamedTuple):
    """Masks and indices of the rows of (memory ‖ segment). All layers share them.

    They depend only on `fill` and `valid`.

    Attributes:
        visible: bool [B, 1, L, K], the keys that each query may see.
        filled: bool [B, M], the memory rows that exist.
        kept: int32 [B, M], numbers of the rows that become the memory after the step.
    """

    visible: Tensor
    filled: Tensor
    kept: Tensor


class Step(Network):
    """A program that returns log-probabilities of a segment and the memory after it.

    Args:
        shape: the sizes and the form of the memory; with M = 0 there are no memory arguments.
        folded: the parameters from `fold`, shared between steps.
        distances: rows of the tables of positions, if programs of longer segments share them; by default the number
            of distances that this program tells apart.
    """

    # `hidden` [B, L, D] is the softmax's input; engines may cut here and use a different softmax
    landmarks: tuple[str, ...] = ("hidden",)

    def __init__(
        self,
        config: ModelConfig,
        dialect: Dialect,
        shape: StepShape,
        folded: Mapping[str, Tensor],
        distances: int | None = None,
    ) -> None:
        if config.absolute_positions and shape.memory_length and shape.memory == "kv":
            raise UsageError(
                f"attn_type {config.attn_type} keeps positions in its memory, which keys and values cannot follow; "
                "expected hidden memory; give --memory hidden"
            )
        super().__init__(config, dialect, folded, distances or count_distances(config, dialect, shape.slots))
        self.shape = shape
        query, slot = torch.arange(shape.segment_length)[:, None], torch.arange(shape.slots)[None, :]
        distance = shape.memory_length + query - slot  # distances [L, K]
        seen = distance >= 0
        few = dialect.single_steps is not None and shape.segment_length <= dialect.single_steps
        window = shape.memory_length + 1 if few else dialect.window
        if window is not None:
            seen &= distance < window
        self._keep("seen", seen)
        self._keep("slot", slot[0].to(torch.int32))
        self._by_count = not few and (dialect.segment_window or dialect.single_steps is not None)
        if self._by_count:
            self._keep("behind", distance.to(torch.int32))
        if not config.absolute_positions:
            self._keep("distance", distance.clamp(0, self.distances - 1))
        batch = open_batch(shape)
        memory = (batch,) * len(memory_shapes(config, shape))
        self.dynamic_shapes = (batch, batch, batch, *([memory] if memory else []))

    def example_inputs(self) -> tuple[Tensor, ...]:
        batch, length = self.shape.batch_size, self.shape.segment_length
        counts = torch.zeros(2, batch, dtype=torch.int32)
        tokens = torch.zeros(batch, length, dtype=torch.int32)
        memory = (torch.zeros(shape, dtype=self.dtype) for shape in memory_shapes(self.config, self.shape))
        return (tokens, counts[0], counts[1], *memory)

    def forward(self, tokens: Tensor, valid: Tensor, fill: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """Run one step; the table at the top of this file has names, shapes and dtypes.

        For example, tokens [2, 5] with valid = [5, 3] and fill = [16, 9] give logprobs [2, 5, 256].
        """
        rows = self._counted(valid, fill)
        hidden = self.embed(tokens)
        after: list[Tensor] = []
        per_layer = len(memory) // self.config.n_layer
        for i in range(self.config.n_layer):
            remembered: Sequence[Tensor] = memory[i * per_layer : (i + 1) * per_layer]
            if self.config.attn_type == 3 or (self.config.attn_type == 2 and i == 0):
                hidden, remembered = self._add_positions(i, hidden, remembered, valid)
            # query [B, H, L, d_head], key and value [B, H, K, d_head]
            query, key, value, memory_rows = self._project_heads(i, hidden, remembered, rows)
            index = None
            if not self.config.absolute_positions:
                index = self["distance"].expand(*query.shape[:2], *self["distance"].shape)
            hidden = self.around(i, hidden, self.mix(i, query, key, value, index, rows.visible))
            after.extend(memory_rows)
        if self.config.final_norm:
            hidden = self.norm("final_norm", hidden)
        marks = (hidden,) if self.marking else ()
        flat = hidden.flatten(end_dim=1)  # [B·L, D]: with two axes a tied table needs no transposed copy (Gemm)
        return (self.logprobs(flat).reshape(tokens.shape[0], self.shape.segment_length, -1), *after, *marks)

    def _counted(self, valid: Tensor, fill: Tensor) -> Rows:
        """Return masks and indices of rows for `valid` [B] rows of the segment and `fill` [B] of the memory."""
        m = self.shape.memory_length
        filled = self["slot"][None, :] >= (m - fill)[:, None]  # slots that hold rows, [B, K]
        visible = self["seen"][None, None] & filled[:, None, None, :]  # visible keys [B, 1, L, K]
        if self._by_count and (window := self.window_by_count(valid, m)) is not None:
            visible = visible & (self["behind"][None, None] < window[:, None, None, None])
        return Rows(visible, filled[:, :m], valid[:, None] + self["slot"][None, :m])

    def _add_positions(
        self, i: int, hidden: Tensor, memory: Sequence[Tensor], valid: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Add absolute positions to rows of layer i's input and memory, but not to an idle stream's memory."""
        m, table = self.shape.memory_length, self[self._table_name(i)]  # table [rows, D]
        behind = (m + valid)[:, None] - 1 - self["slot"][None, :]  # [B, K]: the number of valid rows behind each row
        positions = F.embedding(behind.clamp(0, table.shape[0] - 1), table)
        hidden = hidden + positions[:, m:]
        if memory:
            memory = [torch.where((valid > 0)[:, None, None], memory[0] + positions[:, :m], memory[0])]
        return hidden, memory

    def _project_heads(
        self, i: int, hidden: Tensor, memory: Sequence[Tensor], rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the segment's queries, keys and values of memory and segment, and the layer's new memory."""
        c, name = self.config, f"{layer_name(i)}.attention"
        joined = f"{name}.query_key_value"
        source, rows_after = hidden, []
        if self.shape.memory_length and self.shape.memory == "hidden":
            # Set rows that do not exist to zero before the projection: a huge value in such a row would overflow there.
            existing = torch.where(rows.filled[..., None], memory[0], torch.zeros((), dtype=hidden.dtype))
            source = torch.cat([existing, hidden], dim=1)  # source [B, K, D]
            rows_after = [self._rows(torch.cat([memory[0], hidden], dim=1), rows.kept)]
        if c.pre_lnorm:
            source = self.norm(f"{name}.norm", source)
        query, key, value = self.heads(self.linear(joined, source), 3)
        if c.pre_lnorm and c.absolute_positions:
            # The released code computes these queries from the input before the norm.
            width, bias = c.n_head * c.d_head, self.get(f"{joined}.bias")
            asked = hidden @ self[f"{joined}.weight"][:, :width]
            (query,) = self.heads(asked if bias is None else asked + bias[:width], 1)
        query = query[:, :, query.shape[2] - self.shape.segment_length :]
        if self.shape.memory_length and self.shape.memory == "kv":
            key, value = torch.cat([memory[0], key], dim=2), torch.cat([memory[1], value], dim=2)
            rows_after = [self._rows(key, rows.kept), self._rows(value, rows.kept)]
        return query, key, value, rows_after

    def _rows(self, rows: Tensor, keep: Tensor) -> Tensor:
        """Select rows `keep` [B, M] of [B, (H,) K, width]: [B, (H,) M, width], by a single gather."""
        *outer, slots, width = rows.shape
        groups = math.prod(outer)
        start = torch.arange(groups, dtype=torch.int32).reshape(outer)[..., None] * slots
        index = start + keep.reshape(keep.shape[0], *[1] * (len(outer) - 1), keep.shape[1])
        flat = rows.reshape(groups * slots, width).index_select(0, index.flatten())
        return flat.reshape(*outer, keep.shape[1], width)


def memory_shapes(config: ModelConfig, shape: StepShape) -> list[tuple[int, ...]]:
    """Return the shapes of the memory arguments in order, e.g. [(B, M, D)] for one layer; [] if M is 0."""
    if not shape.memory_length:
        return []
    if shape.memory == "hidden":
        return [(shape.batch_size, shape.memory_length, config.d_model)] * config.n_layer
    return [(shape.batch_size, config.n_head, shape.memory_length, config.d_head)] * (2 * config.n_layer)
