"""Makes the vectors of a step's self-test: the reference's results in a short chain (see `txl_runtime.selftest`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Output
from txl_runtime.ladder import float32_limit
from txl_runtime.types import Array, Ids

from txl_export.proof.input_source import InputSource
from txl_export.proof.references import Indices, Reference, ReferenceStreams, Returned, whole
from txl_export.proof.rounding import OwnRounding

MOST_STEPS, FEW_STEPS, MOST_BYTES = 48, 6, 4_000_000
"""Maximum and minimum number of steps of the chain, and maximum number of bytes of its inputs, which may reduce the
steps."""
POSITIONS = 32
"""Number of positions to run in each length, because short segments fill a state slowly; at most a third of the
steps."""
PLACES, STEP_PLACES, STATE_PLACES = 64, 512, 1024
"""Maximum number of stored values: of an output per sequence and step, of an output per step, of a state per
sequence."""
FEW_PLACES = 8
"""Least number of stored values of an output per sequence and step, however large B is."""
SMALL = float32_limit() / 10
"""Largest error of the reference's own float32 in a step; it leaves 9/10 of the limit to the bundle."""
TRIES = 4
"""Maximum number of inputs that are tried for a segment from fresh states, until its rounding is below `SMALL`."""
GRID = 32
"""Random features are multiples of 1 / 32, because these compress well."""


def selftest_vectors(
    manifest: Manifest, reference: Reference, samples: Mapping[str, Any] | None = None
) -> dict[str, NDArray[Any]]:
    """Return vectors of steps of every length, e.g. "counts" [steps, B], with idle sequences and resets if allowed.

    If the model's own rounding grows beyond `SMALL`, all sequences are reset before the step. If the rounding is too
    large even from fresh states, different inputs are drawn. If it still exceeds `SMALL`, the vector "rounding" records
    the largest. For example, {"counts": [3, 2]} for three steps of two sequences.
    """
    draws, batch = np.random.default_rng(0), manifest.batch_size
    source, truth = InputSource(manifest, samples, draws), ReferenceStreams(manifest, reference, batch)
    steps, resets = _steps(manifest)
    shape, longest = (len(steps), batch), manifest.segment_lengths[0]
    vectors: dict[str, NDArray[Any]] = {
        "length": np.array(steps, np.int32),
        "counts": np.zeros(shape, np.int32),
        "reset": np.zeros(shape, np.bool_),
    }
    for entry in manifest.given:
        vectors[f"input/{entry.name}"] = np.zeros((len(steps), *entry.sizes(batch, longest)), entry.dtype)
    stored: dict[str, list[tuple[Array, Array]]] = {output.name: [] for output in manifest.outputs}
    same = _same_places(manifest, draws)
    single = reference.in_single()
    beside = None if single is None else OwnRounding(manifest, (reference, single), batch)
    rounding = 0.0
    for step, length in enumerate(steps):
        if step in resets:
            again = np.arange(batch) % 2 == 0 if manifest.can.run_apart else np.ones(batch, np.bool_)
            vectors["reset"][step] = again
            for streams in (truth, beside):
                if streams is not None:
                    streams.reset(np.flatnonzero(again).tolist())
        draws_of_inputs = (
            {name: _rounded(values, samples) for name, values in source.take(batch, length).items()}
            for _ in range(TRIES)
        )
        inputs, counts = next(draws_of_inputs), step_counts(manifest, length, step, draws)
        vectors["counts"][step] = counts
        if beside is not None and beside.segment(inputs, counts) > SMALL:
            vectors["reset"][step] = True
            truth.reset()
            inputs, left = _calmest(beside, chain([inputs], draws_of_inputs), counts)
            rounding = max(rounding, left)
        for name, values in inputs.items():
            place: tuple[int | slice, ...] = (step, *map(slice, values.shape))
            vectors[f"input/{name}"][place] = values
        _note_outputs(manifest, truth.run(inputs, counts), counts, same, draws, stored)
    if rounding > SMALL:
        vectors["rounding"] = np.array(rounding)
    for name, pairs in stored.items():
        vectors[f"place/{name}"] = same[name] if name in same else np.stack([places for places, _ in pairs])
        vectors[f"output/{name}"] = np.stack([values for _, values in pairs])
    return vectors | _states(manifest, truth, draws)


def _calmest(beside: OwnRounding, draws: Iterable[dict[str, Array]], counts: Ids) -> tuple[dict[str, Array], float]:
    """Return inputs whose rounding from fresh states is at most `SMALL`, or the least; and this rounding."""
    tried: list[tuple[dict[str, Array], float]] = []
    for inputs in draws:
        beside.reset()
        tried.append((inputs, beside.segment(inputs, counts)))
        if tried[-1][1] <= SMALL:
            return tried[-1]
    calmest = min(tried, key=itemgetter(1))
    beside.reset()
    beside.segment(calmest[0], counts)
    return calmest


