"""Mamba, one token a step: the convolution's last inputs and the state-space layer's state are carried."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded


class Mamba(Loaded):
    """tokens [B], then conv [B, E, k-1] and ssm [B, E, N] of each layer → logits [B, V], the same again."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.width = config["n_layers"], config["d_state"]

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.tensor(f"{name}.weight")

    def forward(self, tokens: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """One token of each sequence."""
        x = self.tensor("embedding.weight")[tokens]
        kept: list[Tensor] = []
        for layer in range(self.depth):
            name = f"mamba.layers.{layer}"
            mixed, conv, ssm = self._mix(self._rms(x, f"{name}.norm"), f"{name}.mixer", *states[2 * layer :][:2])
            x = x + mixed
            kept += [conv, ssm]
        return F.linear(self._rms(x, "norm_f"), self.tensor("lm_head.weight")), *kept

    def _mix(self, x: Tensor, name: str, conv: Tensor, ssm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gate = self.linear(x, f"{name}.in_proj").chunk(2, -1)
        window = torch.cat((conv, x[..., None]), -1)
        kernel = self.tensor(f"{name}.conv1d.weight")[:, 0]
        x = F.silu((window * kernel).sum(-1) + self.tensor(f"{name}.conv1d.bias"))
        selected = self.linear(x, f"{name}.x_proj")
        rank = selected.shape[-1] - 2 * self.width
        delta, into, out = selected.split((rank, self.width, self.width), -1)
        step = F.softplus(self.linear(delta, f"{name}.dt_proj"))[..., None]
        decay = torch.exp(-step * torch.exp(self.tensor(f"{name}.A_log")))
        ssm = decay * ssm + step * into[:, None, :] * x[..., None]
        y = (ssm * out[:, None, :]).sum(-1) + self.tensor(f"{name}.D") * x
        return self.linear(y * F.silu(gate), f"{name}.out_proj"), window[..., 1:], ssm


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case ma01."""
    wide = config["expand_factor"] * config["d_model"]
    states = []
    for layer in range(config["n_layers"]):
        states.append(StateSpec(f"layers.{layer:02d}.conv", ("B", wide, config["d_conv"] - 1)))
        states.append(StateSpec(f"layers.{layer:02d}.ssm", ("B", wide, config["d_state"])))
    return StepSpec(
        Mamba(weights, config).eval(),
        [InputSpec("tokens", ("B",), tokens=config["vocab_size"])],
        states,
        [OutputSpec("logits", ("B", config["vocab_size"]))],
    )
