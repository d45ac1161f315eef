"""NaN in what a step reads: where the reference then shows NaN the bundle has to; no broken sensor is to look well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.ladder import HIDDEN_NAN
from txl_runtime.model import Model

from txl_export.parity.report import Gate
from txl_export.parity.steps.inputs import POISON, InputSource
from txl_export.parity.steps.truth import Reference, ReferenceStreams

NAN = "hidden NaN (values)"


def nan_gates(model: Model, reference: Reference, samples: Mapping[str, Any] | None) -> list[Gate]:
    """How many numbers the bundle has where the reference has NaN, once an input or state holds one NaN; none without.

    Each of them has its own segment. One that is refused hides nothing. Not judged are devices, because nothing is
    promised of their kernels, and bundles whose own export did not ask, as that of 0.8.0.
    """
    manifest, draws, hidden = model.manifest, np.random.default_rng(19), dict[str, int]()
    count = 1 if manifest.streams == "independent" else manifest.batch_size
    source, stream, lengths = InputSource(manifest, samples, draws), model.stream(count), model.segment_lengths
    truth = ReferenceStreams(manifest, reference, count)
    tries: list[tuple[str, Any, int]] = []
    tries += [("input", one, length) for one in manifest.inputs for length in sorted({lengths[0], lengths[-1]})]
    tries += [("state", one, lengths[-1]) for one in manifest.states]
    inputs, counts = source.take(count, lengths[0]), np.full(count, lengths[0], np.int32)
    truth.run(inputs, counts)
    stream.run(inputs, lengths=counts)
    (begun,), snapshot = truth.snapshot(), stream.snapshot()
    for kind, entry, length in tries:
        inputs, held, counts = source.take(count, length), dict(begun), np.full(count, length, np.int32)
        given: dict[str, Any] = inputs if kind == "input" else held
        if entry.dtype != "float32" or given[entry.name] is None or not given[entry.name].size:
            continue
        given[entry.name] = values = given[entry.name].copy()
        values.flat[draws.integers(values.size)] = POISON
        types = {state.name: state.dtype for state in manifest.states}
        states = {name: part.astype(types[name]) for name, part in held.items() if part is not None}
        truth.restore([held])
        stream.restore(replace(snapshot, states=states))
        try:
            ((_, outputs),) = truth.run(inputs, counts)
            found = stream.run(inputs, lengths=counts)
        except (BackendError, UsageError):
            continue
        for what, shown, ours in (("output", outputs, found), ("state", truth.state(), stream.state())):
            for name, expected in shown.items():
                value = np.asarray(ours.get(name, ()))
                if expected is not None and expected.dtype.kind == "f" and value.shape == expected.shape:
                    key = f"{NAN} in {what} {name}, given in {kind} {entry.name}"
                    hidden[key] = hidden.get(key, 0) + int((np.isnan(expected) & ~np.isnan(value)).sum())
    if not hidden:
        return []
    worst = max(hidden, key=lambda key: hidden[key])
    asked = NAN in manifest.parity or not manifest.parity
    passed = hidden[worst] <= HIDDEN_NAN if model.backend.name == "cpu" and asked else None
    return [Gate(worst if hidden[worst] else NAN, float(hidden[worst]), HIDDEN_NAN, passed)]
