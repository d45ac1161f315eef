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
from txl_runtime.types import Arrays, Call

from txl_deploy.bench.competitor import filling
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

    nanoseconds = 0
    """Spent in the engine's calls so far."""

    def __init__(self, real: Engine) -> None:
        self._real, self.description, self.least_rows = real, real.description, real.least_rows

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        return lambda: None

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        return self._real.run(program, inputs)

    def release_pages(self) -> None:
        self._real.release_pages()


class _Timed(_Null):
    """The real engine; its calls are timed."""

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
    outside, whole = _steps(model, backend, _Timed(backend.engine), steps)
    _, alone = _steps(model, backend, _Null(backend.engine), 10 * steps)
    step, in_step = whole.p50 * 1e3, outside.p50 * 1e3
    return Overhead(in_step=in_step, without_engine=alone.p50 * 1e3, step=step, share=in_step / step)


def _steps(model: Model, backend: HostBackend, engine: _Null, steps: int) -> tuple[Percentiles, Percentiles]:
    """Times of steps outside the engine's calls, and of whole steps."""
    other = copy.copy(model)
    other.backend = replace(backend, engine=engine)
    stream = other.stream()
    for segment in filling(model):
        stream.step(segment)
    tokens = random_tokens(model.manifest.vocab_size, (64, model.batch_size, 1))
    outside, whole = [], []
    for index in range(-10, steps):
        ids = tokens[index % len(tokens)]
        before = engine.nanoseconds
        started = time.perf_counter_ns()
        stream.step(ids)
        took = time.perf_counter_ns() - started
        if index >= 0:
            whole.append(took)
            outside.append(took - (engine.nanoseconds - before))
    return Percentiles.of(outside), Percentiles.of(whole)
