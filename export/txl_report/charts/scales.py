"""Map values to places along an axis, and choose the axis's ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from txl_report.numbers import fixed, power_of_ten

MOST_TICKS = 6
"""Maximum number of ticks of an axis."""
_LEAST, _MOST = 1e-250, 1e250
"""Limits of the values that are drawn: within them, quotients of two values are finite. No measurement lies outside."""


@dataclass(frozen=True)
class Scale:
    """An axis: its range of values, and its ticks.

    Attributes:
        low, high: the values at the two ends, `low` < `high`.
        ticks: values and their labels, in order.
        log: True for a logarithmic axis.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float | None:
        """Return the place of a value, 0 … 1 from `low` to `high`, clipped; None for NaN, ∞, or 0 on a log axis."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return None
        low, high, place = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        return min(max((place - low) / (high - low), 0.0), 1.0)


def linear_scale(values: Iterable[float], *, zero: bool = False, most: int = MOST_TICKS) -> Scale:
    """Make an axis whose ticks are round numbers and whose ends are ticks; with `zero`, the axis includes 0."""
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
    """Make an axis from exactly `low` to `high`; its ticks are the round numbers in between."""
    if not high > low:
        high = low + 1
    step = _round_step((high - low) / (most - 1))
    return Scale(low, high, _ticks(step, math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)))


def log_scale(values: Iterable[float], most: int = MOST_TICKS) -> Scale:
    """Make a logarithmic axis of whole powers of ten around all values above 0."""
    low, high = _ends(value for value in values if math.isfinite(value) and value > _LEAST)
    first = math.floor(math.log10(low) + 1e-9) if low > 0 else 0
    last = max(math.ceil(math.log10(high) - 1e-9) if high > 0 else 1, first + 1)
    every = -(-(last - first) // (most - 1))
    ticks = tuple((10.0**power, power_of_ten(power)) for power in range(first, last + 1, every))
    return Scale(10.0**first, 10.0**last, ticks, log=True)


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """Return the smallest and the largest value within the limits; if they differ only by rounding, one value twice."""
    finite = [value if abs(value) > _LEAST else 0.0 for value in values if abs(value) < _MOST]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    return low, low if high - low <= 1e-12 * max(abs(low), abs(high)) else high


def _round_step(rough: float) -> float:
    """Return the next larger of 1, 2, 5 or 10 times a power of ten: 5 for 3.2."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _ticks(step: float, first: int, last: int) -> tuple[tuple[float, str], ...]:
    """Return multiples of a step with their labels, e.g. "0.25" for a step of 0.05, with the step's decimals."""
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    multiples = ((index * step) for index in range(first, last + 1))
    return tuple((value, fixed(float(f"{value:.12g}"), places)) for value in multiples)
