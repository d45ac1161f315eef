"""Verifies a Transformer-XL's bundle: runs the proof of any step, and gives gates the names of earlier reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from msgspec import structs
from torch import Tensor
from txl_report.schema.verification import Gate
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.ladder import rung
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model
from txl_runtime.types import Ids

from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity.oracle import Oracle
from txl_export.families.transformer_xl.weights import layer_name
from txl_export.proof.comparing import MEMORY
from txl_export.proof.gates import OUTPUTS, STATES
from txl_export.proof.parity import Parity
from txl_export.proof.verification import verify_model

NAMES: Mapping[str, str] = {
    OUTPUTS: "log-probs max abs",
    STATES: f"{MEMORY} max abs (relative)",
    "drift of logprobs": "drift (late mean abs)",
    "state RMS error (of the standard deviation)": f"{MEMORY} RMS error (of the standard deviation)",
}
ADVICE = "see the table, and report the checkpoint's family and config"


def verify_models(
    manifest: Manifest,
    openers: Sequence[Callable[[], Model]],
    reference: PaperModel,
    source: str,
    text: Ids | None = None,
    segments: int | None = None,
    listener: Listener | None = None,
    stand_in_for: str | None = None,
) -> Parity:
    """Run the chains and the text, and judge the results by the parity ladder.

    For example, `text` is int32 [100000].

    Args:
        manifest: the bundle's manifest.
        openers: functions that load the bundle, one per update rule. The first loads what users get, and only this
            model runs the long chains and the text.
        reference: the model that the bundle should equal.
        source: the reference's origin, for the report.
        text: token ids [T] of real text. Without text, tokens are random, and only float32 is judged by its
            distribution.
        segments: the number of segments of the longest chain; None for enough to replace the whole memory.
        listener: receives progress and warnings.
        stand_in_for: the precision that a float32 copy emulates; None for the bundle's own graphs.
    """
    listener, tokens = listener or Silent(), manifest.tokens
    assert tokens is not None, "a Transformer-XL reads tokens"
    first, *others = openers
    oracle = Oracle(reference, manifest.transformer_xl.memory)
    samples = None if text is None else {tokens.name: text[None]}
    parity = verify_model(
        first, oracle, source, samples, segments, listener, stand_in_for, others=others, text=text, advice=ADVICE
    )
    gates = tuple(structs.replace(gate, name=NAMES.get(gate.name, gate.name)) for gate in parity.gates)
    more = _features(manifest, first, reference, parity.precision)
    return replace(parity, gates=(*gates, *more))


def _features(manifest: Manifest, open_model: Callable[[], Model], reference: PaperModel, precision: str) -> list[Gate]:
    """Judge the last feed-forward layer's input until memory is full; return [] if the bundle does not return it."""
    width, output = manifest.config.d_model, manifest.logprobs
    if output is None or output.width != 2 * width:
        return []
    model, length = open_model(), manifest.segment_lengths[0]
    if all(program.kind != "hidden" for program in model.backend.programs):
        return []
    count = length * (2 + -(-manifest.memory_length // length))
    ids = np.random.default_rng(0).integers(manifest.vocab_size, size=(1, count)).astype(np.int32)
    features = model.stream(1).features(ids)[..., width:]
    entered, memory = list[Tensor](), reference.initial_memory()
    name = f"{layer_name(manifest.config.n_layer - 1)}.feed_forward.inner"
    reference.watch = lambda matrix, rows: entered.append(rows) if matrix == name else None
    for first in range(0, count, length):
        _, memory = reference.hidden(torch.from_numpy(ids[:, first : first + length]), memory)
    reference.watch = None
    expected = torch.cat(entered, dim=1).double().numpy()
    limits, errors = rung(precision, model.backend.name), features - expected
    if limits.logprobs is not None:
        value = float(np.abs(errors).max() / max(1.0, np.abs(expected).max()))
        return [Gate("features max abs (relative)", value, limits.logprobs, value <= limits.logprobs)]
    value, limit = float(np.sqrt(np.square(errors).mean()) / expected.std()), limits.deviation or 0.0
    judged = None if limits.deviation is None else value <= limit
    return [Gate("features RMS error (of the standard deviation)", value, limit, judged)]
