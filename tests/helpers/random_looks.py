"""Random models that are looked at along random operations, beside a plain computation of the paper's formulas.

A seed draws an architecture, a dialect, M and L; then streams of the exported bundle are stepped, fed, reset, put in
another order, restored and handed rows of one another, and looked at in between.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import txl_export
import txl_runtime
from plain_attention import PlainModel
from support import random_state
from torch import Tensor
from txl_export.families.transformer_xl import family
from txl_export.families.transformer_xl.settings import resolve
from txl_runtime import Stream

LIMIT = 1e-5
OPERATIONS = ("reset", "select", "keep", "restore", "put")


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The config of a model, options of its export, and fields of its dialect that no option sets."""
    draws = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[int(draws.integers(len(values)))]

    kind, width, memory = one(0, 0, 0, 1, 2, 3), int(one(6, 8, 12, 16)), int(one(0, 1, 2, 3, 5, 7, 11, 16))
    config: dict[str, Any] = {
        "vocab_size": int(one(5, 23, 60)),
        "n_layer": int(one(1, 2, 2, 3)),
        "n_head": int(one(1, 2, 3)),
        "d_model": width,
        "d_head": int(one(3, 4, 5, 8)),
        "d_inner": 10,
        "d_embed": width,
        "embedding_scale": float(one(1.0, 2.0, width**0.5)),
        "attn_type": kind,
        "position_rows": {1: int(one(1, 3, 9, 40)), 3: int(one(7, 9, 40))}.get(kind, 0),
        "pre_lnorm": bool(one(False, True)),
        "final_norm": bool(one(False, True)),
        "attention_bias": bool(one(False, True)),
        "activation": one("relu", "gelu", "gelu_tanh"),
        "memory_start": one("empty", "zeros"),
        "memory_length": memory,
        "clamp_length": None if kind == 3 else one(None, 2, 6),
    }
    if config["vocab_size"] == 60 and one(False, True):
        config |= {"cutoffs": (20, 40), "div_val": 2, "d_embed": 8}
    form = one("hidden", "kv") if kind < 2 and memory else "hidden"
    longest, window = int(one(1, 2, 4, 7)), one(None, "memory", "one more", "segment")
    dialect: dict[str, Any] = {"window": None, "segment_window": window == "segment"}
    if window in ("memory", "one more") and memory:
        dialect["window"] = memory + (window == "one more")
    options: dict[str, Any] = {"segment_length": (longest,), "memory": form, "batch_size": int(one(1, 2, 3))}
    return config, options, dialect


