"""labml's Compressive Transformer with its experiment's merge of memories inside the step. Time stands first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, distances, join_heads, newest, split_heads


class CompressiveLabml(Loaded):
    """tokens [L, B], mem [0…M, B, D] and c_mem [0…C, B, D] of each layer → logits [L, B, V], memories.

    Whole groups of rows leave the memory, so it may hold fewer than M rows afterwards.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.heads, self.rate = config["heads"], config["compression_rate"]
        self.most, self.most_compressed = config["mem_len"], config["c_mem_len"]

    def forward(self, tokens: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        x = self.tensor("src_embed.weight")[tokens]
        kept: list[Tensor] = []
        for layer, (mem, compressed) in enumerate(zip(states[0::2], states[1::2], strict=True)):
            name = f"transformer.layers.{layer}"
            kept += self._merged(torch.cat((mem, x)), compressed, f"{name}.compress.conv")
            full = self.normed(torch.cat((compressed, mem, x)), f"{name}.norm_self_attn").transpose(0, 1)
            x = x + self._attended(full, x.shape[0], f"{name}.self_attn").transpose(0, 1)
            wide = F.relu(self.linear(self.normed(x, f"{name}.norm_ff"), f"{name}.feed_forward.layer1"))
            x = x + self.linear(wide, f"{name}.feed_forward.layer2")
        return self.linear(self.normed(x, "transformer.norm"), "generator"), *kept

    def _attended(self, full: Tensor, length: int, name: str) -> Tensor:
        q, k, v = (self.linear(full, f"{name}.{part}.linear") for part in ("query", "key", "value"))
        q, k, v = (split_heads(part, self.heads) for part in (q[:, -length:], k, v))
        behind = distances(length, full.shape[1], full.device)
        table = self.tensor(f"{name}.key_pos_embeddings")
        zero = table.shape[0] // 2
        rows = zero - torch.arange(full.shape[1], device=full.device)
        by_distance = q @ table[rows].permute(1, 2, 0) + self.tensor(f"{name}.key_pos_bias")[rows].t()[:, None]
        by_distance = by_distance.gather(-1, behind.clamp(min=0).expand(by_distance.shape))
        by_content = (q + self.tensor(f"{name}.query_pos_bias")[:, None]) @ k.transpose(-1, -2)
        found = attend((by_content + by_distance) * q.shape[-1] ** -0.5, v, behind >= 0)
        return self.linear(join_heads(found), f"{name}.output")

    def _merged(self, rows: Tensor, compressed: Tensor, name: str) -> tuple[Tensor, Tensor]:
        groups = -(-max(rows.shape[0] - self.most, 0) // self.rate)
        if groups == 0:
            return rows, compressed.clone()
        left, rows = rows[: groups * self.rate], rows[groups * self.rate :]
        new = F.conv1d(
            left.permute(1, 2, 0), self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"), stride=self.rate
        )
        return rows, newest(torch.cat((compressed, new.permute(2, 0, 1))), 0, self.most_compressed)


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case lc01."""
    states = []
    for layer in range(config["n_layers"]):
        for name, rows in (("mem", config["mem_len"]), ("c_mem", config["c_mem_len"])):
            states.append(StateSpec(f"layers.{layer:02d}.{name}", (rows, "B", config["d_model"]), grows=0))
    return StepSpec(
        CompressiveLabml(weights, config).eval(),
        [InputSpec("tokens", ("L", "B"), tokens=config["n_vocab"])],
        states,
        [OutputSpec("logits", ("L", "B", config["n_vocab"]))],
    )
