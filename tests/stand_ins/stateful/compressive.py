"""The Compressive Transformer: rows that leave the memory are compressed into a second memory, not dropped."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, distances, gru_cell, join_heads, newest, split_heads


class Compressive(Loaded):
    """tokens [B, L], mem [layers, B, 0…M, D], compressed_mem [layers, B, 0…C, D] → logits [B, L, V], both.

    The layers read the memories shifted by one. Only a whole segment changes them; a shorter one leaves them shifted.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.heads, self.whole = config["depth"], config["heads"], config["seq_len"]
        self.most, self.most_compressed, self.ratio = config["mem_len"], config["cmem_len"], config["cmem_ratio"]

    def _gated(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return gru_cell(y, x, *(self.tensor(f"{name}.gru.{part}") for part in parts))

    def forward(self, tokens: Tensor, mem: Tensor, compressed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One segment."""
        x = self.tensor("token_emb.weight")[tokens]
        kept, kept_compressed = [], []
        for layer in range(self.depth):
            above = (layer + 1) % self.depth
            name = f"attn_layers.{layer}"
            here = self.normed(x, f"{name}.fn.norm")
            y = self._attended(here, torch.cat((compressed[above], mem[above], here), 1), f"{name}.fn.fn")
            x = self._gated(x, y, name)
            all_rows = torch.cat((mem[above], here), 1)
            kept.append(newest(all_rows, 1, self.most))
            left = all_rows[:, : max(all_rows.shape[1] - self.most, 0) if tokens.shape[1] == self.whole else 0]
            kept_compressed.append(self._compressed(compressed[above], left, f"{name}.fn.fn.compress_mem_fn.conv"))
            name = f"ff_layers.{layer}"
            wide = F.gelu(self.linear(self.normed(x, f"{name}.fn.norm"), f"{name}.fn.fn.w1"))
            x = self._gated(x, self.linear(wide, f"{name}.fn.fn.w2"), name)
        logits = self.linear(x, "to_logits.1")
        if tokens.shape[1] != self.whole:
            return logits, mem.roll(-1, 0), compressed.roll(-1, 0)
        return logits, torch.stack(kept), torch.stack(kept_compressed)

    def _attended(self, x: Tensor, full: Tensor, name: str) -> Tensor:
        k, v = self.linear(full, f"{name}.to_kv").chunk(2, -1)
        q, k, v = (split_heads(part, self.heads) for part in (self.linear(x, f"{name}.to_q"), k, v))
        behind = distances(q.shape[2], k.shape[2], x.device)
        short = self.whole - q.shape[2]
        table = self.tensor("pos_emb")[:, short : short + k.shape[2]].flip(1)
        by_distance = q @ table.transpose(-1, -2)
        by_distance = by_distance.gather(-1, behind.clamp(min=0).expand(by_distance.shape))
        scores = (q @ k.transpose(-1, -2) + by_distance) * q.shape[-1] ** -0.5
        return self.linear(join_heads(attend(scores, v, behind >= 0)), f"{name}.to_out")

    def _compressed(self, compressed: Tensor, left: Tensor, name: str) -> Tensor:
        if left.shape[1] == 0:
            return compressed
        left = F.pad(left, (0, 0, left.shape[1] % self.ratio, 0))  # the package's number, no multiple for a ratio of 3
        new = F.conv1d(
            left.transpose(1, 2), self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"), stride=self.ratio
        )
        return newest(torch.cat((compressed, new.transpose(1, 2)), 1), 1, self.most_compressed)


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of cases ct01 and ct02."""
    depth, width = config["depth"], config["dim"]
    return StepSpec(
        Compressive(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])],
        [
            StateSpec("mem", (depth, "B", config["mem_len"], width), grows=2),
            StateSpec("compressed_mem", (depth, "B", config["cmem_len"], width), grows=2),
        ],
        [OutputSpec("logits", ("B", "L", config["num_tokens"]))],
    )
