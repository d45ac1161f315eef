"""A Universal Transformer that halts per position: as many hops as there may be, with masks in place of the halt."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, join_heads, split_heads

THRESHOLD = 0.9


class Universal(Loaded):
    """story [B, sentences, words], query [B, words] → logits [B, V], remainders and n_updates [B, sentences + 1]."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.hops, self.heads = config["num_layers"], config["num_heads"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        spread = x.std(-1, keepdim=True) + 1e-6
        return self.tensor(f"{name}.gamma") * (x - x.mean(-1, keepdim=True)) / spread + self.tensor(f"{name}.beta")

    def _signal(self, positions: Tensor, width: int) -> Tensor:
        scales = width // 2
        frequencies = torch.exp(torch.arange(scales, device=positions.device) * (-math.log(1e4) / (scales - 1)))
        angles = positions[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), -1)

    def _hop(self, x: Tensor) -> Tensor:
        name = "transformer_enc.enc"
        normed = self._norm(x, f"{name}.layer_norm_mha")
        q, k, v = (
            split_heads(self.linear(normed, f"{name}.multi_head_attention.{part}_linear"), self.heads)
            for part in ("query", "key", "value")
        )
        found = join_heads((q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)).softmax(-1) @ v)
        x = x + self.linear(found, f"{name}.multi_head_attention.output_linear")
        wide = self._norm(x, f"{name}.layer_norm_ffn").transpose(1, 2)
        for part in range(2):
            conv = f"{name}.positionwise_feed_forward.layers.{part}.conv"
            wide = F.conv1d(wide, self.tensor(f"{conv}.weight"), self.tensor(f"{conv}.bias"), padding=1)
            wide = F.relu(wide)
        return x + wide.transpose(1, 2)

    def forward(self, story: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One story with its question."""
        words = self.tensor("emb.weight")[torch.cat((story, query[:, None]), 1)]
        x = (words * self.tensor("mask")[: words.shape[2]]).sum(2)
        x = self.linear(x, "transformer_enc.embedding_proj")
        places = self._signal(torch.arange(x.shape[1], device=x.device), x.shape[2]).to(x.dtype)
        times = self._signal(torch.arange(self.hops, device=x.device), x.shape[2]).to(x.dtype)
        halting, remainders, updates = (torch.zeros_like(x[..., 0]) for _ in range(3))
        result = torch.zeros_like(x)
        for hop in range(self.hops):
            x = x + places + times[hop]
            p = torch.sigmoid(self.linear(x, "transformer_enc.act_fn.p")).squeeze(-1)
            running = (halting < 1).to(x.dtype)
            halted = (halting + p * running > THRESHOLD).to(x.dtype) * running
            running = (halting + p * running <= THRESHOLD).to(x.dtype) * running
            halting = halting + p * running
            remainders = remainders + halted * (1 - halting)
            halting = halting + halted * remainders
            updates = updates + running + halted
            weight = (p * running + halted * remainders)[..., None]
            x = self._hop(x)
            result = x * weight + result * (1 - weight)
        return self.linear(result.mean(1), "W"), remainders, updates


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case ut01: four sentences of four words, and a question of four words."""
    vocabulary = config["num_vocab"]
    return StepSpec(
        Universal(weights, config).eval(),
        [InputSpec("story", ("B", 4, 4), tokens=vocabulary), InputSpec("query", ("B", 4), tokens=vocabulary)],
        [],
        [
            OutputSpec("logits", ("B", vocabulary)),
            OutputSpec("remainders", ("B", 5)),
            OutputSpec("n_updates", ("B", 5)),
        ],
    )
