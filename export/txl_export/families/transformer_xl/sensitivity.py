"""Measures how sensitive layers are to quantisation: runs the reference with one layer quantised at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from txl_runtime.listener import Listener
from txl_runtime.types import Ids

from txl_export.families.transformer_xl.folding import unfold
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.weights import Weights, layer_name
from txl_export.graphs.quantising import codes_in, dequantise

SEGMENTS = 4


def layer_sensitivity(
    make: Callable[[Weights], PaperModel],
    weights: Weights,
    parts: Mapping[str, Tensor],
    tokens: Ids,
    length: int,
    listener: Listener,
) -> dict[str, float]:
    """Return the mean KL divergence, in nats, that quantising one layer's weights causes, e.g. {"layers.00": 0.002}.

    Tokens are e.g. int32 [10000], in segments of `length` 64.

    Args:
        make: makes a reference from weights.
        weights: the canonical parameters.
        parts: the graphs' parameters; quantised matrices are stored as codes (integers) and scales.
        tokens: int [T]; the first 4 segments of `length` tokens are run.
    """
    reference = make(weights)
    segments = [torch.from_numpy(tokens[None, i * length : (i + 1) * length]) for i in range(SEGMENTS)]
    segments = [segment for segment in segments if segment.shape[1]]
    layers = [layer_name(i) for i in range(reference.config.n_layer)]
    listener.stage("sensitivity of the layers", len(layers))
    truth = _logprobs(reference, segments)
    divergences: dict[str, float] = {}
    for layer in layers:
        mine = {name: tensor for name, tensor in parts.items() if name.startswith(f"{layer}.")}
        if any(codes_in(mine)):
            changed = weights | unfold(reference.config, dequantise(mine))
            other = _logprobs(make({name: changed[name] for name in weights}), segments)
            divergences[layer] = float((truth.exp() * (truth - other)).sum(dim=-1).mean())
        listener.advance()
    return divergences


def _logprobs(reference: PaperModel, segments: list[Tensor]) -> Tensor:
    """Run segments in a chain; return log-probabilities, float64 [T, V]."""
    memory, rows = reference.initial_memory(1), []
    for segment in segments:
        logprobs, memory = reference(segment, memory)
        rows.append(logprobs[0].double())
    return torch.cat(rows)
