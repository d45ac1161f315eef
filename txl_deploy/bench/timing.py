"""Time competitors in turns within each round, so that changes of the machine affect all of them.

A round gives every competitor one slice of time. Before each slice the process comes to rest, because the thread pools
of some engines spin for a while after their last call and would slow down the next competitor. A few untimed calls warm
up. After these, each call within the slice is one sample.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
from msgspec import Struct
from txl_report.schema.measurement import Percentiles

Work = Callable[[int], object]
"""A function that does one unit of work; its argument is the call's number, so that calls may use different tokens."""

WARM_UP_CALLS = 3
"""Number of untimed calls before every slice; there are fewer if they take longer than the slice."""
LEAST_CALLS = 3
"""Minimum number of calls per slice, even if calls are slow."""

SLEEP = 0.02
"""Seconds over which processor time is measured to see whether the process is at rest."""
AT_REST = 0.05
"""Share of one core: if all threads of a process together use less, the process is at rest."""
PATIENCE = 2.0
"""Seconds after which a process that is not at rest is timed anyway, and counted as restless."""


def percentiles(nanoseconds: Sequence[int]) -> Percentiles:
    """Return percentiles in milliseconds. With fewer than 100 samples, p99 is close to the largest sample."""
    samples = np.asarray(nanoseconds, np.float64) / 1e6
    p50, p90, p99 = (float(value) for value in np.percentile(samples, (50, 90, 99)))
    return Percentiles(calls=len(samples), p50=p50, p90=p90, p99=p99, best=float(samples.min()))


class Timed(Struct, frozen=True, kw_only=True):
    """The measurement of one competitor over its slices.

    Attributes:
        times: percentiles of single calls.
        rounds: the median of each round in milliseconds; their spread shows how steady the machine was.
        restless: number of slices that began before the process had come to rest.
        foreign: the largest share of the machine, 0 … 1, that other processes used during a slice; None except on
            Linux.
    """

    times: Percentiles
    rounds: tuple[float, ...]
    restless: int
    foreign: float | None


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def come_to_rest(patience: float = PATIENCE) -> bool:
    """Sleep until no thread of this process is busy; return False if a thread is busy after `patience` seconds.

    The function looks at processor time instead of waiting for a fixed time, because engines spin for different times.
    """
    until = time.perf_counter() + patience
    while True:
        started, busy = time.perf_counter(), time.process_time()
        time.sleep(SLEEP)
        busy = time.process_time() - busy
        if busy < AT_REST * (time.perf_counter() - started):
            return True
        if time.perf_counter() > until:
            return False


def interleave(
    works: dict[str, Work],
    *,
    rounds: int,
    slice_seconds: float,
    between: Callable[[], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Timed]:
    """Time several kinds of work in turns.

    Args:
        works: the functions to call, by name.
        rounds: number of turns of each function; consecutive rounds begin with different functions.
        slice_seconds: length of a turn in seconds; a turn has at least `LEAST_CALLS` calls.
        between: a function that is called once per round when the process is at rest, e.g. to measure the machine.
        advance: a function that is called after every slice.
    """
    names, numbers = list(works), {name: count() for name in works}
    samples: dict[str, list[list[int]]] = {name: [] for name in names}
    foreign: dict[str, list[float]] = {name: [] for name in names}
    restless = dict.fromkeys(names, 0)
    for turn in range(rounds):
        come_to_rest()
        if between is not None:
            between()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            restless[name] += not come_to_rest()
            started, before = time.perf_counter(), _foreign_seconds()
            samples[name].append(time_slice(works[name], slice_seconds, numbers[name]))
            after, took = _foreign_seconds(), time.perf_counter() - started
            if before is not None and after is not None:
                foreign[name].append(min(max((after - before) / (took * (os.cpu_count() or 1)), 0.0), 1.0))
            if advance is not None:
                advance(1)
    return {
        name: Timed(
            times=percentiles([sample for turn in samples[name] for sample in turn]),
            rounds=tuple(float(np.median(turn)) / 1e6 for turn in samples[name]),
            restless=restless[name],
            foreign=max(foreign[name], default=None),
        )
        for name in names
    }


def time_slice(work: Work, seconds: float, numbers: count[int] | None = None) -> list[int]:
    """Run one turn: untimed calls to warm up, then timed calls, in nanoseconds; `numbers` are the calls' arguments."""
    numbers = count() if numbers is None else numbers
    warm = time.perf_counter() + seconds
    for _ in range(WARM_UP_CALLS):
        work(next(numbers))
        if time.perf_counter() > warm:
            break  # if a call takes longer than a turn, one call is enough to warm up
    samples: list[int] = []
    until = time.perf_counter_ns() + int(seconds * 1e9)
    started = time.perf_counter_ns()
    while started < until or len(samples) < LEAST_CALLS:
        work(next(numbers))
        ended = time.perf_counter_ns()
        samples.append(ended - started)
        started = ended
    return samples


def _foreign_seconds() -> float | None:
    """Return the processor seconds of all other processes since a fixed moment; None if there is no /proc/stat."""
    try:
        with open("/proc/stat") as file:  # noqa: PTH123 - read before every slice: the shortest way disturbs least
            ticks = [float(value) for value in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(ticks) < 5:
        return None
    busy = sum(ticks) - ticks[3] - ticks[4]  # all time except idle and waiting for disks
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()
