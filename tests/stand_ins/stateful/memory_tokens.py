"""A Recurrent Memory Transformer: memory tokens before and behind the segment, a null key, a residual of the values.

With more than one residual stream they are joined by hyper-connections. With a Transformer-XL's memory each layer reads
the last keys and values of the segment before, which are never joined with older ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, join_heads, split_heads


class MemoryTokens(Loaded):
    """tokens [B, L], read_memories [B, m, D], xl_kv [2, B, H, 0…M, d] of each layer → logits [B, L, V], the states."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.heads, self.memories = config["depth"], config["heads"], config["num_memory_tokens"]
        self.streams = config.get("num_residual_streams", 4)
        self.most = config.get("xl_mem_len", 0) if config.get("use_xl_memories", True) else 0
        self.added = config.get("add_write_to_next_write_mem", False)

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensor(f"{name}.weight"), torch.finfo(x.dtype).eps)

    def _spread(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Hyper-connections: what a branch is given, the streams beside it, and how much of its result each takes."""
        if self.streams == 1:
            return streams[..., 0, :], streams, torch.ones_like(streams[..., 0])
        normed = F.normalize(streams, dim=-1) * streams.shape[-1] ** 0.5 * (self.tensor(f"{name}.norm.gamma") + 1)
        mixed = torch.tanh(normed @ self.tensor(f"{name}.dynamic_alpha_fn")) * self.tensor(
            f"{name}.dynamic_alpha_scale"
        )
        taken = torch.tanh(normed @ self.tensor(f"{name}.dynamic_beta_fn")) * self.tensor(f"{name}.dynamic_beta_scale")
        mixed = (mixed + self.tensor(f"{name}.static_alpha")).transpose(-1, -2) @ streams
        return mixed[..., 0, :], mixed[..., 1:, :], taken + self.tensor(f"{name}.static_beta")

    def forward(self, tokens: Tensor, memories: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        length, most = tokens.shape[1], self.memories
        x = self.tensor("token_emb.weight")[tokens] + self.tensor("pos_emb.weight")[:length]
        write = self.tensor("memory_tokens") + (memories if self.added else torch.zeros_like(memories))
        x = torch.cat((memories + self.tensor("read_memory_emb"), x, write), 1)
        places = torch.arange(length, device=x.device)
        visible = F.pad(places[:, None] >= places, (0, most, most, 0), value=False)
        visible = F.pad(visible, (most, 0, 0, most), value=True)
        visible = F.pad(visible, (1 + (caches[0].shape[3] if caches else 0), 0), value=True)
        streams, first, kept = x[..., None, :].expand(*x.shape[:2], self.streams, -1), None, []
        for layer in range(self.depth):
            given, beside, taken = self._spread(streams, f"layers.{layer}.0")
            cache = caches[layer] if caches else None
            found, values, new = self._attended(given, f"layers.{layer}.0.branch", visible, first, cache)
            first = values if first is None else first
            kept.append(new)
            streams = beside + taken[..., None] * found[..., None, :]
            given, beside, taken = self._spread(streams, f"layers.{layer}.1")
            name = f"layers.{layer}.1.branch"
            wide, gate = self.linear(self._rms(given, f"{name}.0"), f"{name}.1").chunk(2, -1)
            streams = beside + taken[..., None] * self.linear(wide * F.gelu(gate), f"{name}.4")[..., None, :]
        x = self._rms(streams.sum(-2), "norm")
        return self.linear(x[:, most:-most], "to_logits"), x[:, -most:], *kept[: len(caches)]

    def _attended(
        self, x: Tensor, name: str, visible: Tensor, first: Tensor | None, cache: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of attention, the values before they are mixed, and the keys and values to keep."""
        x = self._rms(x, f"{name}.norm")
        k, v = (split_heads(part, self.heads) for part in self.linear(x, f"{name}.to_kv").chunk(2, -1))
        q, values = split_heads(self.linear(x, f"{name}.to_q"), self.heads), v
        if first is not None:
            mix = torch.sigmoid(self.linear(x, f"{name}.learned_value_residual_mix.0")).transpose(1, 2)[..., None]
            v = v + (first - v) * mix
        null = self.tensor(f"{name}.null_kv")[:, None, :, None].expand(-1, x.shape[0], -1, -1, -1)
        both = torch.cat((null, torch.stack((k, v))), 3)
        new = both[:, :, :, -self.most :]
        k, v = both if cache is None else torch.cat((cache, both), 3)
        found = attend(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, v, visible)
        return self.linear(join_heads(found), f"{name}.to_out"), values, new


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of cases rm01 and rm02."""
    states = [StateSpec("read_memories", ("B", config["num_memory_tokens"], config["dim"]))]
    if config.get("use_xl_memories", True):
        shape = (2, "B", config["heads"], config["xl_mem_len"], config["dim_head"])
        states += [StateSpec(f"layers.{layer:02d}.xl_kv", shape, grows=3) for layer in range(config["depth"])]
    return StepSpec(
        MemoryTokens(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])],
        states,
        [OutputSpec("logits", ("B", "L", config["num_tokens"]))],
    )
