"""Inputs far from the usual ones: very large, all zero, and whole numbers beyond 0 and 1.

A module may do something else there than what the chains show, and a graph may have lost it. Rounding of such inputs is
large as well, so each segment begins with the module's state, is compared with the module in the bundle's own float32,
and only where that is close to float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.ladder import COMPARABLE
from txl_runtime.model import Model
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Array, Arrays

from txl_export.parity.steps.chains import live_sequences
from txl_export.parity.steps.inputs import InputSource
from txl_export.parity.steps.truth import Reference, ReferenceStreams, States

FACTOR, NUMBERS = 100, 8
"""What usual inputs are multiplied by, and how many whole numbers are tried from 0 on."""
TIMES = 3
"""Large inputs and zeros come so many times, each after a segment as usual."""


def far_inputs(model: Model, reference: Reference) -> float | None:
    """The largest difference in such segments, see `relative_difference`; None where a step reads nothing but tokens.

    Inputs that the module itself refuses are left out.
    """
    manifest = model.manifest
    if not any(entry.role == "feature" and entry.dtype != "bool" for entry in manifest.inputs):
        return None
    count = manifest.batch_size if manifest.streams == "lockstep" else live_sequences(manifest)
    source = InputSource(manifest, None, np.random.default_rng(13))
    single = reference.in_single()
    truth = ReferenceStreams(manifest, reference if single is None else single, count)
    exact = ReferenceStreams(manifest, reference, count)
    stream, worst = model.stream(count), 0.0
    length = model.segment_lengths[0]
    counts = np.full(count, length, np.int32)
    draws = np.random.default_rng(17)
    for factor in (1, FACTOR, 1, 0) * TIMES:
        usual = source.take(count, length)
        for inputs in _tried(manifest, usual, factor, draws):
            before = truth.snapshot()
            try:
                exact.restore(before)
                sides = [(side.run(inputs, counts), side.state()) for side in (truth, exact)]
            except UsageError:  # the module does not take these
                truth.restore(before)
                continue
            try:
                found = stream.run(inputs, lengths=counts), stream.state()
            except BackendError:
                return np.inf
            worst = max(worst, _furthest(manifest, sides, found))
            types = {state.name: state.dtype for state in manifest.states}
            held = {name: part.astype(types[name]) for name, part in truth.state().items() if part is not None}
            stream.restore(replace(stream.snapshot(), states=held))
            break
    return worst


def _tried(manifest: Manifest, usual: Arrays, factor: int, draws: np.random.Generator) -> Iterator[dict[str, Array]]:
    """Inputs with numbers multiplied and whole numbers from a wider range; then the same with those as usual."""
    roles = {entry.name: entry.role for entry in manifest.inputs}
    large = {
        name: values * np.float32(factor) if values.dtype == np.float32 else values for name, values in usual.items()
    }
    whole = [name for name, values in usual.items() if values.dtype == np.int32 and roles[name] == "feature"]
    if whole and factor == FACTOR:
        yield large | {name: draws.integers(0, NUMBERS, usual[name].shape).astype(np.int32) for name in whole}
    yield large


def _furthest(
    manifest: Manifest,
    sides: list[tuple[list[tuple[Array, dict[str, Array]]], States]],
    found: tuple[Mapping[str, Array], Mapping[str, Array]],
) -> float:
    """The largest difference of any output or state of one segment."""
    worst, (truth, exact) = 0.0, sides
    for output in manifest.outputs:
        batch = output.shape.index("B") if "B" in output.shape else None
        for (rows, ours), (_, theirs) in zip(truth[0], exact[0], strict=True):
            values = found[0][output.name]
            values = values if batch is None else np.take(values, rows, axis=batch)
            worst = max(worst, _apart(values, ours[output.name], theirs[output.name], output.role == "logprobs"))
    for name, held in truth[1].items():
        other = exact[1][name]
        if held is not None and other is not None:
            worst = max(worst, _apart(found[1][name], held, other, False))
    return worst


def _apart(found: Array, single: Array, double: Array, nats: bool) -> float:
    """The difference from the module in float32, where that means something."""
    if found.shape != single.shape or single.shape != double.shape:
        return np.inf
    with np.errstate(all="ignore"):  # infinities say nothing
        close = np.abs(single.astype(np.float64) - double) <= COMPARABLE * np.maximum(1, np.abs(double))
    return relative_difference(found[close], single[close], nats)
