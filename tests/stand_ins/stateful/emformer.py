"""Emformer, a segment of frames with look-ahead a step: keys and values of the past, and a bank of summaries.

What is filled of the past is a mask over all slots for each sequence, in place of slices by the first one's counter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, attend, join_heads, split_heads


class Emformer(Loaded):
    """features [B, L + R, D]; memory, left_key, left_value, past_length of each layer → encoded [B, L, D], the same."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.heads = config["num_layers"], config["num_heads"]
        self.segment, self.ahead = config["segment_length"], config["right_context_length"]

    def forward(self, features: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        x, ahead = features[:, : self.segment], features[:, self.segment :]
        summary = x.mean(1, keepdim=True)
        kept: list[Tensor] = []
        for layer in range(self.depth):
            x, ahead, summary, new = self._layer(f"emformer_layers.{layer}", x, ahead, summary, states[4 * layer :][:4])
            kept += new
        return x, *kept

    def _layer(
        self, name: str, x: Tensor, ahead: Tensor, summary: Tensor, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        (memory, left_key, left_value), past = (state.transpose(0, 1) for state in states[:3]), states[3]
        own = torch.cat((ahead, x), 1)
        normed = self.normed(own, f"{name}.layer_norm_input")
        pooled = normed[:, self.ahead :].mean(1, keepdim=True)
        q = self.linear(torch.cat((normed, pooled), 1), f"{name}.attention.emb_to_query")
        k, v = self.linear(torch.cat((memory, normed), 1), f"{name}.attention.emb_to_key_value").chunk(2, -1)
        split = (memory.shape[1], self.ahead, self.segment)
        (k_memory, k_ahead, k_new), (v_memory, v_ahead, v_new) = k.split(split, 1), v.split(split, 1)
        keys = torch.cat((k_memory, k_ahead, left_key, k_new), 1)
        values = torch.cat((v_memory, v_ahead, left_value, v_new), 1)
        q, keys, values = (split_heads(part, self.heads) for part in (q, keys, values))
        visible = self._visible(past[0].long(), memory.shape[1], left_key.shape[1], q.shape[2])
        found = join_heads(attend(q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5, values, visible))
        found = self.linear(found, f"{name}.attention.out_proj")
        next_summary = found[:, -1:].clamp(-10, 10)
        y = own + found[:, :-1]
        wide = self.linear(
            F.relu(self.linear(self.normed(y, f"{name}.pos_ff.0"), f"{name}.pos_ff.1")), f"{name}.pos_ff.4"
        )
        y = self.normed(y + wide, f"{name}.layer_norm_output")
        new = [
            torch.cat((old, row), 1)[:, row.shape[1] :].transpose(0, 1)
            for old, row in ((memory, summary), (left_key, k_new), (left_value, v_new))
        ]
        return y[:, self.ahead :], y[:, : self.ahead], next_summary, [*new, past + self.segment]

    def _visible(self, past: Tensor, bank: int, left: int, queries: int) -> Tensor:
        """Filled slots of each sequence, [B, 1, queries, keys]; the summary's query does not see the bank."""
        slots = torch.arange(bank, device=past.device) >= bank - (past[:, None] + self.segment - 1) // self.segment
        ordinary = torch.arange(queries, device=past.device) < queries - 1
        in_bank = slots[:, None] & ordinary[:, None]
        in_left = torch.arange(left, device=past.device) >= left - past[:, None]
        new = torch.ones_like(in_bank[..., :1])
        rows = [in_bank, new.expand(-1, -1, self.ahead), in_left[:, None].expand(-1, queries, -1)]
        return torch.cat((*rows, new.expand(-1, -1, self.segment)), -1)[:, None]


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case em01."""
    width = config["input_dim"]
    states = []
    for layer in range(config["num_layers"]):
        name = f"layers.{layer:02d}"
        states.append(StateSpec(f"{name}.memory", (config["max_memory_size"], "B", width)))
        for part in ("left_key", "left_value"):
            states.append(StateSpec(f"{name}.{part}", (config["left_context_length"], "B", width)))
        states.append(StateSpec(f"{name}.past_length", (1, "B"), dtype="int32", initial=0))
    return StepSpec(
        Emformer(weights, config).eval(),
        [InputSpec("features", ("B", "L", width), lookahead=config["right_context_length"])],
        states,
        [OutputSpec("encoded", ("B", "L", width))],
    )
