"""What Python costs around the engine's work, per decode step."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

from msgspec import Struct
from txl_runtime.bundle.tables import Program
from txl_runtime.host.backend import HostBackend
from txl_runtime.host.engine import Engine
from txl_runtime.model import Model
from txl_runtime.types import Arrays, Call, Ids

from txl_deploy.bench.competitor import segments_to_fill
from txl_deploy.bench.timing import Percentiles, random_tokens


class Overhead(Struct, frozen=True, kw_only=True):
    """What Python costs per decode step, in microseconds (medians).

    Attributes:
        in_step: time that `Stream.step` spends outside the engine's call. It is measured around real calls, so caches
            are as cold as the engine leaves them.
        without_engine: a step whose engine does nothing: the same code with warm caches.
        step: a whole step with its engine.
        share: in_step / step.
    """

    in_step: float
    without_engine: float
    step: float
    share: float


class _Null(Engine):
    """An engine that computes nothing: what is left of a step is Python's."""

    def __init__(self, real: Engine) -> None:
        self._real, self.description, self.least_rows = real, real.description, real.least_rows

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        return lambda: None

    def release_pages(self) -> None:
        self._real.release_pages()


class _Timed(_Null):
    """The real engine; its calls are timed."""

    nanoseconds = 0

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        call = self._real.bind(program, inputs, outputs)

        def timed() -> None:
            started = time.perf_counter_ns()
            call()
            self.nanoseconds += time.perf_counter_ns() - started

        return timed


def overhead(model: Model, steps: int = 300) -> Overhead | None:
    """Measure what Python costs around one token when the memory is full; None where the engine is a device's.

    The model is not changed: streams are opened on shallow copies of it that have another engine.
    """
    backend = model.backend
    if not isinstance(backend, HostBackend):
        return None
    tokens = random_tokens(model.vocab_size, (64, model.batch_size, 1))
    timed = _Timed(backend.engine)
    outside, whole = _steps(_with_engine(model, backend, timed), tokens, steps, timed)
    _, alone = _steps(_with_engine(model, backend, _Null(backend.engine)), tokens, 10 * steps, None)
    step, in_step = whole.p50 * 1e3, outside.p50 * 1e3
    return Overhead(in_step=in_step, without_engine=alone.p50 * 1e3, step=step, share=in_step / step)


def _with_engine(model: Model, backend: HostBackend, engine: Engine) -> Model:
    other = copy.copy(model)
    other.backend = replace(backend, engine=engine)
    return other


def _steps(model: Model, tokens: Ids, steps: int, engine: _Timed | None) -> tuple[Percentiles, Percentiles]:
    """Times of steps outside the engine's calls, and of whole steps."""
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
