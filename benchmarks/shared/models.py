"""Random models of published shapes, and their bundles."""

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
    """Return the config of a checkpoint in this project's form; without `same_length`, attention sees the whole
    memory.
    """
    sizes = {"n_layer": layers, "d_model": width, "n_head": heads, "d_head": head, "d_inner": inner}
    rest = {"vocab_size": vocab, "d_embed": width, "embedding_scale": width**0.5, "clamp_length": 0}
    return sizes | rest | more


TINY = shape(2, 16, 2, 8, 32, 60)
"""The model that --quick runs instead of a real one."""


def random_state(values: dict[str, Any], seed: int = 0, deviation: float = 0.02) -> Weights:
    """Draw weights of N(0, deviation), with layer norms of ones: speed and memory do not depend on the values."""
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
    """Return the canonical parameters of a bundle, float32."""
    return weights_of_bundle(model.bundle.file(model.manifest.weights), model.manifest)


def random_tokens(vocab_size: int, size: tuple[int, ...], seed: int = 0) -> Ids:
    """Return uniformly random token ids, so that each row of an embedding is equally likely to be read: [2, 64] for
    size (2, 64).
    """
    return np.random.default_rng(seed).integers(0, vocab_size, size, dtype=np.int32)


def deviation(width: int) -> float:
    """Return a spread of weights with which values neither vanish nor explode: 0.02 at d_model 512, more for less."""
    return 0.02 * math.sqrt(512 / width)


def random_bundle(
    path: Path,
    values: dict[str, Any],
    lengths: Sequence[int],
    memory_length: int,
    state: Weights | None = None,
    **more: Any,
) -> Path:
    """Export a random model without verification (its self-test still runs); `export` gets the other arguments."""
    log(f"export {path.name}: {values['n_layer']} layers, d_model {values['d_model']}, M {memory_length}")
    result = random_state(values, deviation=deviation(values["d_model"])) if state is None else state
    export(
        result, path, config=values, segment_length=tuple(lengths), memory_length=memory_length, verify=False, **more
    )
    return path
