"""Choose the steps that a package's test replays: the bundle's stored vectors if they fit, else steps run here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from txl_runtime.bundle.tables import Output
from txl_runtime.ladder import BISECT, float32_limit, limit_of, rung
from txl_runtime.model import Model
from txl_runtime.selftest import reached, translated
from txl_runtime.types import Array

from txl_deploy.plain_c.rendering import literals
from txl_deploy.plain_c.segments import expected, segments
from txl_deploy.plain_c.step import PlainStep

STEPS, PLACES = 24, 64
"""Number of steps that are recorded if the bundle's vectors do not fit, and number of values kept per output."""


def stored_steps(model: Model, step: PlainStep, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the template of the package's test reads: resets, counts, inputs and outputs.

    Raises:
        BundleError: the stored vectors cannot be read.
    """
    manifest, length, batch = step.manifest, step.program.segment_length, step.manifest.batch_size
    vectors = model.bundle.selftest() if manifest.selftest else {}
    if "tokens" in vectors:
        vectors = translated(vectors, model)
    origin = "the bundle's own self-test, whose values PyTorch computed"
    if not vectors or not _fits(vectors, step):
        vectors, origin = _recorded(model, step), "what the bundle computed when this was packaged"
    wanted = rung(manifest.precision, "cpu").logprobs
    limit = BISECT[manifest.precision] if wanted is None else wanted
    if wanted is None and "reached" in vectors:
        limit = limit_of("further") * reached(model, vectors)[0] + float32_limit()
    inputs = [
        {**each, "text": _nested([_padded_input(each["table"], vectors, at, batch, length) for at in _steps(vectors)])}
        for each in context["inputs"]
    ]
    outputs = [_expected(each, vectors, step, limit) for each in context["outputs"]]
    return {
        "steps": len(_steps(vectors)),
        "origin": origin,
        "resets": _nested([vectors["reset"][at, :batch].astype(np.int32) for at in _steps(vectors)]),
        "counts": _nested([vectors["counts"][at, :batch] for at in _steps(vectors)]),
        "inputs": inputs,
        "outputs": outputs,
        "limit": limit,
        "mask": limit_of("mask"),
    }


def _steps(vectors: Mapping[str, Array]) -> range:
    return range(len(vectors["length"]))


def _fits(vectors: Mapping[str, Array], step: PlainStep) -> bool:
    """Return True if the step in C, with its L and B, can run all stored steps."""
    length, batch, can = step.program.segment_length, step.manifest.batch_size, step.manifest.can
    lengths, stored = vectors["length"], vectors["counts"].shape[1]
    fits = (lengths <= length).all() if step.takes_less else (lengths == length).all()
    return bool(fits) and (stored >= batch if can.run_apart else stored == batch)


def _recorded(model: Model, step: PlainStep) -> dict[str, Array]:
    """Run steps of the bundle on this machine; return them in the layout of the bundle's stored vectors."""
    manifest, length = step.manifest, step.program.segment_length
    stream, steps = model.stream(manifest.batch_size), list(segments(step, 0, STEPS, 1))
    results = []
    for each in steps:
        if each.which.any():
            stream.reset(np.flatnonzero(each.which))
        results.append(expected(stream, step, each))
    vectors: dict[str, Array] = {
        "length": np.full(len(steps), length),
        "counts": np.stack([each.counts for each in steps]),
        "reset": np.stack([each.which for each in steps]),
    }
    for entry in manifest.given:
        vectors[f"input/{entry.name}"] = np.stack([each.inputs[entry.name] for each in steps])
    for output in manifest.outputs:
        size = math.prod(output.axes.alone.sizes(1, length))
        places = np.unique(np.linspace(0, size - 1, PLACES).astype(np.int64))
        own = [[output.axes.one(result[output.name], row) for row in range(manifest.batch_size)] for result in results]
        vectors[f"place/{output.name}"] = places
        vectors[f"output/{output.name}"] = np.array([[np.ravel(one)[places] for one in row] for row in own])
    return vectors


def _padded_input(entry: Any, vectors: Mapping[str, Array], at: int, batch: int, length: int) -> Array:
    """Return an input of one step in the package's shape, padded with zeros: [b, T] → [B, L]."""
    sizes = entry.sizes(batch, int(vectors["length"][at]))
    part = vectors[f"input/{entry.name}"][at][tuple(map(slice, sizes))]
    whole = np.zeros(entry.sizes(batch, length), np.dtype(entry.dtype))
    whole[tuple(map(slice, part.shape))] = part
    return whole


def _expected(entry: dict[str, Any], vectors: Mapping[str, Array], step: PlainStep, limit: float) -> dict[str, Any]:
    """Add to `entry` an output's expected values, and their places in the package's array: -1 for idle sequences."""
    output: Output = entry["table"]
    values = vectors[f"output/{output.name}"][:, : step.manifest.batch_size]
    chosen = np.broadcast_to(vectors[f"place/{output.name}"], vectors[f"output/{output.name}"].shape)
    numbers, places = np.arange(entry["many"]).reshape(entry["shape"]), np.full(values.shape, -1)
    for at, row in np.argwhere(vectors["counts"][:, : step.manifest.batch_size] > 0).tolist():
        sizes = output.axes.alone.sizes(1, int(vectors["length"][at]))
        own = np.asarray(output.axes.one(numbers, row))[tuple(map(slice, sizes))]
        places[at, row] = own.ravel()[chosen[at, row]]
    usual = np.abs(values.astype(np.float64))
    scale = 1.0 if output.role == "logprobs" else float(usual[usual < limit_of("mask")].max(initial=1))
    typed = values.astype(np.dtype(output.dtype))
    return entry | {
        "count": values[0].size,
        "places": _nested(list(places)),
        "text": _nested(list(typed)),
        "room": limit * scale if output.dtype == "float32" else 0.5,
    }


def _nested(arrays: list[Array]) -> str:
    return "{\n" + ",\n".join(f"{{{literals(array)}}}" for array in arrays) + "\n}"
