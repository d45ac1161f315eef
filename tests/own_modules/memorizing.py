"""Written by a user of memorizing-transformers-pytorch: the store of keys and values as tensors in place of faiss.

`weights` holds the constructor's arguments, of which `max_knn_memories` are the rows of the store, and a state dict.
"""

from __future__ import annotations

from typing import Any

import torch
from memorizing_transformers_pytorch import MemorizingTransformer
from torch import Tensor
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


class Store:
    """A store as the package calls it: keys and values [B, rows, 2, d], of which the newest `count` [B] are written."""

    def __init__(self, rows: Tensor, count: Tensor) -> None:
        self.rows, self.count, self.num_indices = rows, count, rows.shape[0]

    def search(self, queries: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, L, topk, 2, d] nearest to the queries [B, H, L, d], and which of them there are."""
        batch, rows, _, width = self.rows.shape
        scores = queries @ self.rows[:, None, :, 0].transpose(-1, -2)
        written = torch.arange(rows) < self.count[:, None]
        best, places = torch.where(written[:, None, None], scores, -1e30).topk(topk)
        found = self.rows.gather(1, places.reshape(batch, -1, 1, 1).expand(-1, -1, 2, width))
        there = best > -1e29
        return found.reshape(*places.shape, 2, width) * there[..., None, None], there

    def add(self, new: Tensor) -> None:
        """Write rows behind the newest; the oldest make room."""
        rows, many = self.rows.shape[1], new.shape[1]
        behind = (torch.arange(rows) - self.count[:, None]) % rows
        taken = new.gather(1, behind.clamp(max=many - 1)[..., None, None].expand(-1, -1, *new.shape[2:]))
        self.rows = torch.where((behind < many)[..., None, None], taken, self.rows)
        self.count = self.count + many


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The package takes a list of stores and a list of a Transformer-XL's keys and values."""
    names = [name for name in states if name.startswith("xl.")]
    stores = [Store(states[f"knn.{i:02d}.rows"], states[f"knn.{i:02d}.count"]) for i in range(model.num_memory_layers)]
    found = model(inputs["tokens"], stores, xl_memories=[states[name] for name in names])
    logits, kept = found if names else (found, [])  # with no Transformer-XL's memory the package returns logits alone
    after = dict(zip(names, kept, strict=True))
    for number, store in enumerate(stores):
        after |= {f"knn.{number:02d}.rows": store.rows, f"knn.{number:02d}.count": store.count}
    return {"logits": logits}, after


def build(weights: str) -> StepSpec:
    """The step."""
    stored = read_weights(weights)
    config, rows = stored["config"], stored["config"]["max_knn_memories"]
    model = MemorizingTransformer(**config | {"memorizing_layers": tuple(config["memorizing_layers"])})
    model.load_state_dict(stored["model"])
    width, most = config["dim_head"], config["xl_max_memories"]
    layers = range(model.num_xl_memory_layers)
    states = [StateSpec(f"xl.{layer:02d}.kv", ("B", most, 2, width), grows=1) for layer in layers]
    for number in range(model.num_memory_layers):
        states.append(StateSpec(f"knn.{number:02d}.rows", ("B", rows, 2, width)))
        states.append(StateSpec(f"knn.{number:02d}.count", ("B",), dtype="int32"))
    tokens = InputSpec("tokens", ("B", "L"), tokens=config["num_tokens"])
    return StepSpec(model, [tokens], states, [OutputSpec("logits", role="logits")], step=step)
