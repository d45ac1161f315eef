"""A bundle as a competitor, and what Python costs around its engine."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from txl_runtime.errors import CheckError
from txl_runtime.ladder import competitor_limit
from txl_runtime.model import Model

from txl_deploy.bench.floor import bytes_of_step
from txl_deploy.bench.timing import Percentiles, random_tokens

__all__ = [
    "Agreement",
    "BundleCompetitor",
    "Competitor",
    "NullBackend",
    "Overhead",
    "agree",
    "fill",
    "overhead",
    "segments_to_fill",
]

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]


class Competitor(Protocol):
    """Something that can do a bundle's work: one segment at a time, memory carried along."""

    name: str
    description: str

    def reset(self) -> None:
        """Start anew, with the memory of streams that have seen nothing."""

    def logprobs(self, tokens: Ids) -> Logprobs:
        """One segment int32 [b, T] → natural log-probabilities of the next token after each, float32 [b, T, V]."""

    def next_token(self, tokens: Ids) -> Ids:
        """One segment int32 [b, T] → the most likely token after it, int32 [b]."""

    def score(self, tokens: Ids) -> Logprobs:
        """Nats of tokens[:, 1:], float32 [b, T-1]; the segment is tokens[:, :-1]."""

    def step_bytes(self, length: int) -> int:
        """Bytes that one segment of `length` tokens has to read at least, memory full."""


class BundleCompetitor:
    """A bundle in this runtime, through the public interface."""

    def __init__(self, name: str, model: Model) -> None:
        self.name, self.description = name, model.backend.description
        self.stream, self._bundle = model.stream(), model.bundle

    def reset(self) -> None:
        """See `Competitor`."""
        self.stream.reset()

    def logprobs(self, tokens: Ids) -> Logprobs:
        """See `Competitor`."""
        return self.stream.step(tokens)

    def next_token(self, tokens: Ids) -> Ids:
        """See `Competitor`."""
        return next(self.stream.generate(tokens, 1, temperature=0))

    def score(self, tokens: Ids) -> Logprobs:
        """See `Competitor`."""
        return self.stream.score(tokens)

    def step_bytes(self, length: int) -> int:
        """See `Competitor`."""
        return bytes_of_step(self._bundle, length).total


def fill(competitor: Competitor, model: Model) -> None:
    """Start anew and fill a competitor's memory."""
    competitor.reset()
    for index in range(segments_to_fill(model)):
        competitor.next_token(random_tokens(model.vocab_size, (model.batch_size, model.segment_lengths[0]), index))


class Agreement(Struct, frozen=True, kw_only=True):
    """How far a competitor's log-probabilities are from the bundle's, over chained segments.

    Attributes:
        segments: how many were compared, from empty memory.
        max_abs: the largest difference, nats.
        kl: mean Kullback-Leibler divergence in nats, float64.
        limit: what it had to stay below: of `measure`.
        measure: "max_abs" where both compute in fp32, else "kl".
    """

    segments: int
    max_abs: float
    kl: float
    limit: float
    measure: str


def agree(bundle: Competitor, other: Competitor, model: Model, precision: str = "fp32") -> Agreement:
    """Compare a competitor with the bundle over chained segments: the first ones, then with full memory.

    Args:
        bundle, other: both start anew, and are left with full memory.
        model: the bundle's.
        precision: the competitor's; the bundle's own counts too.

    Raises:
        CheckError: they do not compute the same function, so timing them would compare nothing.
    """
    measure, limit = competitor_limit({precision, str(model.manifest.precision)})
    longest = model.segment_lengths[0]
    early, late = [longest, 1], [longest] * 2 + [1] * 3 + [longest, 1]
    differences = _Differences(bundle, other, model)
    bundle.reset()
    other.reset()
    for index, length in enumerate(early):
        differences.compare(length, 100 + index)
    for index in range(segments_to_fill(model)):
        tokens = random_tokens(model.vocab_size, (model.batch_size, longest), 200 + index)
        bundle.next_token(tokens)
        other.next_token(tokens)
    for index, length in enumerate(late):
        differences.compare(length, 300 + index)
    found = differences.found(limit, measure)
    reached = found.kl if measure == "kl" else found.max_abs
    if not reached <= limit:  # NaN is no agreement either
        raise CheckError(
            f"{other.name}: differs from the bundle by {measure} {reached:.3g} over {found.segments} chained segments, "
            f"expected at most {limit:g}; it computes something else, so it is not timed: leave it out of --against"
        )
    return found


