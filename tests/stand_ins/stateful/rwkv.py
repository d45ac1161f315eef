"""RWKV (version 4): a recurrence over keys and values whose sum starts at minus infinity, written -1e30."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded

NAMES = ("ffn_shift", "att_shift", "numerator", "denominator", "maximum")


class Rwkv(Loaded):
    """tokens [B, L] and five states [B, D, layers] → logits [B, L, V] and the states.

    The package mixes sequences up where L is 1: it forgets an axis of what was before, and [B, 1, D] with [B, D]
    becomes [B, B, D], as if each sequence had B tokens, one for each row of what was before. The states are those after
    all of them, and only the last L logits are returned.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth = config["num_hidden_layers"]

    def _mixed(self, x: Tensor, before: Tensor, name: str, *parts: str) -> list[Tensor]:
        shifted = before if x.shape[1] == 1 else torch.cat((before[:, None], x[:, :-1]), 1)
        ratios = [self.tensor(f"{name}.time_mix_{part}") for part in parts]
        return [x * ratio + shifted * (1 - ratio) for ratio in ratios]

    def _recur(
        self, name: str, keys: Tensor, values: Tensor, above: Tensor, below: Tensor, most: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        decay, first = -self.tensor(f"{name}.time_decay").exp(), self.tensor(f"{name}.time_first")
        results = []
        for k, v in zip(keys.unbind(1), values.unbind(1), strict=True):
            top = torch.maximum(most, k + first)
            old, new = torch.exp(most - top), torch.exp(k + first - top)
            results.append((old * above + new * v) / (old * below + new))
            top = torch.maximum(most + decay, k)
            old, new = torch.exp(most + decay - top), torch.exp(k - top)
            above, below, most = old * above + new * v, old * below + new, top
        return torch.stack(results, 1), above, below, most

    def forward(self, tokens: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        x = self.tensor("rwkv.embeddings.weight")[tokens]
        x = self.normed(x, "rwkv.blocks.0.pre_ln")
        kept = []
        for layer in range(self.depth):
            name = f"rwkv.blocks.{layer}"
            ffn, att, above, below, most = (state[..., layer] for state in states)
            normed = self.normed(x, f"{name}.ln1")
            k, v, r = self._mixed(normed, att, f"{name}.attention", "key", "value", "receptance")
            keys, values = self.linear(k, f"{name}.attention.key"), self.linear(v, f"{name}.attention.value")
            gate = torch.sigmoid(self.linear(r, f"{name}.attention.receptance"))
            found, above, below, most = self._recur(f"{name}.attention", keys, values, above, below, most)
            x = x + self.linear(gate * found, f"{name}.attention.output")
            att, normed = normed[:, -1], self.normed(x, f"{name}.ln2")
            k, r = self._mixed(normed, ffn, f"{name}.feed_forward", "key", "receptance")
            wide = F.relu(self.linear(k, f"{name}.feed_forward.key")).square()
            gate = torch.sigmoid(self.linear(r, f"{name}.feed_forward.receptance"))
            x = x + gate * self.linear(wide, f"{name}.feed_forward.value")
            kept.append((normed[:, -1], att, above, below, most))
        logits = F.linear(self.normed(x, "rwkv.ln_out"), self.tensor("head.weight"))
        return logits[:, -tokens.shape[1] :], *(torch.stack(parts, -1) for parts in zip(*kept, strict=True))


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case rw01."""
    shape = ("B", config["hidden_size"], config["num_hidden_layers"])
    return StepSpec(
        Rwkv(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["vocab_size"])],
        [StateSpec(name, shape, initial=-1e30 if name == "maximum" else 0.0) for name in NAMES],
        [OutputSpec("logits", ("B", "L", config["vocab_size"]))],
    )
