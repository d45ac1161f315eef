"""Where a Transformer-XL looks, computed plainly: NumPy, float64, one sequence, the formulas of the paper's appendix.

Nothing here is the exporter's: only the names of the weights are, and what a dialect's fields mean. Distances come
about as in the paper, by shifting a matrix of scores by distance, and not by looking each of them up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def sinusoids(distances: NDArray[np.int64], width: int) -> Values:
    """[n, width]; angles in float32, as every original has them."""
    frequencies = (1 / 10000 ** (np.arange(0, width, 2, np.float32) / np.float32(width))).astype(np.float32)
    angles = distances.astype(np.float32)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], -1).astype(np.float64)


def shifted(scores: Values) -> Values:
    """[H, T, K]: from column j for distance K - 1 - j, whatever the row, to column j for key j; row i by T - 1 - i."""
    heads, queries, keys = scores.shape
    padded = np.concatenate([np.zeros((heads, queries, 1)), scores], -1)
    return padded.reshape(heads, keys + 1, queries)[:, 1:].reshape(heads, queries, keys)


class PlainModel:
    """One sequence of a model.

    Args:
        weights: canonical, by name.
        config, dialect: what the manifest says.
        memory_length: M.
    """

    def __init__(self, weights: Mapping[str, Any], config: Any, dialect: Any, memory_length: int) -> None:
        self.w = {name: np.asarray(tensor, np.float64) for name, tensor in weights.items()}
        self.config, self.dialect, self.most = config, dialect, memory_length
        rows = memory_length if dialect.memory_start == "zeros" else 0
        self.memory = [np.zeros((rows, config.d_model)) for _ in range(config.n_layer)]

    def step(self, tokens: NDArray[Any]) -> Values:
        """One segment [T]: probabilities [layers, H, T, rows + T]. The memory goes on."""
        hidden, looks = self.embed(tokens), []
        for i in range(self.config.n_layer):
            before = self.memory[i]
            hidden, before = self.with_positions(i, hidden, before)
            self.memory[i] = np.concatenate([before, hidden])[-self.most :] if self.most else before[:0]
            hidden, look = self.layer(f"layers.{i:02d}", i, hidden, before)
            looks.append(look)
        return np.stack(looks)

    def embed(self, tokens: NDArray[Any]) -> Values:
        rows = np.zeros((len(tokens), self.config.d_model))
        edges = [0, *self.config.cutoffs, self.config.vocab_size] if self.config.div_val > 1 else [0, 10**9]
        for c in range(len(edges) - 1):
            inside = (tokens >= edges[c]) & (tokens < edges[c + 1])
            found = self.w[f"embedding.tables.{c}"][tokens[inside] - edges[c]]
            project = self.w.get(f"embedding.projections.{c}")
            rows[inside] = found if project is None else found @ project.T
        return rows * self.config.embedding_scale

    def with_positions(self, i: int, hidden: Values, before: Values) -> tuple[Values, Values]:
        """Absolute positions, counted from the newest row, on memory and segment."""
        kind, rows = self.config.attn_type, len(before) + len(hidden)
        if kind < 2 or (kind == 2 and i):
            return hidden, before
        distances = np.arange(rows)[::-1]
        if kind == 3:
            table = self.w[f"layers.{i:02d}.positions"]
            added = table[np.minimum(distances, len(table) - 1)]
        else:
            clamp = self.dialect.clamp_length
            added = sinusoids(np.minimum(distances, rows if clamp is None else clamp), self.config.d_model)
        return hidden + added[len(before) :], before + added[: len(before)]

    def layer(self, name: str, i: int, hidden: Values, before: Values) -> tuple[Values, Values]:
        pre, absolute = self.config.pre_lnorm, self.config.attn_type > 1
        context = np.concatenate([before, hidden])
        if pre:
            context = self.norm(f"{name}.attention.norm", context)
        asking = hidden if pre and absolute else context[len(before) :]
        attended, look = self.attend(f"{name}.attention", asking, context)
        hidden = hidden + attended
        inner = hidden = hidden if pre else self.norm(f"{name}.attention.norm", hidden)
        if pre:
            inner = self.norm(f"{name}.feed_forward.norm", hidden)
        inner = ACTIVATIONS[self.config.activation](self.linear(f"{name}.feed_forward.inner", inner))
        hidden = hidden + self.linear(f"{name}.feed_forward.outer", inner)
        return hidden if pre else self.norm(f"{name}.feed_forward.norm", hidden), look

    def attend(self, name: str, asking: Values, context: Values) -> tuple[Values, Values]:
        (queries, keys), width = (len(asking), len(context)), self.config.d_head
        q, k, v = (
            self.linear(f"{name}.{part}", rows).reshape(len(rows), -1, width).transpose(1, 0, 2)
            for part, rows in (("query", asking), ("key", context), ("value", context))
        )  # [H, rows, d]
        u = self.w[f"{name}.content_bias"][:, None] if self.config.attn_type < 2 else 0.0
        scores = (q + u) @ k.transpose(0, 2, 1)
        if self.config.attn_type < 2:
            scores = scores + shifted(self.by_distance(name, q, np.arange(keys)[::-1]))
        behind = (keys - queries + np.arange(queries))[:, None] - np.arange(keys)[None]
        window = queries if self.dialect.segment_window and queries > 1 else self.dialect.window
        seen = (behind >= 0) & (behind < (keys if window is None else window))
        weights = np.where(seen, np.exp(np.where(seen, scores / math.sqrt(width), -np.inf)), 0)
        look = weights / weights.sum(-1, keepdims=True)
        mixed = (look @ v).transpose(1, 0, 2).reshape(queries, -1)
        return self.linear(f"{name}.output", mixed), look

    def by_distance(self, name: str, q: Values, distances: NDArray[np.int64]) -> Values:
        """[H, T, n]: what each query scores for each distance by itself."""
        clamp = self.dialect.clamp_length
        if self.config.attn_type == 1:
            keys, biases = self.w[f"{name}.distance.keys"], self.w[f"{name}.distance.biases"]
            last = len(keys) if clamp is None else min(clamp, len(keys))
            rows = np.minimum(distances, last - 1)
            return q @ keys[rows].transpose(1, 2, 0) + biases[rows].T[:, None]
        table = sinusoids(distances if clamp is None else np.minimum(distances, clamp), self.config.d_model)
        relative = self.linear(f"{name}.position", table).reshape(len(table), -1, self.config.d_head)
        return (q + self.w[f"{name}.position_bias"][:, None]) @ relative.transpose(1, 2, 0)

    def linear(self, name: str, x: Values) -> Values:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: Values) -> Values:
        spread = np.sqrt(
            ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True) + self.config.layer_norm_epsilon
        )
        return (x - x.mean(-1, keepdims=True)) / spread * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]
