"""The Compressive Transformer with memories that always have all their rows, of which counters say how many are filled.

It computes what `compressive` computes. Its graph is the same from the first segment on, and sequences are independent.
The newest rows stand at the end. Which rows leave the memory, where they stand among the rows that are compressed
together, and how many compressed rows come of them depends on the counters alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.compressive import Compressive
from stand_ins.stateful.weights import Config, attend, distances, join_heads, newest, split_heads


class CompressiveCounted(Compressive):
    """tokens, mem [layers, B, M, D], compressed_mem [layers, B, C, D], fill [B], compressed_fill [B] → logits, all."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, mem: Tensor, compressed: Tensor, fill: Tensor, compressed_fill: Tensor
    ) -> tuple[Tensor, ...]:
        """One segment."""
        x = self.tensor("token_emb.weight")[tokens]
        visible, columns = self._places(tokens.shape[1], fill, compressed_fill)
        lost = (fill + self.whole - self.most).clamp(min=0)
        kept, kept_compressed = [], []
        for layer in range(self.depth):
            above = (layer + 1) % self.depth
            name = f"attn_layers.{layer}"
            here = self.normed(x, f"{name}.fn.norm")
            rows = torch.cat((mem[above], here), 1)
            full = torch.cat((compressed[above], rows), 1)
            x = self._gated(x, self._found(here, full, visible, columns, f"{name}.fn.fn"), name)
            kept.append(newest(rows, 1, self.most))
            name_of = f"{name}.fn.fn.compress_mem_fn.conv"
            kept_compressed.append(self._moved(compressed[above], rows[:, : self.whole], lost, name_of))
            name = f"ff_layers.{layer}"
            wide = F.gelu(self.linear(self.normed(x, f"{name}.fn.norm"), f"{name}.fn.fn.w1"))
            x = self._gated(x, self.linear(wide, f"{name}.fn.fn.w2"), name)
        logits = self.linear(x, "to_logits.1")
        if tokens.shape[1] != self.whole:
            return logits, mem.roll(-1, 0), compressed.roll(-1, 0), fill * 1, compressed_fill * 1
        compressed_fill = (compressed_fill + self._made(lost)).clamp(max=self.most_compressed)
        fill = (fill + self.whole).clamp(max=self.most)
        return logits, torch.stack(kept), torch.stack(kept_compressed), fill, compressed_fill

    def _places(self, length: int, fill: Tensor, compressed_fill: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys that each query sees, and each pair's row of the table of positions, both [B, 1, L, K].

        The table counts from the oldest row that is filled.
        """
        before, between = (self.most_compressed - compressed_fill)[:, None], (self.most - fill)[:, None]
        keys = torch.arange(self.most_compressed + self.most + length, device=fill.device)
        recent = keys >= self.most_compressed
        filled = torch.where(recent, keys - self.most_compressed >= between, keys >= before)
        visible = filled[:, None, None] & (distances(length, keys.shape[0], fill.device) >= 0)
        places = keys - before - torch.where(recent, between, 0)
        queries = torch.arange(length, device=fill.device)
        columns = self.whole - 1 - queries[:, None] + places[:, None, None]
        return visible, columns.clamp(0, self.tensor("pos_emb").shape[1] - 1)

    def _found(self, x: Tensor, full: Tensor, visible: Tensor, columns: Tensor, name: str) -> Tensor:
        k, v = self.linear(full, f"{name}.to_kv").chunk(2, -1)
        q, k, v = (split_heads(part, self.heads) for part in (self.linear(x, f"{name}.to_q"), k, v))
        by_place = (q @ self.tensor("pos_emb").transpose(-1, -2)).gather(-1, columns.expand(-1, self.heads, -1, -1))
        scores = (q @ k.transpose(-1, -2) + by_place) * q.shape[-1] ** -0.5
        return self.linear(join_heads(attend(scores, v, visible)), f"{name}.to_out")

    def _made(self, lost: Tensor) -> Tensor:
        """Return the number of compressed rows that come of `lost` rows, with the zero rows in front of them."""
        return (lost + lost % self.ratio) // self.ratio

    def _moved(self, compressed: Tensor, oldest: Tensor, lost: Tensor, name: str) -> Tensor:
        """The compressed memory after the last `lost` [B] of the oldest rows [B, S, D] have been added to it."""
        most = max((n + n % self.ratio) // self.ratio for n in range(self.whole + 1))
        first = self.whole - lost - lost % self.ratio
        index = first[:, None] + torch.arange(most * self.ratio, device=lost.device)
        leave = (index >= (self.whole - lost)[:, None]) & (index < self.whole)
        chosen = index.clamp(0, self.whole - 1)[..., None].expand(-1, -1, oldest.shape[-1])
        rows = torch.where(leave[..., None], oldest.gather(1, chosen), 0.0)
        new = F.conv1d(rows.transpose(1, 2), self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"), self.ratio)
        kept = self._made(lost)[:, None] + torch.arange(self.most_compressed, device=lost.device)
        both = torch.cat((compressed, new.transpose(1, 2)), 1)
        return both.gather(1, kept[..., None].expand(-1, -1, both.shape[-1]))


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of cases ct01 and ct02, as one graph."""
    depth, width = config["depth"], config["dim"]
    return StepSpec(
        CompressiveCounted(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])],
        [
            StateSpec("mem", (depth, "B", config["mem_len"], width)),
            StateSpec("compressed_mem", (depth, "B", config["cmem_len"], width)),
            StateSpec("fill", ("B",), dtype="int64"),
            StateSpec("compressed_fill", ("B",), dtype="int64"),
        ],
        [OutputSpec("logits", ("B", "L", config["num_tokens"]))],
    )
