"""The Transformer-XL of x-transformers: hidden rows before the norm, rotary positions or T5's bias."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, distances, join_heads, newest, split_heads


class XTransformer(Loaded):
    """tokens [B, L], memory [B, 0…M, D] of each attention layer → logits [B, L, V], memories."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        inner = config["attn_layers"]
        self.depth, self.heads = inner["depth"], inner["heads"]
        self.rotary = inner.get("rotary_pos_emb", False)
        self.most, self.shift = config["max_mem_len"], config["shift_mem_down"]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        frequencies = self.tensor("attn_layers.rotary_pos_emb.inv_freq")
        angles = (positions.to(x.dtype)[:, None] * frequencies).repeat_interleave(2, -1)
        turned, rest = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
        even, odd = turned[..., 0::2], turned[..., 1::2]
        swapped = torch.stack((-odd, even), -1).flatten(-2)
        return torch.cat((turned * angles.cos() + swapped * angles.sin(), rest), -1)

    def _bias(self, behind: Tensor) -> Tensor:
        table = self.tensor("attn_layers.rel_pos.relative_attention_bias.weight")
        behind, exact = behind.clamp(min=0), table.shape[0] // 2
        far = torch.log(behind.clamp(min=1).to(table.dtype) / exact) / math.log(128 / exact) * exact
        bucket = torch.where(behind < exact, behind, (exact + far).long().clamp(max=table.shape[0] - 1))
        return table[bucket].permute(2, 0, 1)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensor(f"{name}.gamma") + 1)

    def forward(self, tokens: Tensor, *memories: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        x = self.tensor("token_emb.emb.weight")[tokens]
        read = memories[self.shift :] + memories[: self.shift]
        kept = []
        for layer, memory in enumerate(read):
            name = f"attn_layers.layers.{2 * layer}"
            kept.append(newest(torch.cat((memory, x), 1), 1, self.most))
            full = self._normed(torch.cat((memory, x), 1), f"{name}.0.0")
            q = self.linear(full[:, memory.shape[1] :], f"{name}.1.to_q")
            k, v = self.linear(full, f"{name}.1.to_k"), self.linear(full, f"{name}.1.to_v")
            q, k, v = (split_heads(part, self.heads) for part in (q, k, v))
            behind = distances(q.shape[2], k.shape[2], q.device)
            if self.rotary:
                positions = -behind[-1]
                q, k = self._rotate(q, positions[memory.shape[1] :]), self._rotate(k, positions)
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            if not self.rotary:
                scores = scores + self._bias(behind) * q.shape[-1] ** 0.5
            x = x + self.linear(join_heads(attend(scores, v, behind >= 0)), f"{name}.1.to_out")
            name = f"attn_layers.layers.{2 * layer + 1}"
            wide = F.gelu(self.linear(self._normed(x, f"{name}.0.0"), f"{name}.1.ff.0.0"))
            x = x + self.linear(wide, f"{name}.1.ff.2")
        return self.linear(self._normed(x, "attn_layers.final_norm"), "to_logits"), *kept


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of cases xt01 and xt02."""
    shape = ("B", config["max_mem_len"], config["attn_layers"]["dim"])
    return StepSpec(
        XTransformer(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])],
        [StateSpec(f"layers.{i:02d}.mem", shape, grows=1) for i in range(config["attn_layers"]["depth"])],
        [OutputSpec("logits", ("B", "L", config["num_tokens"]))],
    )
