"""Measure the cost of Python per step, outside the engine's work."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from txl_report.schema.measurement import Overhead, Percentiles
from txl_runtime.bundle.tables import Program
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.host.backend import HostBackend
from txl_runtime.host.engine import Engine
from txl_runtime.streaming.loop import Backend
from txl_runtime.types import Arrays, Call

from txl_deploy.bench.competitor import fill
from txl_deploy.bench.on_device import without_programs
from txl_deploy.bench.timing import percentiles
from txl_deploy.bench.works import Works

PYTHON, WITH_DRIVER = "Python", "Python and the driver"
"""Names of the part of a step that is measured on the CPU, and of the part that is measured on a device."""


class _Null(Engine):
    """An engine that computes nothing, so that the whole time of a step is Python's."""

    nanoseconds = 0
    """Nanoseconds spent in the engine's calls so far."""

    def __init__(self, real: Engine) -> None:
        self._real, self.description, self.least_rows = real, real.description, real.least_rows
        self._returned: dict[tuple[object, ...], Arrays] = {}

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        return lambda: None

    def kept(self, program: Program) -> Collection[str]:
        return self._real.kept(program)

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        key = program.name, *(array.shape for array in inputs.values())
        if key not in self._returned:
            self._returned[key] = self._real.run(program, inputs)  # run the real engine once to get the shapes
        return self._returned[key]

    def release_pages(self) -> None:
        self._real.release_pages()


class _Timed(_Null):
    """The real engine, which measures the time of its calls."""

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


class _Puts:
    """A timer of the calls by which a loop puts its steps, with their launches, into a device's queue."""

    nanoseconds = 0

    def watch(self, loop: Any) -> None:
        run = loop.run

        def timed(*given: Any, **named: Any) -> Any:
            started = time.perf_counter_ns()
            result = run(*given, **named)
            self.nanoseconds += time.perf_counter_ns() - started
            return result

        loop.run = timed


def overhead(works: Works, steps: int = 300) -> Overhead | None:
    """Measure the cost of Python per step with a full state; return None if the backend's engine cannot be replaced.

    The model is not changed: streams are opened on shallow copies of it with a different engine.
    """
    backend = works.model.backend
    if isinstance(backend, DeviceBackend):
        waiting, whole = _steps(works, backend, _Puts(), steps)
        _, alone = _steps(works, without_programs(backend), None, 10 * steps)
        step, in_step = whole.p50 * 1e3, alone.p50 * 1e3
        put = max(step - waiting.p50 * 1e3, 0.0)
        share = in_step / step
        return Overhead(in_step=in_step, without_engine=in_step, step=step, share=share, what=WITH_DRIVER, put=put)
    if not isinstance(backend, HostBackend):
        return None
    timed, null = _Timed(backend.engine), _Null(backend.engine)
    outside, whole = _steps(works, replace(backend, engine=timed), timed, steps)
    _, alone = _steps(works, replace(backend, engine=null), null, 10 * steps)
    step, in_step = whole.p50 * 1e3, outside.p50 * 1e3
    return Overhead(in_step=in_step, without_engine=alone.p50 * 1e3, step=step, share=in_step / step)


def _steps(works: Works, backend: Backend, engine: _Null | _Puts | None, steps: int) -> tuple[Percentiles, Percentiles]:
    """Return two results: the times of steps without the part that `engine` measures, and of whole steps."""
    model = copy.copy(works.model)
    model.backend = backend
    other = Works(model)
    fill(other.ours, model)
    if isinstance(engine, _Puts):
        engine.watch(other.ours.stream.loop)
    step = other.call(other.ours, other.shortest)
    outside, whole = [], []
    for index in range(-10, steps):
        before = engine.nanoseconds if engine else 0
        started = time.perf_counter_ns()
        step(index)
        took = time.perf_counter_ns() - started
        if index >= 0:
            whole.append(took)
            outside.append(took - ((engine.nanoseconds if engine else 0) - before))
    return percentiles(outside), percentiles(whole)