def segments_to_fill(model: Model) -> int:
    """Segments of the longest length that fill the memory and then move every row of it out."""
    return -(-model.memory_length // model.segment_lengths[0]) + 1


class _Differences:
    """Two competitors side by side."""

    def __init__(self, bundle: Competitor, other: Competitor, model: Model) -> None:
        self._bundle, self._other, self._model = bundle, other, model
        self._max_abs: list[float] = []
        self._kl: list[float] = []

    def compare(self, length: int, seed: int) -> None:
        """One segment through both; row by row, because distributions over large vocabularies are large."""
        tokens = random_tokens(self._model.vocab_size, (self._model.batch_size, length), seed)
        ours, theirs = self._bundle.logprobs(tokens), self._other.logprobs(tokens)
        worst, divergences = 0.0, []
        for row in np.ndindex(*tokens.shape):
            p, q = ours[row].astype(np.float64), theirs[row].astype(np.float64)
            worst = float(np.fmax(worst, np.abs(p - q).max())) if np.isfinite(p).all() else np.nan
            divergences.append(float((np.exp(q) * (q - p)).sum()))
        self._max_abs.append(worst)
        self._kl.append(float(np.mean(divergences)))

    def found(self, limit: float, measure: str) -> Agreement:
        """Over all segments so far."""
        return Agreement(
            segments=len(self._kl),
            max_abs=float(np.max(self._max_abs)),
            kl=float(np.maximum(np.mean(self._kl), 0)),
            limit=limit,
            measure=measure,
        )


class NullBackend:
    """An engine that computes nothing: what is left of a step is Python's."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def bind(self, *_arguments: Any, **_options: Any) -> Callable[[], None]:
        """A call that does nothing."""
        return lambda: None


class _TimedBackend(NullBackend):
    """The real engine, its calls timed."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.nanoseconds = 0

    def bind(self, *arguments: Any, **options: Any) -> Callable[[], None]:
        """The real call between two looks at the clock."""
        call = self._real.bind(*arguments, **options)

        def timed() -> None:
            started = time.perf_counter_ns()
            call()
            self.nanoseconds += time.perf_counter_ns() - started

        return timed


class Overhead(Struct, frozen=True, kw_only=True):
    """What Python costs per decode step, in microseconds (medians).

    Attributes:
        in_step: time in `Stream.step` outside the engine's call, measured around real calls: caches are as cold as
            the engine leaves them.
        without_engine: a step whose engine does nothing: the same code with warm caches.
        step: a whole step with its engine.
        share: in_step / step.
    """

    in_step: float
    without_engine: float
    step: float
    share: float


def overhead(model: Model, steps: int = 300) -> Overhead:
    """Measure what Python costs around one token, memory full.

    The model is not changed: streams are opened on shallow copies of it with another engine in place.
    """
    tokens = random_tokens(model.vocab_size, (64, model.batch_size, 1))
    timed = _TimedBackend(model.backend)
    outside, whole = _steps(_with_backend(model, timed), tokens, steps, timed)
    _, alone = _steps(_with_backend(model, NullBackend(model.backend)), tokens, 10 * steps, None)
    step, in_step = whole.p50 * 1e3, outside.p50 * 1e3
    return Overhead(in_step=in_step, without_engine=alone.p50 * 1e3, step=step, share=in_step / step)


def _with_backend(model: Model, backend: Any) -> Model:
    other = copy.copy(model)
    other.backend = backend
    return other


def _steps(model: Model, tokens: Ids, steps: int, engine: _TimedBackend | None) -> tuple[Percentiles, Percentiles]:
    """Times of steps outside the engine's calls, and whole."""
    stream, longest = model.stream(), model.segment_lengths[0]
    for index in range(segments_to_fill(model)):
        stream.step(random_tokens(model.vocab_size, (model.batch_size, longest), index))
    outside, whole = [], []
    for index in range(-10, steps):
        ids = tokens[index % len(tokens)]
        before = engine.nanoseconds if engine else 0
        started = time.perf_counter_ns()
        stream.step(ids)
        took = time.perf_counter_ns() - started
        if index >= 0:
            whole.append(took)
            outside.append(took - (engine.nanoseconds - before if engine else 0))
    return Percentiles.of(outside), Percentiles.of(whole)
