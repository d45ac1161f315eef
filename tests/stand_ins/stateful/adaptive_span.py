"""A Transformer with adaptive spans: each token sees the span of tokens before it, and never itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, join_heads, split_heads


class AdaptiveSpan(Loaded):
    """tokens [B, L], h_cache [B, span, D] of each layer → logprobs [B, L, V], caches."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.heads, self.span = config["nb_heads"], config["attn_span"]
        self.ramp = config["adapt_span_params"]["adapt_span_ramp"]

    def forward(self, tokens: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        x = self.tensor("in_emb.weight")[tokens]
        kept = []
        for layer, cache in enumerate(caches):
            name = f"layers.{layer}"
            full = torch.cat((cache, x), 1)
            kept.append(full[:, -self.span :])
            x = self.normed(x + self._attended(x, full, f"{name}.attn"), f"{name}.norm1")
            wide = self.linear(F.relu(self.linear(x, f"{name}.ff.fc1")), f"{name}.ff.fc2")
            x = self.normed(x + wide, f"{name}.norm2")
        return self.linear(x, "out_emb").log_softmax(-1), *kept

    def _attended(self, x: Tensor, full: Tensor, name: str) -> Tensor:
        q, k, v = (self.linear(part, f"{name}.proj_{to}") for part, to in ((x, "query"), (full, "key"), (full, "val")))
        q, k, v = (split_heads(part, self.heads) for part in (q, k, v))
        seen = torch.arange(x.shape[1], device=x.device)[:, None] + torch.arange(self.span, device=x.device)
        scores = (q @ k.transpose(-1, -2)).gather(-1, seen.expand(*q.shape[:3], self.span))
        scores = (scores + q @ self.tensor("key_pe")) * q.shape[-1] ** -0.5
        mask = f"{name}.attn.adaptive_span._mask"
        ramp = self.tensor(f"{mask}.mask_template") + self.tensor(f"{mask}.current_val") * self.span
        weights = scores.softmax(-1) * (ramp / self.ramp + 1).clamp(0, 1)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-8)
        found = (weights[..., None] * v[:, :, seen]).sum(-2)
        return self.linear(join_heads(found), f"{name}.proj_out")


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case as01."""
    shape = ("B", config["attn_span"], config["hidden_size"])
    return StepSpec(
        AdaptiveSpan(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["vocab_size"])],
        [StateSpec(f"layers.{layer:02d}.h_cache", shape) for layer in range(config["nb_layers"])],
        [OutputSpec("logprobs", ("B", "L", config["vocab_size"]), role="logprobs")],
    )
