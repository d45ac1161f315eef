"""Defines the step with ring memory: keys and values stay in place, and a step writes only the segment's rows.

    inputs    tokens int32 [B, L] · valid int32 [B] · fill int32 [B] · head int32 [B] · memory per layer
    outputs   hidden float32 [B, L, D] (with features [B, L, 2 D]) · the same memory, L rows further

    memory    key and value, [B, H, C, d_head] each, of the network's dtype: R = M + longest L slots of a ring, then
        longest L slots of spill (`ring_slots`); one buffer serves as input and output

The rows of the segment go to slots head … head + L - 1 (linear TensorScatter, which ONNX Runtime does in place;
TensorRT's KV_CACHE_UPDATE). With a = c - head, slot c holds after the write row k = M + a - R·[a >= L] of (memory ‖
segment): the segment's own rows, or rows that were written a lap ago. A slot of the spill holds only rows of this
segment. Query i sees slot c iff 0 <= d < W and k >= M - fill, with d = M + i - k. One GatherElements, whose index is
computed once for all layers, does the relative shift and the ring's rotation; each stream has its own head.

After the step the memory's owner adds `valid` to `head`; if that reaches R, it moves rows R … head - 1 to the front and
subtracts R. Because R >= M + L, padding overwrites only rows that are no longer memory.

L is an open axis, and so is B if B is more than 1, so programs of all lengths share one file. `hidden` goes to the
softmax programs of `softmax`. With features, each row of `hidden` ends with the input of the last feed-forward layer,
for datastores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnxscript
import torch
from torch import Tensor
from txl_runtime.bundle.tables import ring_slots
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

from txl_export.families.transformer_xl.network import Network, count_distances
from txl_export.families.transformer_xl.step import StepShape, open_batch
from txl_export.families.transformer_xl.weights import layer_name
from txl_export.graphs.tracing import SEGMENT

FAR = 2**20  # Row number of unused slots: so far before memory that no query sees it; larger than any M


@torch.library.custom_op("txl::tensor_scatter", mutates_args=())
def tensor_scatter(past: Tensor, update: Tensor, write: Tensor) -> Tensor:
    """Return `past` [B, H, C, w] with `update` [B, H, L, w] from slot write[b] on: TensorScatter, linear, axis 2.

    For example, past [2, 4, 16, 8], update [2, 4, 5, 8] and write = [0, 9] replace slots 0 … 4 of sequence 0 and slots
    9 … 13 of sequence 1.
    """
    after = past.clone()
    for row, slot in enumerate(write.tolist()):
        after[row, :, slot : slot + update.shape[2]] = update[row]
    return after


@tensor_scatter.register_fake
def _(past: Tensor, update: Tensor, write: Tensor) -> Tensor:
    return torch.empty_like(past)


def _translate(past: Any, update: Any, write: Any) -> Any:
    opset = onnxscript.values.Opset("", 24)
    return onnxscript.values.Op(opset, "TensorScatter")(past, update, write, axis=2, mode="linear")


class RingStep(Network):
    """A step of 1 … L positions of 1 … B sequences, for attn_type 0 and 1, with a memory of keys and values.

    Args:
        shape: batch size B, longest segment L, memory length M; its memory is "kv".
        folded: the parameters from `fold`.
        features: whether rows end with the input of the last feed-forward layer.
    """

    translations: Mapping[Callable[..., Any], Callable[..., Any]] = {torch.ops.txl.tensor_scatter.default: _translate}

    def __init__(
        self,
        config: ModelConfig,
        dialect: Dialect,
        shape: StepShape,
        folded: Mapping[str, Tensor],
        features: bool = False,
    ) -> None:
        super().__init__(config, dialect, folded, count_distances(config, dialect, shape.slots))
        self.shape, self.features = shape, features
        self.ring, self.columns = ring_slots(shape.memory_length, shape.segment_length)
        slot = torch.arange(self.columns, dtype=torch.int32)
        self._keep("slot", slot)
        self._keep("lap", torch.where(slot < self.ring, self.ring, FAR).to(torch.int32))
        batch = open_batch(shape)
        length = {1: torch.export.Dim(SEGMENT, min=1, max=shape.segment_length)} if shape.segment_length > 1 else {}
        self.dynamic_shapes = ({**batch, **length}, batch, batch, batch, (batch,) * (2 * config.n_layer))

    def example_inputs(self) -> tuple[Tensor, ...]:
        c, batch = self.config, self.shape.batch_size
        counts = torch.zeros(3, batch, dtype=torch.int32)
        tokens = torch.zeros(batch, self.shape.segment_length, dtype=torch.int32)
        shape = (batch, c.n_head, self.columns, c.d_head)
        memory = (torch.zeros(shape, dtype=self.dtype) for _ in range(2 * c.n_layer))
        return (tokens, *counts.unbind(), *memory)

    def forward(self, tokens: Tensor, valid: Tensor, fill: Tensor, head: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """Run one step; the table at the top of this file has names, shapes and dtypes.

        For example, tokens [2, 5] with valid = [5, 3], fill = [16, 9] and head = [0, 9] give hidden [2, 5, 32].
        """
        c, (batch, length), m = self.config, tokens.shape, self.shape.memory_length
        # with B fixed, -1 saves the graph from computing L
        sizes = (batch, -1 if self.shape.batch_size == 1 else length)
        ahead = self["slot"][None] - head[:, None]  # slots counted from head, [B, C]
        nothing = torch.zeros((), dtype=torch.int32)
        # row numbers in (memory ‖ segment), [B, C]
        row = m + ahead - torch.where(ahead >= length, self["lap"][None], nothing)
        query = m + torch.arange(length, dtype=torch.int32)
        distance = query[None, :, None] - row[:, None, :]  # distances from query to row, [B, L, C]
        visible = (distance >= 0) & (row >= (m - fill)[:, None])[:, None]
        if self.dialect.window is not None:
            visible = visible & (distance < self.dialect.window)
        if (window := self.window_by_count(valid, m)) is not None:
            visible = visible & (distance < window[:, None, None])
        clipped = distance.clamp(0, self.distances - 1)[:, None]
        index = clipped.expand(-1, c.n_head, -1, -1).long()
        visible, write = visible[:, None], head.long()

        # hidden has two axes: only then an engine fuses a product, its bias and the next operator
        hidden = self.embed(tokens).flatten(end_dim=1)  # hidden [B·L, D]
        after: list[Tensor] = []
        for i in range(c.n_layer):
            name = f"{layer_name(i)}.attention"
            source = self.norm(f"{name}.norm", hidden) if c.pre_lnorm else hidden
            query, key, value = self.heads(self.linear(f"{name}.query_key_value", source), 3, sizes)
            key = tensor_scatter(memory[2 * i], key, write)
            value = tensor_scatter(memory[2 * i + 1], value, write)
            attended = self.mix(i, query, key, value, index, visible, flat=True)
            hidden, entering = self.around_entering(i, hidden, attended)
            after += key, value
        if c.final_norm:
            hidden = self.norm("final_norm", hidden)
        rows = torch.cat([hidden, entering], dim=1) if self.features else hidden
        return (rows.float().reshape(*sizes, rows.shape[1]), *after)
