"""A Recurrent Memory Transformer over GPT-2: memory tokens before and behind the segment, a learned start."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, distances, join_heads, split_heads


class MemoryTokens(Loaded):
    """tokens [B, L], memory [B, m, D] → logits [B, L, V], memory."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.heads = config["base"]["n_layer"], config["base"]["n_head"]

    def _turned(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensor(f"{name}.weight") + self.tensor(f"{name}.bias")

    def forward(self, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One segment."""
        embedding = self.tensor("model.transformer.wte.weight")
        x = torch.cat((memory, embedding[tokens], memory), 1)
        x = x + self.tensor("model.transformer.wpe.weight")[: x.shape[1]]
        behind = distances(x.shape[1], x.shape[1], x.device)
        for layer in range(self.depth):
            name = f"model.transformer.h.{layer}"
            parts = self._turned(self.normed(x, f"{name}.ln_1"), f"{name}.attn.c_attn").chunk(3, -1)
            q, k, v = (split_heads(part, self.heads) for part in parts)
            found = attend(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, v, behind >= 0)
            x = x + self._turned(join_heads(found), f"{name}.attn.c_proj")
            wide = F.gelu(self._turned(self.normed(x, f"{name}.ln_2"), f"{name}.mlp.c_fc"), approximate="tanh")
            x = x + self._turned(wide, f"{name}.mlp.c_proj")
        x, rows = self.normed(x, "model.transformer.ln_f"), memory.shape[1]
        return self.linear(x[:, rows:-rows], "model.lm_head"), x[:, -rows:]


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case rb01."""
    base = config["base"]
    return StepSpec(
        MemoryTokens(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=base["vocab_size"])],
        [StateSpec("memory", ("B", config["num_mem_tokens"], base["n_embd"]), initial="memory")],
        [OutputSpec("logits", ("B", "L", base["vocab_size"]))],
    )
