"""The self-test, which replays stored vectors to check that a bundle computes the reference's results on this machine.

The vectors are steps through every program, with states empty, filling, full and rolled over, partial segments and idle
sequences. The reference computed the expected values, not an engine. The file is small: of every output and state it
has only some values, which are named by their flat indices in the array of one sequence.

    length     int32 [steps], L of the call   counts     int32 [steps, B], lengths
    reset      bool [steps, B], sequences that are reset before the step
    input/<name>     [steps, ...] in the input table's shape for the longest L; shorter segments use the first positions
    output/<name>    [steps, B, P], values at the flat indices place/<name>, int32 [P] for all steps or [steps, B, P],
                     of one sequence's own output
    state/<name>     [B, P], values after the last step at the flat indices state_place/<name>, int64 [P], of one
                     sequence's part, whose shape is state_shape/<name>; a shared state is stored once

Vectors of a Transformer-XL are stored by positions and columns of the vocabulary, and converted to the form above
before they are replayed (`translated`):

    tokens     int32 [steps, B, longest]      length, counts   as above; no sequence is reset
    columns    int32 [C], vocabulary ids      positions        int32 [steps, B, P], rows compared, below the count
    logprobs   float32 [steps, B, P, C]       memory/<state>   float32 [B, 2, ...]: oldest and newest row at the end

Precisions below float32 have no absolute limit. Vectors of both forms then hold the differences that the exporter's
machine reached, and twice these differences are allowed. That machine rounds half precision after every operator, as a
device does that fuses no operators.

    reached    float64 [2]: the largest differences of log-probabilities and memory, or of outputs and state; at most
               the largest stored value of each, or 1 if they are relative

A Transformer-XL in half precision is also judged row by row, because a largest difference hides a fault in a few rows.
Memory is rounded only by the layers below it, so a fault there stands out ("rows" of `LIMITS`):

    rows       int32 [R], rows of the first sequences' memory after the last step, 0 for the newest
    channels   int32 [C], indices of values in a row
    row/<state>       float32 [S, R, C], values there, of S sequences
    reached/logprobs  float32 [steps, B, P], root mean squares of the differences, one for each row
    reached/<state>   float32 [S, R], the same for memory rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from txl_runtime.errors import BundleError, CheckError
from txl_runtime.ladder import float32_limit, limit_of, rung
from txl_runtime.model import Model
from txl_runtime.types import Array, Floats

WARM = 2.0
"""Temperature at which the sums of a program "next" are compared: at 1, a program that ignores the temperature would
pass.
"""
WORDS = {
    "logprobs": "log-probabilities",
    "memory": "memory",
    "rows": "rows relative to their rounding",
    "outputs": "outputs",
    "state": "state",
}
"""Words for messages, by the keys of `SelftestResult.largest`."""


@dataclass(frozen=True)
class SelftestResult:
    """The result of a replay of a bundle's stored vectors.

    Attributes:
        backend: description of the engine.
        steps: number of steps replayed per stream.
        streams: the numbers of live sequences with which the steps were replayed.
        largest: the largest differences by name; NaN counts as infinite. For a Transformer-XL: "logprobs", |Δ|;
            "memory", relative to max(1, largest |value|); and in half precision "rows", relative to their rounding. For
            any other step: "outputs" and "state", relative as above except for log-probabilities (see "mask" in
            `ladder.LIMITS`); a whole number that differs counts as infinite.
        limits: the limits, by the same names.
        rows: root mean square of each row's difference when all sequences are live, by the names after `reached/`.
    """

    backend: str
    steps: int
    streams: tuple[int, ...]
    largest: Mapping[str, float]
    limits: Mapping[str, float]
    rows: Mapping[str, Array] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if every difference is within its limit."""
        return all(value <= self.limits[name] for name, value in self.largest.items())

    def require(self) -> None:
        """Raise CheckError unless the replay passed."""
        if not self.passed:
            differing = ", ".join(
                f"{WORDS[name]} by {value:.2e} (limit {self.limits[name]:.2g})" for name, value in self.largest.items()
            ).replace(" by", " differ by", 1)
            raise CheckError(
                f"self-test failed on {self.backend}: {differing}; "
                "do not use this bundle here; export it again or try another backend"
            )

    def document(self) -> dict[str, object]:
        """Return the result as plain JSON: `max_logprobs`, `limit_logprobs` and so on."""
        return {
            "backend": self.backend,
            "steps": self.steps,
            "streams": self.streams,
            **{f"max_{name}": value for name, value in self.largest.items()},
            **{f"limit_{name}": value for name, value in self.limits.items()},
            "passed": self.passed,
        }


