"""The `transformer` of episodic-transformer-memory-ppo, written from its interface and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """A gated recurrent unit in place of a residual sum."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        for name in ("Wr", "Ur", "Wz", "Uz", "Wg", "Ug"):
            self.add_module(name, nn.Linear(width, width, bias=False))
        self.bg = nn.Parameter(torch.full((width,), float(bias)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        update = torch.sigmoid(self.Wz(y) + self.Uz(x) - self.bg)
        new = torch.tanh(self.Wg(y) + self.Ug(x * torch.sigmoid(self.Wr(y) + self.Ur(x))))
        return x + update * (new - x)


class Attention(nn.Module):
    """One query [B, 1, D] over rows [B, W, D], of which the mask [B, W] shows some."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("values", "keys", "queries"):
            self.add_module(name, nn.Linear(width, width, bias=False))
        self.fc_out = nn.Linear(width, width)

    def forward(self, rows: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            made.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for made in (self.queries(query), self.keys(rows), self.values(rows))
        )
        scores = (q @ k.mT).masked_fill(mask[:, None, None] == 0, -1e20) / rows.shape[2] ** 0.5
        return self.fc_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and one layer, with norms before or behind them or nowhere, and gates or residual sums."""

    def __init__(self, width: int, heads: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norms = config["layer_norm"]
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if self.norms == "pre":
            self.norm_kv = nn.LayerNorm(width)
        self.gated = config.get("gtrxl", False)
        if self.gated:
            self.gate1, self.gate2 = (Gate(width, config["gtrxl_bias"]) for _ in range(2))
        self.fc = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, rows: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        before = self.norms == "pre"
        found = self.attention(self.norm_kv(rows) if before else rows, self.norm1(x) if before else x, mask)
        x = self.gate1(x, found) if self.gated else x + found
        x = self.norm1(x) if self.norms == "post" else x
        found = self.fc(self.norm2(x) if before else x)
        x = self.gate2(x, found) if self.gated else x + found
        return self.norm2(x) if self.norms == "post" else x


class Positions(nn.Module):
    """Sines and cosines of the steps that are left of an episode."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freqs", 1e4 ** (-torch.arange(0, width, 2.0) / width))

    def forward(self, steps: int) -> Tensor:
        angles = torch.arange(steps - 1, -1, -1.0)[:, None] * self.inv_freqs
        return torch.cat((angles.sin(), angles.cos()), 1)


class Transformer(nn.Module):
    """x [B, n], rows [B, W, blocks, D], mask [B, W], which rows of the episode they are [B, W] → x [B, D], new row."""

    def __init__(self, config: Mapping[str, Any], input_dim: int, max_episode_steps: int) -> None:
        super().__init__()
        self.config, self.max_episode_steps = config, max_episode_steps
        self.num_blocks, self.embed_dim = config["num_blocks"], config["embed_dim"]
        self.linear_embedding = nn.Linear(input_dim, self.embed_dim)
        if config["positional_encoding"] == "relative":
            self.pos_embedding: Any = Positions(self.embed_dim)
        elif config["positional_encoding"] == "learned":
            self.pos_embedding = nn.Parameter(torch.randn(max_episode_steps, self.embed_dim))
        blocks = [Block(self.embed_dim, config["num_heads"], config) for _ in range(self.num_blocks)]
        self.transformer_blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, rows: Tensor, mask: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear_embedding(x).relu()
        kind = self.config["positional_encoding"]
        if kind in ("relative", "learned"):
            table = self.pos_embedding(self.max_episode_steps) if kind == "relative" else self.pos_embedding
            rows = rows + table[indices][:, :, None]
        inputs = []
        for number, block in enumerate(self.transformer_blocks):
            inputs.append(x)
            x = block(rows[:, :, number], x[:, None], mask)[:, 0]
        return x, torch.stack(inputs, 1)