def export(seed: int, place: Path, monkeypatch: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Write the bundle that a seed draws; its weights, and where its random operations begin."""
    config, options, dialect = drawn(seed)
    state = random_state(config, seed)

    def of_dialect(*given: Any) -> Any:
        found, *rest = resolve(*given)
        return msgspec.structs.replace(found, **dialect), *rest

    monkeypatch.setattr(family, "resolve", of_dialect)
    txl_export.export(state, place, config=config, verify=False, attention=True, **options)
    return state, config


class Beside:
    """A stream of a bundle and a plain model for each of its sequences.

    Args:
        model: the bundle, opened.
        state: its canonical weights.
        seed: of the operations.
    """

    def __init__(self, model: txl_runtime.Model, state: dict[str, Tensor], seed: int) -> None:
        manifest = self.manifest = model.manifest
        self.draws = np.random.default_rng([seed, 1])
        self.most = manifest.memory_length
        if self.draws.random() < 0.4:
            self.most = int(self.draws.integers(0, self.most + 1))
        b = int(self.draws.integers(1, model.batch_size + 1))
        limit = None if self.most == manifest.memory_length else self.most
        self.stream, self.other = (model.stream(b, memory_length=limit) for _ in range(2))
        weights = {name: tensor.numpy() for name, tensor in state.items()}
        self.fresh = PlainModel(weights, manifest.config, manifest.dialect, self.most)
        self.plain = [copy.deepcopy(self.fresh) for _ in range(b)]
        self.beside = [copy.deepcopy(self.fresh) for _ in range(b)]
        self.kept: tuple[Any, list[PlainModel]] | None = None
        self.worst, self.looks, self.operations = 0.0, 0, 0

    def run(self, rounds: int) -> None:
        """So many looks, with operations between them."""
        for _ in range(rounds):
            for stream, plain in ((self.stream, self.plain), (self.other, self.beside)):
                tokens, counts = self.segment(self.manifest.segment_lengths[0])
                self.compare(stream, plain, tokens, counts)
                if self.draws.random() < 0.3:  # several segments, cut as `feed` cuts them
                    tokens, counts = self.segment(3 * self.manifest.segment_lengths[0])
                self.feed(stream, plain, tokens, counts)
            if self.draws.random() < 0.6:
                self.change(OPERATIONS[int(self.draws.integers(len(OPERATIONS)))])

    def segment(self, most: int) -> tuple[Any, Any]:
        """Tokens and lengths, some of them 0."""
        b, width = len(self.plain), int(self.draws.integers(1, most + 1))
        counts = np.full(b, width) if self.draws.random() < 0.5 else self.draws.integers(0, width + 1, b)
        return self.draws.integers(0, self.manifest.vocab_size, (b, width)).astype(np.int32), counts.astype(np.int32)

    def compare(self, stream: Stream, plain: list[PlainModel], tokens: Any, counts: Any) -> None:
        """One look against the formulas; what is not seen is 0, and what is seen sums to 1."""
        found, memory_length = stream.attention(tokens, counts), self.manifest.memory_length
        assert found.shape[1:] == (len(plain), found.shape[2], tokens.shape[1], memory_length + tokens.shape[1])
        for row, (model, count) in enumerate(zip(plain, counts.tolist(), strict=True)):
            own = found[:, row].copy()
            if count:
                expected = copy.deepcopy(model).step(tokens[row, :count])
                rows = expected.shape[-1] - count
                seen = own[:, :, :count, memory_length - rows : memory_length + count]
                self.worst = max(self.worst, float(np.abs(seen - expected).max()))
                assert np.abs(seen.sum(-1, dtype=np.float64) - 1).max() <= LIMIT / 10
                assert not seen[expected == 0].any(), "hidden by a window or still to come"
                seen[:] = 0
            assert not own.any(), "slots without a row, and positions that do not count"
        self.looks += 1

    def feed(self, stream: Stream, plain: list[PlainModel], tokens: Any, counts: Any) -> None:
        """The memory goes on, in the runtime and beside it."""
        length = self.manifest.segment_lengths[0]
        stream.feed(tokens, counts)
        for model, row, count in zip(plain, tokens, counts.tolist(), strict=True):
            for first in range(0, count, length):
                model.step(row[first : min(count, first + length)])

    def change(self, what: str) -> None:
        """One operation on the first stream, and the same on the models beside it."""
        b, draws = len(self.plain), self.draws
        self.operations += 1
        if what == "reset":
            rows = np.flatnonzero(draws.random(b) < 0.5)
            self.stream.reset(rows)
            for row in rows:
                self.plain[row] = copy.deepcopy(self.fresh)
        elif what == "select":
            rows = draws.integers(0, b, b)
            self.stream.select(rows)
            self.plain = [copy.deepcopy(self.plain[row]) for row in rows]
        elif what == "keep":
            self.kept = self.stream.snapshot(), copy.deepcopy(self.plain)
        elif what == "restore" and self.kept is not None:
            self.stream.restore(self.kept[0])
            self.plain = copy.deepcopy(self.kept[1])
        elif what == "put":
            to, source = draws.integers(0, b, 2)
            self.stream.put(int(to), self.other.take(int(source)))
            self.plain[to] = copy.deepcopy(self.beside[source])
