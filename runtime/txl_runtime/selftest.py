"""Replaying stored vectors: does this bundle, on this machine, still compute what the reference computed?

The vectors are steps through every program, with memory empty, filling, full and rolled over, partial segments and
idle sequences; what they expect came from the reference, not from an engine. They are kept small: some positions per
step, some columns of the vocabulary.

    tokens     int32 [steps, B, longest]      length     int32 [steps], T of the call
    counts     int32 [steps, B], lengths      positions  int32 [steps, B, P], rows compared (those below the count)
    columns    int32 [C], vocabulary ids      logprobs   float32 [steps, B, P, C]
    memory/<state>   float32 [B, 2, ...]: oldest and newest row after the last step
    reached    float64 [2]: only where weights are quantised, the largest differences of log-probabilities and memory
               where the bundle was made. There is no absolute limit then: it may not become twice as far away
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from txl_runtime.errors import BundleError, CheckError
from txl_runtime.ladder import FURTHER, rung
from txl_runtime.model import Model
from txl_runtime.types import Array, Floats


@dataclass(frozen=True)
class SelftestResult:
    """What a replay reached.

    Attributes:
        backend: description of the engine.
        steps: steps replayed per stream.
        streams: numbers of live sequences that were tried.
        max_logprobs: largest |Δ| of a log-probability; NaN counts as infinite.
        max_memory: largest |Δ| of a memory value, relative to max(1, largest |value|).
        limit_logprobs, limit_memory: the ladder's.
    """

    backend: str
    steps: int
    streams: tuple[int, ...]
    max_logprobs: float
    max_memory: float
    limit_logprobs: float
    limit_memory: float

    @property
    def reached(self) -> tuple[float, float]:
        """The two largest differences, as vectors of lower precisions keep them."""
        return self.max_logprobs, self.max_memory

    @property
    def passed(self) -> bool:
        """Whether every difference is within the ladder's limits."""
        return self.max_logprobs <= self.limit_logprobs and self.max_memory <= self.limit_memory

    def require(self) -> None:
        """Raise CheckError unless the replay passed."""
        if not self.passed:
            raise CheckError(
                f"self-test failed on {self.backend}: log-probabilities differ by {self.max_logprobs:.2e} "
                f"(limit {self.limit_logprobs:.0e}), memory by {self.max_memory:.2e} (limit {self.limit_memory:.0e}); "
                "do not use this bundle here; export it again or try another backend"
            )


def run_selftest(model: Model) -> SelftestResult:
    """Replay the bundle's vectors with 1 … B live sequences.

    Raises:
        BundleError: the bundle holds no usable vectors.
    """
    vectors = model.bundle.selftest()
    limits = rung(model.manifest.precision, model.backend.name)
    batch = model.batch_size
    logprobs = limits.logprobs if limits.logprobs is not None else float("inf")
    memory = limits.memory if limits.memory is not None else float("inf")
    if "reached" in vectors:
        logprobs, memory = (FURTHER * float(value) + 1e-4 for value in vectors["reached"])
    streams = tuple(sorted({1, 2, batch // 2, batch} & set(range(1, batch + 1))))
    try:
        errors = [_replay(model, vectors, b) for b in streams]
        kinds = {program.kind for program in model.backend.programs}
        errors.append((_shortcuts(model, vectors, kinds), 0.0))
        steps = len(vectors["length"])
    except (KeyError, IndexError, TypeError, ValueError) as error:  # a stream's UsageError is a ValueError
        raise BundleError(f"{model.bundle.path}: stored vectors do not fit ({error}); export the model again") from None
    return SelftestResult(
        model.backend.description,
        steps,
        streams,
        max(error[0] for error in errors),
        max(error[1] for error in errors),
        logprobs,
        memory,
    )


def _replay(model: Model, vectors: dict[str, Array], b: int) -> tuple[float, float]:
    """Largest differences of log-probabilities and memory with b live sequences."""
    stream, worst = model.stream(b), 0.0
    columns, values = vectors["columns"], 0
    for step, length in enumerate(vectors["length"]):
        counts = vectors["counts"][step, :b]
        logprobs = stream.step(vectors["tokens"][step, :b, :length], counts)
        positions = vectors["positions"][step, :b]
        found = np.take_along_axis(logprobs, positions[..., None], axis=1)[..., columns]
        compared = positions < counts[:, None]
        worst = max(worst, _largest(found[compared], vectors["logprobs"][step, :b][compared]))
        values += found[compared].size
    if not values:
        raise ValueError("nothing to compare")
    memory, worst_memory = stream.memory(), 0.0
    for name, rows in memory.items():
        expected = vectors[f"memory/{name}"][:b]
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        oldest = rows[np.arange(len(rows)), rows.shape[1] - stream.fill]  # filled rows stand at the end
        ends = np.stack([oldest, rows[:, -1]], axis=1)
        worst_memory = max(worst_memory, _largest(ends, expected) / scale)
    return worst, worst_memory


def _shortcuts(model: Model, vectors: dict[str, Array], kinds: Collection[str]) -> float:
    """Engines have programs of their own for scores and for prompts: largest difference from what the others say."""
    tokens = vectors["tokens"][int(np.argmax(vectors["length"]))]
    worst, columns = 0.0, tokens.shape[1]
    if "score" in kinds and columns > 1:
        logprobs = model.stream().feed(tokens[:, :-1])
        expected = -np.take_along_axis(logprobs, tokens[:, 1:, None].astype(np.int64), axis=2)[..., 0]
        worst = _largest(model.stream().score(tokens), expected)
    if "last" in kinds:
        counts = np.full(len(tokens), columns, np.int32)
        found = model.open_loop().run({"tokens": tokens.astype(np.int32)}, counts, "last").last()
        worst = max(worst, _largest(found, model.stream().step(tokens)[:, -1]))
    return worst


def _largest(found: Floats, expected: Floats) -> float:
    difference = np.abs(found.astype(np.float64) - expected)
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0))
