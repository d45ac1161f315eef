"""From values to places along an axis, and the ticks that an axis shows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from txl_report.numbers import fixed, power_of_ten

MOST_TICKS = 6
_LEAST, _MOST = 1e-250, 1e250
"""Numbers whose quotients are numbers too; nobody measures others."""


@dataclass(frozen=True)
class Scale:
    """An axis: which values it spans, and where its ticks are.

    Attributes:
        low, high: the values at its two ends, `low` < `high`.
        ticks: values and what is written beside them, in order.
        log: whether equal distances are equal factors.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float | None:
        """Where a value lies, 0 … 1 from `low` to `high`, held within; None where it has no place."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return None
        low, high, found = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        return min(max((found - low) / (high - low), 0.0), 1.0)


def linear_scale(values: Iterable[float], *, zero: bool = False, most: int = MOST_TICKS) -> Scale:
    """An axis whose ticks are round numbers and whose ends are ticks; with `zero` one that begins or ends there."""
    low, high = _ends(value for value in values if math.isfinite(value))
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if not high > low:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
        low = 0.0 if zero and low > 0 else low
    step = _round_step((high - low) / (most - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = _ticks(step, first, last)
    return Scale(ticks[0][0], ticks[-1][0], ticks)


def exact_scale(low: float, high: float, *, most: int = MOST_TICKS) -> Scale:
    """An axis that ends where it is told to; its ticks are the round numbers within."""
    if not high > low:
        high = low + 1
    step = _round_step((high - low) / (most - 1))
    return Scale(low, high, _ticks(step, math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)))


def log_scale(values: Iterable[float], most: int = MOST_TICKS) -> Scale:
    """An axis of whole powers of ten around all values above 0."""
    low, high = _ends(value for value in values if math.isfinite(value) and value > _LEAST)
    first = math.floor(math.log10(low) + 1e-9) if low > 0 else 0
    last = max(math.ceil(math.log10(high) - 1e-9) if high > 0 else 1, first + 1)
    every = -(-(last - first) // (most - 1))
    ticks = tuple((10.0**power, power_of_ten(power)) for power in range(first, last + 1, every))
    return Scale(10.0**first, 10.0**last, ticks, log=True)


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest value; alike where they differ by rounding alone, without any beyond all reason."""
    found = [value if abs(value) > _LEAST else 0.0 for value in values if abs(value) < _MOST]
    low, high = (min(found), max(found)) if found else (0.0, 0.0)
    return low, low if high - low <= 1e-12 * max(abs(low), abs(high)) else high


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5, 10 … times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _ticks(step: float, first: int, last: int) -> tuple[tuple[float, str], ...]:
    """Multiples of a step, written with as many places as the step has."""
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    multiples = ((index * step) for index in range(first, last + 1))
    return tuple((value, fixed(float(f"{value:.12g}"), places)) for value in multiples)
