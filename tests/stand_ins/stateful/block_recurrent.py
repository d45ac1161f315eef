"""A Block-Recurrent Transformer: one layer reads and writes state vectors, and every layer reads the block before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, distances, join_heads, split_heads


class BlockRecurrent(Loaded):
    """tokens [B, W], xl [2, B, 0 or W, d] of each layer, state [B, n, D] of each recurrent layer → logits, all."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.heads, self.width = config["depth"], config["heads"], config["block_width"]
        self.recurrent = sorted(config["recurrent_layers"])

    def forward(self, tokens: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """One block."""
        x = self.tensor("token_emb.weight")[tokens]
        kept, written = [], []
        for layer in range(self.depth):
            name = f"layers.{layer}.0"
            here = self.normed(x, f"{name}.norm")
            own = torch.stack(self.linear(here, f"{name}.to_kv").chunk(2, -1))
            kept.append(own)
            q = split_heads(self.linear(here, f"{name}.to_q"), self.heads)
            found = self._attended(q, torch.cat((states[layer], own), 2), f"{name}.attn", True)
            if layer + 1 in self.recurrent:
                vectors = states[self.depth + self.recurrent.index(layer + 1)]
                read, vectors = self._recurrent(here, own, vectors, f"{name}.state_container")
                found = torch.cat((found, read), -1)
                written.append(vectors)
            x = x + self.linear(found, f"{name}.to_out")
            name = f"layers.{layer}.1"
            wide, gate = self.linear(self.normed(x, f"{name}.0"), f"{name}.1").chunk(2, -1)
            x = x + self.linear(wide * F.gelu(gate), f"{name}.3")
        return self.linear(self.normed(x, "to_logits.0"), "to_logits.1"), *kept, *written

    def _recurrent(self, x: Tensor, own: Tensor, vectors: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return the segment's read of the state vectors, and the vectors that it leaves."""
        normed = self.normed(vectors, f"{name}.state_norm") + self.tensor(f"{name}.state_pos_ids")
        state = torch.stack(self.linear(normed, f"{name}.state_to_kv").chunk(2, -1))
        q, to_state, from_state = (
            split_heads(self.linear(of, f"{name}.{kind}"), self.heads)
            for of, kind in ((normed, "state_to_q"), (x, "q_to_state"), (normed, "q_from_state"))
        )
        read = self._attended(to_state, state, f"{name}.to_state_cross_attn")
        within = self._attended(q, state, f"{name}.state_self_attn")
        across = self._attended(from_state, own, f"{name}.from_state_cross_attn")
        both = torch.stack([split_heads(part, self.heads) for part in (within, across)], 3).flatten(3)
        new = self.linear(self.linear(join_heads(both), f"{name}.to_state_out"), f"{name}.state_out_to_gate")
        share = torch.sigmoid(self.tensor(f"{name}.learned_ema_beta"))
        return read, share * new + (1 - share) * vectors

    def _attended(self, q: Tensor, rows: Tensor, name: str, turned: bool = False) -> Tensor:
        """q [B, H, T, d], keys and values [2, B, K, d] that all heads share → [B, T, H·d]; causal where turned."""
        k, v = rows[:, :, None]
        visible = torch.ones((), dtype=torch.bool, device=q.device)
        if self.has(f"{name}.q_scale"):
            q = F.normalize(q, dim=-1) * self.tensor(f"{name}.q_scale")
            k = F.normalize(k, dim=-1) * self.tensor(f"{name}.k_scale")
        if turned:
            q, k = self._turn(q, 1.0), self._turn(k, -1.0)
            behind = distances(q.shape[2], k.shape[2], q.device)
            visible = behind >= 0
        return join_heads(attend(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, v, visible))

    def _turn(self, x: Tensor, power: float) -> Tensor:
        """Rotary positions of which the last is 2·W - 1, and sizes that shrink with the distance."""
        steps = torch.arange(0, x.shape[-1], 2, device=x.device).to(x.dtype)
        positions = torch.arange(2 * self.width - x.shape[2], 2 * self.width, device=x.device).to(x.dtype)[:, None]
        angles = (positions * 10000.0 ** (-steps / x.shape[-1])).tile(1, 2)
        base = (steps + 0.4 * x.shape[-1]) / (1.4 * x.shape[-1])
        sizes = (base ** (power * (positions - self.width) / 512)).tile(1, 2)
        one, other = x.chunk(2, -1)
        return (x * angles.cos() + torch.cat((-other, one), -1) * angles.sin()) * sizes


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case br01."""
    shape = (2, "B", config["block_width"], config["dim_head"])
    states = [StateSpec(f"xl.{layer:02d}.kv", shape, grows=2) for layer in range(config["depth"])]
    for number, layer in enumerate(sorted(config["recurrent_layers"])):
        start = f"layers.{layer - 1}.0.state_container.init_state"
        vectors = ("B", config["num_state_vectors"], config["dim"])
        states.append(StateSpec(f"recurrent.{number:02d}.state", vectors, initial=start))
    return StepSpec(
        BlockRecurrent(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])],
        states,
        [OutputSpec("logits", ("B", "L", config["num_tokens"]))],
    )
