"""A Memorizing Transformer: one layer also attends to the nearest of the rows that have left its memory.

The store has a fixed number of rows, all of which are searched. When it is full the oldest row makes room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

from stand_ins.stateful.weights import Config, Loaded, distances, join_heads, newest, split_heads

ROWS = 32
"""The store's rows, if the configuration does not say `max_knn_memories`."""
HIDDEN = -1e30


class Memorizing(Loaded):
    """tokens [B, L], xl [B, 0…M, 2, d] of each layer, rows [B, R, 2, d] and count [B] of each store → logits, all."""

    def __init__(self, weights: Mapping[str, Tensor], config: Config) -> None:
        super().__init__(weights)
        self.depth, self.heads, self.nearest = config["depth"], config["heads"], config["num_retrieved_memories"]
        self.most, self.searching = config["xl_max_memories"], tuple(config["memorizing_layers"])

    def forward(self, tokens: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """One segment."""
        x = self.tensor("token_emb.weight")[tokens]
        kept, stores = [], list(states[self.depth :])
        for layer in range(self.depth):
            name = f"layers.{layer}.0"
            number = self.searching.index(layer + 1) if layer + 1 in self.searching else None
            store = None if number is None else (stores[2 * number], stores[2 * number + 1])
            y, rows = self._attended(self.normed(x, f"{name}.norm"), f"{name}.fn", states[layer], store)
            if number is not None:
                stores[2 * number : 2 * number + 2] = _written(*store, rows[:, : -self.most])  # type: ignore[misc]
            kept.append(newest(rows, 1, self.most))
            x = x + y
            name = f"layers.{layer}.1"
            wide = F.gelu(self.linear(self.normed(x, f"{name}.norm"), f"{name}.fn.net.0"))
            x = x + self.linear(wide, f"{name}.fn.net.3")
        return self.linear(self.normed(x, "to_logits.0"), "to_logits.1"), *kept, *stores

    def _attended(
        self, x: Tensor, name: str, memory: Tensor, store: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the result of attention, and the keys and values of memory and segment [B, K, 2, d]."""
        q = split_heads(self.linear(x, f"{name}.to_q"), self.heads)
        k, v = self.linear(x, f"{name}.to_kv").chunk(2, -1)
        if store is not None:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scale = q.shape[-1] ** -0.5 if store is None else self.tensor(f"{name}.scale").exp()
        rows = torch.cat((memory, torch.stack((k, v), 2)), 1)
        k, v = (rows[:, None, :, part] for part in (0, 1))
        behind = distances(q.shape[2], k.shape[2], x.device)
        scores = q @ k.transpose(-1, -2) * scale + self._bias(behind, memory.shape[1], store is not None)
        scores = torch.where(behind >= 0, scores, torch.full_like(scores, HIDDEN))
        if store is None:
            return self.linear(join_heads(scores.softmax(-1) @ v), f"{name}.to_out"), rows
        near, values = self._searched(q, *store)
        shares = torch.cat((near * scale, scores), -1).softmax(-1)
        far = (shares[..., None, : self.nearest] @ values)[..., 0, :]
        return self.linear(join_heads(far + shares[..., self.nearest :] @ v), f"{name}.to_out"), rows

    def _bias(self, behind: Tensor, memory: int, searching: bool) -> Tensor:
        """The package numbers queries from 0 and keys from 0: so the memory's rows count as not behind at all."""
        prefix = "knn_rel_pos_bias" if searching else "rel_pos_bias"
        table = self.tensor(f"{prefix}.relative_attention_bias.weight")
        behind, exact = (behind - memory).clamp(min=0), table.shape[0] // 2
        far = torch.log(behind.clamp(min=1).to(table.dtype) / exact) / math.log(128 / exact) * exact
        bucket = torch.where(behind < exact, behind, (exact + far).long().clamp(max=table.shape[0] - 1))
        width: int = self.tensor("layers.0.0.fn.to_kv.weight").shape[0] // 2
        return table[bucket].permute(2, 0, 1) * width**0.5

    def _searched(self, q: Tensor, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Products with the nearest keys [B, H, L, k], and their values [B, H, L, k, d]; 0 where there are too few."""
        written = torch.arange(rows.shape[1], device=q.device) < count[:, None]
        products = q @ rows[:, None, :, 0].transpose(-1, -2)
        near, places = torch.where(written[:, None, None], products, HIDDEN).topk(self.nearest)
        index = places.reshape(places.shape[0], -1, 1).expand(-1, -1, rows.shape[-1])
        values = rows[:, :, 1].gather(1, index).reshape(*places.shape, -1)
        return near, torch.where(near[..., None] > HIDDEN / 2, values, 0.0)


def _written(rows: Tensor, count: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The store with new rows behind the newest, and how many were written in all."""
    if new.shape[1] == 0:
        return rows, count
    place = (torch.arange(rows.shape[1], device=rows.device) - count[:, None]) % rows.shape[1]
    index = place.clamp(max=new.shape[1] - 1)[..., None, None].expand(-1, -1, *rows.shape[2:])
    return torch.where((place < new.shape[1])[..., None, None], new.gather(1, index), rows), count + new.shape[1]


def build(weights: Mapping[str, Tensor], config: Config) -> StepSpec:
    """The step of case mt01."""
    width, states = config["dim_head"], []
    for layer in range(config["depth"]):
        states.append(StateSpec(f"xl.{layer:02d}.kv", ("B", config["xl_max_memories"], 2, width), grows=1))
    for number in range(len(config["memorizing_layers"])):
        states.append(StateSpec(f"knn.{number:02d}.rows", ("B", config.get("max_knn_memories", ROWS), 2, width)))
        states.append(StateSpec(f"knn.{number:02d}.count", ("B",), dtype="int32"))
    return StepSpec(
        Memorizing(weights, config).eval(),
        [InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])],
        states,
        [OutputSpec("logits", ("B", "L", config["num_tokens"]))],
    )
