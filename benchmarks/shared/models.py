"""Make random weights and tokens for models of given sizes, and export bundles of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from txl_export import export
from txl_export.checkpoints.txl import TxlConfig
from txl_export.families.transformer_xl.family import weights_of_bundle
from txl_export.families.transformer_xl.weights import Weights, canonical_shapes
from txl_runtime.bundle.transformer_xl import ModelConfig
from txl_runtime.model import Model
from txl_runtime.types import Ids

from benchmarks.shared.tables import log

__all__ = [
    "TINY",
    "WT103",
    "deviation",
    "random_bundle",
    "random_state",
    "random_tokens",
    "shape",
    "weights_of",
]

WT103 = (20000, 40000, 200000)


def shape(layers: int, width: int, heads: int, head: int, inner: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Return the config of a checkpoint in this project's format, e.g. of `shape(12, 512, 8, 64, 2048, 204)`.

    Every query attends to the whole memory, unless `more` has `same_length`.

    Args:
        layers: the number of layers.
        width: d_model.
        heads: the number of heads.
        head: d_head.
        inner: d_inner.
        vocab: the size of the vocabulary.
        more: further fields of the config.
    """
    sizes = {"n_layer": layers, "d_model": width, "n_head": heads, "d_head": head, "d_inner": inner}
    rest = {"vocab_size": vocab, "d_embed": width, "embedding_scale": width**0.5, "clamp_length": 0}
    return sizes | rest | more


TINY = shape(2, 16, 2, 8, 32, 60)
"""The config of the tiny model that --quick runs."""


def random_state(values: dict[str, Any], seed: int = 0, deviation: float = 0.02) -> Weights:
    """Draw weights by name from N(0, deviation), with layer norms' weights of 1; no speed depends on the values."""
    typed = msgspec.convert(values, TxlConfig)
    config = ModelConfig(**{name: getattr(typed, name) for name in ModelConfig.__struct_fields__})
    must, _ = canonical_shapes(config)
    draws = torch.Generator().manual_seed(seed)
    state = {name: torch.empty(size).normal_(0, deviation, generator=draws) for name, size in must.items()}
    for name in state:
        if name.endswith("norm.weight"):
            state[name].fill_(1)
    return state


def weights_of(model: Model) -> Weights:
    """Return the weights of a bundle by their canonical names, in float32."""
    return weights_of_bundle(model.bundle.file(model.manifest.weights), model.manifest)


def random_tokens(vocab_size: int, size: tuple[int, ...], seed: int = 0) -> Ids:
    """Return uniformly random token ids, int32, e.g. [2, 64] for size (2, 64); each embedding row is equally likely."""
    return np.random.default_rng(seed).integers(0, vocab_size, size, dtype=np.int32)


def deviation(width: int) -> float:
    """Return the standard deviation of weights with which values neither vanish nor explode: 0.02 at d_model 512."""
    return 0.02 * math.sqrt(512 / width)


def random_bundle(
    path: Path,
    values: dict[str, Any],
    lengths: Sequence[int],
    memory_length: int,
    state: Weights | None = None,
    **more: Any,
) -> Path:
    """Export a random model to a path without verification (the self-test still runs), and return the path.

    Args:
        path: the bundle's path.
        values: the config, as `shape` returns it.
        lengths: segment lengths.
        memory_length: M.
        state: the weights; None draws random ones.
        more: further options of `export`.
    """
    log(f"export {path.name}: {values['n_layer']} layers, d_model {values['d_model']}, M {memory_length}")
    result = random_state(values, deviation=deviation(values["d_model"])) if state is None else state
    export(
        result, path, config=values, segment_length=tuple(lengths), memory_length=memory_length, verify=False, **more
    )
    return path
