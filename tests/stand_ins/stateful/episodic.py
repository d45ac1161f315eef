"""An episodic memory, one observation a step: each step writes one row and reads a window of the rows before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, join_heads, sinusoids, split_heads


class Episodic(Loaded):
    """obs [B, n], memory [B, T, blocks, D], t [B] → features [B, D], memory, t. No row is written after T steps."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.blocks, self.heads, self.window = config["num_blocks"], config["num_heads"], config["memory_length"]

    def forward(self, obs: Tensor, memory: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of each sequence."""
        x = F.relu(self.linear(obs, "linear_embedding"))[:, None]
        steps, slots = memory.shape[1], torch.arange(self.window, device=x.device)
        rows = (t - (self.window - 1)).clamp(0, steps - self.window)[:, None].long() + slots
        visible = (slots < t[:, None].clamp(max=self.window - 1))[:, None, None]
        read = memory.gather(1, rows[:, :, None, None].expand(-1, -1, *memory.shape[2:]))
        read = read + sinusoids(steps - 1 - rows, self.tensor("pos_embedding.inv_freqs"))[:, :, None]
        written = []
        for block in range(self.blocks):
            name = f"transformer_blocks.{block}"
            written.append(x)
            q, kv = self.normed(x, f"{name}.norm1"), self.normed(read[:, :, block], f"{name}.norm_kv")
            q, k, v = (
                split_heads(self.linear(part, f"{name}.attention.{to}"), self.heads)
                for part, to in ((q, "queries"), (kv, "keys"), (kv, "values"))
            )
            scores = q @ k.transpose(-1, -2) * x.shape[-1] ** -0.5
            x = x + self.linear(join_heads(attend(scores, v, visible)), f"{name}.attention.fc_out")
            x = x + F.relu(self.linear(self.normed(x, f"{name}.norm2"), f"{name}.fc.0"))
        here = (torch.arange(steps, device=x.device) == t[:, None])[:, :, None, None]
        return x[:, 0], torch.where(here, torch.stack(written, 2), memory), t + 1


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case mm01."""
    shape = ("B", config["max_episode_steps"], config["num_blocks"], config["embed_dim"])
    return StepSpec(
        Episodic(weights, config).eval(),
        [InputSpec("obs", ("B", config["input_dim"]))],
        [StateSpec("memory", shape), StateSpec("t", ("B",), dtype="int32", initial=0)],
        [OutputSpec("features", ("B", config["embed_dim"]))],
    )