def _steps(manifest: Manifest) -> tuple[list[int], set[int]]:
    """Return the length of each step, and the indices of steps before which sequences are reset."""
    lengths = manifest.segment_lengths
    steps: list[int] = []
    resets: set[int] = set()
    for length in lengths:
        stages = sum(program.segment_length == length for program in manifest.programs)
        resets.add(len(steps))
        steps += [length] * max(4, stages + 1, min(POSITIONS // length, MOST_STEPS // 3))
    resets = (resets - {0}) | {len(steps)}
    steps += [*lengths, *reversed(lengths), lengths[0]]
    each = sum(
        np.dtype(entry.dtype).itemsize * int(np.prod(entry.sizes(manifest.batch_size, lengths[0])))
        for entry in manifest.inputs
    )
    most = max(FEW_STEPS, min(MOST_STEPS, MOST_BYTES // max(each, 1)))
    first_steps = steps[:most]
    return first_steps, {step for step in resets if step < len(first_steps)} or {len(first_steps) - 2}


def step_counts(manifest: Manifest, length: int, step: int, draws: np.random.Generator) -> Ids:
    """Return counts int32 [B]; every third step has idle sequences, or random counts for ragged segments.

    For example, [5, 0] if sequence 1 is idle.
    """
    counts = np.full(manifest.batch_size, length, np.int32)
    if step % 3 == 2 and manifest.can.run_apart:
        if manifest.can.run_ragged:
            return draws.integers(0, length + 1, manifest.batch_size).astype(np.int32)
        if manifest.batch_size > 1:
            counts[step % manifest.batch_size :: 2] = 0
    return counts


def _rounded(values: Array, samples: Mapping[str, Any] | None) -> Array:
    return np.round(values * GRID) / np.float32(GRID) if values.dtype == np.float32 and not samples else values


def values_kept(manifest: Manifest, output: Output) -> int:
    """Return the number of an output's values that are stored per sequence and step, at most all of them."""
    most = min(PLACES, max(FEW_PLACES, STEP_PLACES // manifest.batch_size))
    return min(most, math.prod(output.axes.alone.sizes(1, manifest.segment_lengths[0])))


def _same_places(manifest: Manifest, draws: np.random.Generator) -> dict[str, Array]:
    """Return fixed places for each output without an axis of positions: all its values are valid in every step."""
    still = (output for output in manifest.outputs if not output.axes.positions)
    return {
        output.name: drawn_places(output.axes.alone.sizes(1, 1), values_kept(manifest, output), draws)
        for output in still
    }


def drawn_places(
    sizes: tuple[int, ...], kept: int, draws: np.random.Generator, of: tuple[int, ...] | None = None
) -> Array:
    """Draw `kept` flat indices into the corner `sizes` of an array of shape `of`; indices repeat in a smaller corner.

    Example:
        >>> drawn_places((1, 2), 3, np.random.default_rng(0), of=(4, 5))
        array([0, 1, 0], dtype=int32)
    """
    there = math.prod(sizes)
    flat = np.sort(draws.choice(there, min(kept, there), replace=False))
    if of is not None:
        flat = np.ravel_multi_index(np.unravel_index(flat, sizes), of)
    return np.resize(flat, kept).astype(np.int32)


def _note_outputs(
    manifest: Manifest,
    returned: list[tuple[Indices, Mapping[str, Returned]]],
    counts: Ids,
    same: Mapping[str, Array],
    draws: np.random.Generator,
    found: dict[str, list[tuple[Array, Array]]],
) -> None:
    """Append places and values [B, kept] of every output; values of sequences that did not run are zeros."""
    for output in manifest.outputs:
        count = values_kept(manifest, output)
        places, values = (np.zeros((len(counts), count), dtype) for dtype in ("int32", output.dtype))
        for rows, outputs in returned:
            for index, row in enumerate(rows.tolist()):
                own = np.asarray(output.axes.one(whole(outputs[output.name], len(rows)), index))
                if output.name in same:
                    places[row] = same[output.name]
                else:
                    places[row] = drawn_places(output.axes.alone.filled(0, int(counts[row])), count, draws, own.shape)
                values[row] = own.flat[places[row]]
        found[output.name].append((places, values))


def _states(manifest: Manifest, truth: ReferenceStreams, draws: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Return shape, places and values of every state after the last step, up to `STATE_PLACES` per sequence."""
    tensors: dict[str, NDArray[Any]] = {}
    tables = {state.name: state for state in manifest.states}
    for name, values in truth.state().items():
        assert values is not None, "every state is there after a step"
        rows = tables[name].axes.sequences(values)
        flat = rows.reshape(len(rows), -1)
        places = np.sort(draws.permutation(flat.shape[1])[:STATE_PLACES]).astype(np.int64)
        tensors[f"state_shape/{name}"] = np.array(rows.shape[1:], np.int64)
        tensors[f"state_place/{name}"] = places
        tensors[f"state/{name}"] = flat[:, places].astype(tables[name].dtype)
    return tensors
