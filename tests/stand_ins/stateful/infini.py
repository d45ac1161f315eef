"""Infini-attention: a matrix of keys times values that every segment adds to, read beside the segment's own attention.

No memory is not a memory of zeros: the gate then leaves the segment's attention whole. A state counts the segments, so
that the graph is the same for the first segment and for all others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, distances, join_heads, split_heads


class Infini(Loaded):
    """tokens [B, L], segments [B], kv [B, H, d, d] and norm [B, H, d] of each layer → logits [B, L, V], all."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.heads, self.delta = config["depth"], config["heads"], config.get("use_mem_delta_rule", False)

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.tensor(f"{name}.gamma")

    def forward(self, tokens: Tensor, segments: Tensor, *memories: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        x = self.tensor("token_emb.weight")[tokens]
        kept: list[Tensor] = []
        for layer in range(self.depth):
            found, *memory = self._attended(x, f"layers.{layer}.0", segments, *memories[2 * layer : 2 * layer + 2])
            kept, x, name = [*kept, *memory], x + found, f"layers.{layer}.1"
            wide, gate = self.linear(self._rms(x, f"{name}.norm"), f"{name}.proj_in").chunk(2, -1)
            x = x + self.linear(wide * F.gelu(gate), f"{name}.proj_out")
        return self.linear(self._rms(x, "norm"), "to_logits"), segments + 1, *kept

    def _attended(
        self, x: Tensor, name: str, segments: Tensor, memory: Tensor, norm: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of attention and memory, and the memory with this segment."""
        parts = self.linear(self._rms(x, f"{name}.norm"), f"{name}.to_qkv").chunk(3, -1)
        q, k, v = (split_heads(part, self.heads) for part in parts)
        behind = distances(q.shape[2], k.shape[2], q.device)
        turned_q, turned_k = (self._turn(part, f"{name}.rotary_emb.freqs") for part in (q, k))
        here = attend(turned_q @ turned_k.transpose(-1, -2) * q.shape[-1] ** -0.5, v, behind >= 0)
        gate = torch.sigmoid(self.tensor(f"{name}.fastweight_mem.head_gates"))[:, None, None]
        mixed = here * gate + _read(F.elu(q) + 1, memory, norm) * (1 - gate)
        found = torch.where((segments > 0)[:, None, None, None], mixed, here)
        k = F.elu(k) + 1
        v = v - _read(k, memory, norm) if self.delta else v
        return self.linear(join_heads(found), f"{name}.to_out"), memory + k.transpose(-1, -2) @ v, norm + k.sum(2)

    def _turn(self, x: Tensor, name: str) -> Tensor:
        places = torch.arange(x.shape[2], device=x.device).to(x.dtype)
        angles = (places[:, None] * self.tensor(name)).repeat_interleave(2, -1)
        swapped = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
        return x * angles.cos() + swapped * angles.sin()


def _read(x: Tensor, memory: Tensor, norm: Tensor) -> Tensor:
    """Read a memory with rows [B, H, T, d]; zeros from one of zeros."""
    return x @ memory / (x @ norm[..., None]).clamp(min=1e-10)


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of infini-transformer-pytorch's model."""
    heads, width = config["heads"], config["dim_head"]
    states = [StateSpec("segments", ("B",), dtype="int32")]
    for layer in range(config["depth"]):
        states.append(StateSpec(f"layers.{layer:02d}.kv", ("B", heads, width, width)))
        states.append(StateSpec(f"layers.{layer:02d}.norm", ("B", heads, width)))
    return StepSpec(
        Infini(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])],
        states,
        [OutputSpec("logits", ("B", "L", config["num_tokens"]))],
    )
