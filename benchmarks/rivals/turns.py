"""Time several ways in turns, by processor time, which other processes on the machine hardly change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np
from msgspec import Struct

from txl_deploy.bench.timing import Work, come_to_rest, time_slice

__all__ = ["Slice", "Timed", "in_turns", "ratio"]

Slice = Callable[[float], tuple[float, list[float]]]
"""A function that works for some seconds; returns a call's processor time, and the wall times of calls, all in µs."""


class Timed(Struct, frozen=True, kw_only=True):
    """The times of one way, all in µs.

    Attributes:
        cpu: the processor time of a call in each round, with the engine's threads.
        p50, p99: percentiles of the wall time of single calls.
    """

    cpu: tuple[float, ...]
    p50: float
    p99: float

    @property
    def median(self) -> float:
        """Return the median over rounds of a call's processor time."""
        return statistics.median(self.cpu)


def in_turns(
    works: Mapping[str, Work],
    rounds: int,
    seconds: float,
    elsewhere: Mapping[str, Slice] | None = None,
    between: Callable[[], None] | None = None,
) -> dict[str, Timed]:
    """Time each way once in each round; the way that begins changes with every round.

    Args:
        works: the functions to time in this process, by way.
        rounds, seconds: the number of turns of each way, and the seconds of a turn.
        elsewhere: functions that time further ways in other processes, which sleep between their turns.
        between: a function that is called before each round, e.g. to measure the machine.
    """
    slices = {name: _slice_of(work) for name, work in works.items()} | dict(elsewhere or {})
    names = list(slices)
    cpu, wall = ({name: list[float]() for name in names} for _ in range(2))
    for turn in range(rounds):
        if between is not None:
            come_to_rest()
            between()
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            come_to_rest()
            used, samples = slices[name](seconds)
            cpu[name].append(used)
            wall[name] += samples
    return {
        name: Timed(
            cpu=tuple(cpu[name]), p50=float(np.percentile(wall[name], 50)), p99=float(np.percentile(wall[name], 99))
        )
        for name in names
    }


def _slice_of(work: Work) -> Slice:
    numbers = count()

    def run(seconds: float) -> tuple[float, list[float]]:
        started, before = next(numbers), time.process_time()
        samples = time_slice(work, seconds, numbers)
        used = time.process_time() - before
        return 1e6 * used / (next(numbers) - started - 1), [sample / 1e3 for sample in samples]

    return run


def ratio(ours: Timed, others: Sequence[Timed]) -> float | None:
    """Return the median over rounds of our time divided by that of the fastest of `others`; None without others."""
    if not others:
        return None
    best = min(others, key=lambda timed: timed.median)
    return statistics.median(one / other for one, other in zip(ours.cpu, best.cpu, strict=True))
