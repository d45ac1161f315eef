"""XLNet read from left to right, with Transformer-XL's memory; the memory has time first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, distances, geometric, newest, sinusoids


class XlNet(Loaded):
    """tokens [B, L], memory [0…M, B, D] of each layer → logits [B, L, V], memories."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.most = config["n_layer"], config["mem_len"]

    def forward(self, tokens: Tensor, *memories: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        x = self.tensor("transformer.word_embedding.weight")[tokens]
        kept = []
        for layer, memory in enumerate(memories):
            name = f"transformer.layer.{layer}"
            full = torch.cat((memory.transpose(0, 1), x), 1)
            kept.append(newest(full.transpose(0, 1), 0, self.most))
            x = self.normed(x + self._attended(x, full, f"{name}.rel_attn"), f"{name}.rel_attn.layer_norm", 1e-12)
            wide = self.linear(F.gelu(self.linear(x, f"{name}.ff.layer_1")), f"{name}.ff.layer_2")
            x = self.normed(x + wide, f"{name}.ff.layer_norm", 1e-12)
        return self.linear(x, "lm_loss"), *kept

    def _attended(self, x: Tensor, full: Tensor, name: str) -> Tensor:
        q = torch.einsum("bid,dhn->bhin", x, self.tensor(f"{name}.q"))
        k = torch.einsum("bjd,dhn->bhjn", full, self.tensor(f"{name}.k"))
        v = torch.einsum("bjd,dhn->bhjn", full, self.tensor(f"{name}.v"))
        behind = distances(x.shape[1], full.shape[1], x.device)
        table = sinusoids(torch.arange(full.shape[1], device=x.device), geometric(x.shape[-1], x))
        far = torch.einsum("jd,dhn->hjn", table, self.tensor(f"{name}.r"))
        by_content = (q + self.tensor(f"{name}.r_w_bias")[None, :, None]) @ k.transpose(-1, -2)
        by_distance = (q + self.tensor(f"{name}.r_r_bias")[None, :, None]) @ far.transpose(-1, -2)
        by_distance = by_distance.gather(-1, behind.clamp(min=0).expand(by_distance.shape))
        found = attend((by_content + by_distance) * q.shape[-1] ** -0.5, v, behind >= 0)
        return torch.einsum("bhin,dhn->bid", found, self.tensor(f"{name}.o"))


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case xn01."""
    shape = (config["mem_len"], "B", config["d_model"])
    return StepSpec(
        XlNet(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["vocab_size"])],
        [StateSpec(f"layers.{layer:02d}.mem", shape, grows=0) for layer in range(config["n_layer"])],
        [OutputSpec("logits", ("B", "L", config["vocab_size"]))],
    )
