"""Timing in turns by processor time: what other processes do on the machine then counts for little."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np
from msgspec import Struct

from txl_deploy.bench.timing import Work, come_to_rest, time_slice

__all__ = ["Timed", "in_turns", "ratio"]


class Timed(Struct, frozen=True, kw_only=True):
    """Of one way, all in µs.

    Attributes:
        cpu: processor time of a call in each round, threads of the engine included.
        p50, p99: of the wall time of single calls.
    """

    cpu: tuple[float, ...]
    p50: float
    p99: float

    @property
    def median(self) -> float:
        """Processor time of a call."""
        return statistics.median(self.cpu)


def in_turns(works: Mapping[str, Work], rounds: int, seconds: float) -> dict[str, Timed]:
    """Time each kind of work once a round, for so many seconds; every round begins with another one."""
    names = list(works)
    numbers = {name: count() for name in names}
    cpu, wall = ({name: list[float]() for name in names} for _ in range(2))
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            come_to_rest()
            started, before = next(numbers[name]), time.process_time()
            samples = time_slice(works[name], seconds, numbers[name])
            used = time.process_time() - before
            cpu[name].append(1e6 * used / (next(numbers[name]) - started - 1))
            wall[name] += [sample / 1e3 for sample in samples]
    return {
        name: Timed(
            cpu=tuple(cpu[name]), p50=float(np.percentile(wall[name], 50)), p99=float(np.percentile(wall[name], 99))
        )
        for name in names
    }


def ratio(ours: Timed, others: Sequence[Timed]) -> float | None:
    """How many times as long ours takes as the fastest of the others, the median over rounds; None without others."""
    if not others:
        return None
    best = min(others, key=lambda timed: timed.median)
    return statistics.median(one / other for one, other in zip(ours.cpu, best.cpu, strict=True))
