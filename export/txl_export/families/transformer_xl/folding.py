"""Folds the canonical parameters into parameters of graphs, so that graphs repeat no constant arithmetic.

1/sqrt(d_head) is multiplied into W_q, u and v. W_q, W_k and W_v become one matrix. W_r·R becomes one table per layer.
`network` computes that table, because its rows depend on the distances that a program distinguishes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from txl_runtime.bundle.transformer_xl import ModelConfig
from txl_runtime.errors import UsageError

from txl_export.families.transformer_xl.weights import Weights

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""torch's dtype for each precision of 16 bits."""

TRANSPOSED = (".attention.output.weight", ".feed_forward.inner.weight", ".feed_forward.outer.weight")
QUANTISABLE = (".attention.query_key_value.weight", *TRANSPOSED)
"""Ends of the names of the matrices that int8 and int4 quantise, all in the layers. Embedding, softmax, norms, tables
of relative positions, attention and memory stay float32."""

# These biases are added to queries or to scores, so they are scaled by 1/sqrt(d_head) like the queries.
SCALED = ("content_bias", "position_bias", "distance.biases")


def fold(config: ModelConfig, weights: Mapping[str, Tensor]) -> Weights:
    """Return the parameters that graphs compute with, except tables of relative positions.

    Matrices are transposed to [in, out], because graphs compute x @ W. `query_key_value` [D, 3·H·d_head] holds W_q, W_k
    and W_v side by side; 1/sqrt(d_head) is multiplied into W_q.
    """
    scale = config.d_head**-0.5
    folded: Weights = {}
    for name, tensor in weights.items():
        if ".attention.query." in name:
            parts = [tensor * scale, weights[name.replace("query", "key")], weights[name.replace("query", "value")]]
            joined = torch.cat(parts)
            folded[name.replace("query", "query_key_value")] = joined.T.contiguous() if joined.dim() == 2 else joined
        elif ".attention.key." in name or ".attention.value." in name:
            continue
        elif name.endswith(SCALED):
            folded[name] = tensor * scale
        elif name.endswith(TRANSPOSED):
            folded[name] = tensor.T.contiguous()
        else:
            folded[name] = tensor
    return folded


def to_precision(tensors: Mapping[str, Tensor], precision: str, keep: tuple[str, ...] = ()) -> Weights:
    """Return parameters in the dtype of a precision's graphs, except parameters whose names contain an entry of `keep`.

    Raises:
        UsageError: a value is too large for the dtype.

    Example:
        >>> found = to_precision({"weight": torch.ones(2), "norm": torch.ones(2)}, "fp16", keep=("norm",))
        >>> [tensor.dtype for tensor in found.values()]
        [torch.float16, torch.float32]
    """
    half = HALF.get(precision)
    if half is None:
        return dict(tensors)
    chosen = {
        name: tensor if not tensor.is_floating_point() or any(part in name for part in keep) else tensor.to(half)
        for name, tensor in tensors.items()
    }
    for name, tensor in chosen.items():
        if tensor.dtype == half and bool(tensor.isinf().any()):
            largest = float(tensors[name].abs().max())
            raise UsageError(
                f"{name} holds {largest:.4g}, expected at most {torch.finfo(half).max:.4g} for {precision}; "
                "give --precision bf16 or fp32"
            )
    return chosen


def tied_rows(config: ModelConfig, folded: Mapping[str, Tensor]) -> dict[str, tuple[str, int, int]]:
    """Return the softmax tables that are rows of the embedding's table, e.g. {"softmax.tables.1": (table, 100, 500)}.

    A graph reads each such table as a parameter of its own, because an engine would store a copy of a slice. The weight
    file stores the table as a range of bytes inside the embedding's table.
    """
    if config.div_val > 1 or len(config.clusters) == 1:
        return {}
    named = ((f"softmax.tables.{c}", rows) for c, rows in enumerate(config.clusters))
    return {name: ("embedding.tables.0", *rows) for name, rows in named if name not in folded}


def unfold(config: ModelConfig, folded: Mapping[str, Tensor]) -> Weights:
    """Return canonical parameters from folded parameters: the inverse of `fold`, exact up to one rounding of the scale.

    For example, "…query_key_value.weight" [32, 96] becomes three matrices [32, 32].
    """
    scale = config.d_head**-0.5
    weights: Weights = {}
    for name, tensor in folded.items():
        if ".attention.query_key_value." in name:
            query, key, value = (tensor.T if tensor.dim() == 2 else tensor).chunk(3)
            parts = {"query": query / scale, "key": key, "value": value}
            weights |= {name.replace("query_key_value", part): rows.contiguous() for part, rows in parts.items()}
        elif name.endswith(SCALED):
            weights[name] = tensor / scale
        elif name.endswith(TRANSPOSED):
            weights[name] = tensor.T.contiguous()
        else:
            weights[name] = tensor
    return weights