def run_selftest(model: Model, precision: str | None = None) -> SelftestResult:
    """Replay the bundle's vectors with different numbers of live sequences, and with each batch size of the engines.

    In lockstep, all sequences run.

    Args:
        model: the loaded bundle, or a float32 copy of it that rounds as the bundle does.
        precision: the bundle's precision, if `model` is a float32 copy.

    Raises:
        BundleError: the bundle has no usable vectors.
    """
    vectors = model.bundle.selftest()
    names = ("outputs", "state") if "tokens" not in vectors else ("logprobs", "memory")
    rungs = rung(precision or model.manifest.precision, model.backend.name)
    batch, sizes = model.batch_size, model.manifest.batch_sizes
    limits = [float("inf") if limit is None else limit for limit in (rungs.logprobs, rungs.memory)]
    streams = tuple(sorted({1, 2, batch // 2, batch, *sizes} & set(range(1, batch + 1))))
    if not model.manifest.can.run_apart:
        streams = (batch,)
    rows: dict[str, Array] = {}
    try:
        if "tokens" in vectors:
            vectors = translated(vectors, model)
        if model.backend.reached is not None or not all(map(math.isfinite, limits)):
            there = model.backend.reached or reached(model, vectors)
            limits = [limit_of("further") * value + float32_limit() for value in there]
        errors: list[tuple[float, ...]] = []
        for b in streams:
            errors.append(_replay(model, vectors, b, rows))
            if "reached/logprobs" in vectors and model.backend.reached is None:
                errors[-1] += (_further(rows, vectors),)
        kinds = {program.kind for program in model.backend.programs}
        errors += [(_shortcuts(model, vectors, kinds, b),) for b in (batch, *sizes)]
        steps = len(vectors["length"])
    except (KeyError, IndexError, TypeError, ValueError) as error:  # a stream's UsageError is a ValueError, too
        raise BundleError(f"{model.bundle.path}: stored vectors do not fit ({error}); export the model again") from None
    largest = [max(errors_of_run) for errors_of_run in zip_longest(*errors, fillvalue=0.0)]
    limits.append(limit_of("rows"))
    errors_of_run, allowed = (dict(zip((*names, "rows"), values, strict=False)) for values in (largest, limits))
    allowed = {name: allowed[name] for name in errors_of_run}
    return SelftestResult(model.backend.description, steps, streams, errors_of_run, allowed, rows)


def translated(vectors: Mapping[str, Array], model: Model) -> dict[str, Array]:
    """Convert a Transformer-XL's vectors to the general form, the first form in the module's description.

    For example, "state_place/layers.00.key" is [2, 64] for two sequences.

    Returns:
        Vectors in the general form, except that state_place/<name> is [B, P], because the oldest row has a different
        index in each sequence. In half precision, "row_place/<state>", int [R, C], has the flat indices of row/<state>.
    """
    manifest = model.manifest
    tokens, logprobs, most = manifest.tokens, manifest.logprobs, manifest.memory_length
    if tokens is None or logprobs is None:
        raise ValueError("vectors of token ids, which this model does not take")
    positions, counts, expected = vectors["positions"], vectors["counts"], vectors["logprobs"]
    columns = np.arange(manifest.vocab_size)[vectors["columns"]]
    # compare these shapes first, because they limit the memory that the next lines allocate
    if expected.shape != (*positions.shape, *columns.shape):
        raise ValueError(f"log-probabilities of shape {expected.shape} at {positions.shape} of {columns.shape}")
    if expected.dtype.kind != "f":
        raise ValueError(f"log-probabilities are {expected.dtype}")
    places = positions[..., None] * np.array([manifest.vocab_size], np.int64) + columns
    general = {
        **vectors,
        "reset": np.zeros(counts.shape, np.bool_),
        f"input/{tokens.name}": vectors["tokens"],
        f"place/{logprobs.name}": places.reshape(*counts.shape, -1),
        f"output/{logprobs.name}": expected.reshape(*counts.shape, -1),
    }
    fill = np.minimum(manifest.fresh_fill + counts.sum(axis=0), most)
    for state in manifest.states_of("rolled") or manifest.states_of("ring"):
        name, shape = state.name, state.axes.sizes(1, most)
        of_row = state.axes.rows(np.arange(math.prod(shape)).reshape(shape))[0].reshape(most, -1)
        ends = vectors[f"memory/{name}"]
        general[f"state_shape/{name}"] = np.array(state.axes.alone.sizes(1, most))
        general[f"state/{name}"] = ends.reshape(len(ends), -1)
        general[f"state_place/{name}"] = of_row[np.stack([most - fill, np.full_like(fill, most - 1)], 1)].reshape(
            len(fill), -1
        )
        if "rows" in vectors:
            wanted, picked, channels = vectors[f"row/{name}"], vectors["rows"], vectors["channels"]
            # compare these shapes first, because they limit the memory that the next line allocates
            if wanted.shape[1:] != (*picked.shape, *channels.shape):
                raise ValueError(f"rows of {name} have shape {wanted.shape}, {picked.shape} of {channels.shape} named")
            general[f"row_place/{name}"] = of_row[most - 1 - picked[:, None], channels]
    return general


def reached(model: Model, vectors: Mapping[str, Array]) -> list[float]:
    """Return the errors of [outputs, state] that the exporter's machine reached, from vectors in the general form.

    For example, [2.1e-07, 3.5e-07].

    Raises:
        BundleError: an error is below 0 or above the largest stored value: with a larger one any result would pass.
    """
    logprobs, errors = model.manifest.logprobs, [float(value) for value in vectors["reached"].ravel()]
    nats = "" if logprobs is None else f"output/{logprobs.name}"
    most = dict.fromkeys(("output", "state"), float32_limit())
    for name, values in vectors.items():
        if (kind := name.partition("/")[0]) in most and values.dtype.kind == "f":
            sizes = np.abs(values)
            # the sizes of relative errors count as at most 1
            sizes = sizes[sizes < limit_of("mask")] if name == nats else np.fmin(sizes, 1)
            most[kind] = float(sizes.max(initial=most[kind]))
    if len(errors) != 2 or not all(0 <= one <= size for one, size in zip(errors, most.values(), strict=True)):
        raise BundleError(
            f"{model.bundle.path}: stored vectors do not fit (reached is {errors}, expected 0 … {most['output']:.3g} "
            f"and 0 … {most['state']:.3g}); export the model again"
        )
    return errors


def _replay(model: Model, vectors: Mapping[str, Array], b: int, rows: dict[str, Array]) -> tuple[float, float]:
    """Return the largest differences of (outputs, state) with b live sequences, and write each row's difference to
    `rows`.
    """
    manifest, stream, values = model.manifest, model.stream(b), 0
    steps = vectors["counts"].shape
    chosen = {
        name: np.broadcast_to(vectors[f"place/{name}"], (*steps, vectors[f"output/{name}"].shape[-1]))
        for name in (output.name for output in manifest.outputs)
    }
    pairs: dict[str, list[tuple[Array, Array]]] = {output.name: [] for output in manifest.outputs}
    for step, length in enumerate(vectors["length"].tolist()):
        again = vectors["reset"][step, :b]
        if again.any():
            stream.reset(None if again.all() else again)
        counts = vectors["counts"][step, :b]
        inputs = {
            entry.name: vectors[f"input/{entry.name}"][step][tuple(slice(size) for size in entry.sizes(b, length))]
            for entry in manifest.given
        }
        results = stream.run(inputs, lengths=counts)
        for output in manifest.outputs:
            for row in np.flatnonzero(counts).tolist():
                own = np.asarray(output.axes.one(results[output.name], row))
                places = chosen[output.name][step, row]
                pairs[output.name].append((own.ravel()[places], vectors[f"output/{output.name}"][step, row]))
                values += places.size
    if not values:
        raise ValueError("nothing to compare")
    nats = {output.name for output in manifest.outputs if output.role == "logprobs"}
    worst = 0.0
    for name, some in pairs.items():
        ours, wanted = (np.concatenate([pair[side] for pair in some]) for side in (0, 1))
        worst = max(worst, relative_difference(ours, wanted, name in nats))
        if "positions" in vectors:
            shape = len(some), vectors["positions"].shape[-1]
            live, apart = vectors["counts"][:, :b] > 0, np.zeros(vectors["positions"].shape)
            apart[:, :b][live] = _deviation(*(side.reshape(*shape, -1) for side in (ours, wanted)))
            rows["logprobs"] = apart
    worst_state, axes = 0.0, {state.name: state.axes for state in manifest.states}
    for name, held in stream.state().items():
        own = axes[name].sequences(held)
        expected, places = vectors[f"state/{name}"][: len(own)], vectors[f"state_place/{name}"]
        if own.shape[1:] != tuple(vectors[f"state_shape/{name}"].tolist()):
            worst_state = np.inf
            continue
        if expected.shape != (len(own), places.shape[-1]):
            raise ValueError(f"{name} has values of shape {expected.shape} at {places.shape} places")
        flat = own.reshape(len(own), -1)
        there = flat[np.arange(len(own))[:, None], places[: len(own)] if places.ndim > 1 else places]
        worst_state = max(worst_state, relative_difference(there, expected))
        if f"row_place/{name}" in vectors:
            wanted = vectors[f"row/{name}"][: len(own)]
            rows[name] = _deviation(flat[: len(wanted)][:, vectors[f"row_place/{name}"]], wanted)
    return worst, float(worst_state)


def relative_difference(found: Array, expected: Array, nats: bool = False) -> float:
    """Return the largest |Δ|, divided by max(1, largest |value|), or undivided with `nats`.

    If |value| is at least "mask" of `LIMITS`, e.g. for -1e4, Δ is divided by the value itself. Whole numbers and
    booleans must be equal, or the result is infinite.
    """
    if found.shape != expected.shape:
        raise ValueError(f"values have shape {found.shape}, stored were {expected.shape}")
    if not np.issubdtype(expected.dtype, np.floating):
        return 0.0 if np.array_equal(found, expected) else np.inf
    sizes, mask = np.abs(expected), limit_of("mask")
    scale = 1.0 if nats else float(sizes[sizes < mask].max(initial=1))
    with np.errstate(all="ignore"):  # NaN counts as an infinite difference
        apart = np.abs(found.astype(np.float64) - expected) / np.where(sizes < mask, scale, sizes)
    return float(np.nan_to_num(np.where(found == expected, 0, apart), nan=np.inf).max(initial=0))


def _shortcuts(model: Model, vectors: Mapping[str, Array], kinds: Set[str], b: int) -> float:
    """Return the largest difference between an engine's shortcut programs "score", "last" and "next" and its whole
    programs.
    """
    if model.manifest.tokens is None or not kinds & {"score", "last", "next"}:
        return 0.0
    name = model.manifest.tokens.name
    tokens = vectors[f"input/{name}"][int(np.argmax(vectors["length"]))][:b]
    worst, columns = 0.0, tokens.shape[1]
    if "score" in kinds and columns > 1:
        logprobs = model.stream(b).feed(tokens[:, :-1])
        expected = -np.take_along_axis(logprobs, tokens[:, 1:, None].astype(np.int64), axis=2)[..., 0]
        worst = _largest(model.stream(b).score(tokens), expected)
    if kinds & {"last", "next"}:
        for ids in (tokens, tokens[:, :1]):
            loop, counts = model.stream(b).loop, np.full(len(ids), ids.shape[1], np.int32)
            inputs = {name: ids.astype(np.int32), "temperature": np.full(len(ids), WARM, np.float32)}
            result = loop.run(inputs, counts, "next")
            parts, row = result.parts(), result.last()
            worst = max(worst, _largest(row, model.stream(b).step(ids)[:, -1]))
            if parts is not None:
                worst = max(worst, *(_largest(*pair) for pair in parts.against(row, WARM)))
    return worst


def _deviation(found: Array, expected: Array) -> Array:
    """Return the root mean square of each row's differences, [..., C] → [...]; infinite if a row has NaN."""
    squares = np.nan_to_num((found.astype(np.float64) - expected) ** 2, nan=np.inf)
    return np.asarray(np.sqrt(squares.sum(axis=-1) / max(1, squares.shape[-1])))


def _further(rows: Mapping[str, Array], vectors: Mapping[str, Array]) -> float:
    """Return the largest ratio, over all rows, of the error on this machine to the error on the exporter's machine.

    An error is a row's difference from the values that PyTorch computed. An exporter's error below the root mean square
    of all its rows' errors is replaced by that mean.
    """
    worst = 0.0
    for name, values in rows.items():
        reached = vectors[f"reached/{name}"].astype(np.float64)
        if reached[: len(values)].shape != values.shape or not np.isfinite(reached).all():
            raise ValueError(
                f"what rows of {name} reached has shape {reached.shape}, expected {values.shape}, and finite"
            )
        usual = np.sqrt((reached[reached > 0] ** 2).mean()) if reached.any() else 0.0
        further = values / (np.maximum(reached, usual) + 1e-5)[: len(values)]
        worst = max(worst, float(np.nan_to_num(further, nan=np.inf).max(initial=0)))
    return worst


def _largest(found: Floats, expected: Floats) -> float:
    difference = np.abs(found.astype(np.float64) - expected)
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0))
