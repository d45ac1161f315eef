"""What Python costs around the engine's work, per step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace

from msgspec import Struct
from txl_runtime.bundle.tables import Program
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.host.backend import HostBackend
from txl_runtime.host.engine import Engine
from txl_runtime.model import Model
from txl_runtime.streaming.loop import Backend
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Arrays, Call

from txl_deploy.bench.competitor import filling
from txl_deploy.bench.on_device import without_programs
from txl_deploy.bench.timing import Percentiles, Work, random_tokens

PYTHON, WITH_DRIVER = "Python", "Python and the driver"

Drive = Callable[[Model, Stream], Work]
"""Fills a fresh stream's state, and says what one step on it is."""


class Overhead(Struct, frozen=True, kw_only=True):
    """What Python costs per step, in microseconds (medians).

    Attributes:
        in_step: time that the stream's method spends outside the engine's call. It is measured around real calls, so
            caches are as cold as the engine leaves them. On a device a call ends before its work, so this is
            `without_engine` there.
        without_engine: a step whose engine does nothing: the same code with warm caches. On a device what remains is
            Python, the driver's calls, and waiting for the copies of a step to and from the device.
        step: a whole step with its engine.
        share: in_step / step.
        what: whose cost it is.
    """

    in_step: float
    without_engine: float
    step: float
    share: float
    what: str = PYTHON


class _Null(Engine):
    """An engine that computes nothing: what is left of a step is Python's."""

    nanoseconds = 0
    """Spent in the engine's calls so far."""

    def __init__(self, real: Engine) -> None:
        self._real, self.description, self.least_rows = real, real.description, real.least_rows
        self._returned: dict[tuple[object, ...], Arrays] = {}

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        return lambda: None

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        key = program.name, *(array.shape for array in inputs.values())
        if key not in self._returned:
            self._returned[key] = self._real.run(program, inputs)  # somebody has to know the shapes
        return self._returned[key]

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

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        started = time.perf_counter_ns()
        returned = self._real.run(program, inputs)
        self.nanoseconds += time.perf_counter_ns() - started
        return returned


def one_token(model: Model, stream: Stream) -> Work:
    """A Transformer-XL's step: all log-probabilities after one token, when the memory is full."""
    for segment in filling(model):
        stream.step(segment)
    tokens = random_tokens(model.manifest.vocab_size, (64, model.batch_size, 1))
    return lambda index: stream.step(tokens[index % len(tokens)])


def overhead(model: Model, steps: int = 300, drive: Drive = one_token) -> Overhead | None:
    """Measure what Python costs around one step when the state is full; None where nothing is known of the engine.

    The model is not changed: streams are opened on shallow copies of it that have another engine.
    """
    backend = model.backend
    if isinstance(backend, DeviceBackend):
        _, whole = _steps(model, backend, None, steps, drive)
        _, alone = _steps(model, without_programs(backend), None, 10 * steps, drive)
        step, in_step = whole.p50 * 1e3, alone.p50 * 1e3
        return Overhead(in_step=in_step, without_engine=in_step, step=step, share=in_step / step, what=WITH_DRIVER)
    if not isinstance(backend, HostBackend):
        return None
    timed, null = _Timed(backend.engine), _Null(backend.engine)
    outside, whole = _steps(model, replace(backend, engine=timed), timed, steps, drive)
    _, alone = _steps(model, replace(backend, engine=null), null, 10 * steps, drive)
    step, in_step = whole.p50 * 1e3, outside.p50 * 1e3
    return Overhead(in_step=in_step, without_engine=alone.p50 * 1e3, step=step, share=in_step / step)


def _steps(
    model: Model, backend: Backend, engine: _Null | None, steps: int, drive: Drive
) -> tuple[Percentiles, Percentiles]:
    """Times of steps outside the engine's calls, where those are timed, and of whole steps."""
    other = copy.copy(model)
    other.backend = backend
    step = drive(other, other.stream())
    outside, whole = [], []
    for index in range(-10, steps):
        before = engine.nanoseconds if engine else 0
        started = time.perf_counter_ns()
        step(index)
        took = time.perf_counter_ns() - started
        if index >= 0:
            whole.append(took)
            outside.append(took - ((engine.nanoseconds if engine else 0) - before))
    return Percentiles.of(outside), Percentiles.of(whole)
