"""Write numbers as text; this module writes every number on a page."""

from __future__ import annotations

import math
from decimal import Decimal

NONE = "–"
"""The sign that is shown in place of a missing number."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 3) -> str:
    """Write a measured number with `digits` significant digits; a very large or very small one with a power of ten."""
    if value is None:
        return NONE
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if -4 < exponent < 6:
        written = f"{value:,.{max(digits - 1 - exponent, 0)}f}"
        return _signed(written)
    mantissa = f"{value:.{digits - 1}e}".partition("e")[0]
    return f"{_signed(mantissa)} × {power_of_ten(exponent)}"


def power_of_ten(exponent: int) -> str:
    """Write a power of ten: 10⁻⁹; from 0.01 to 1000 as a plain number."""
    if -3 < exponent < 4:
        return f"{Decimal(10) ** exponent:f}"
    return f"10{str(exponent).translate(_RAISED)}"


def whole(value: int | None) -> str:
    """Write a count with commas: 16,385."""
    return NONE if value is None else _signed(f"{value:,d}")


def counted(value: int, one: str) -> str:
    """Write a count and its noun: "1 token", "16,385 tokens"."""
    return f"{whole(value)} {one}" if value == 1 else f"{whole(value)} {one}s"


def signed(value: float | None, digits: int = 3) -> str:
    """Write a number with its sign, even if the sign is plus."""
    written = number(value, digits)
    return written if value is None or not value > 0 else f"+{written}"


def fixed(value: float | None, places: int = 2) -> str:
    """Write a number with `places` decimals, for columns of comparable numbers."""
    if value is None or not math.isfinite(value):
        return number(value)
    return _signed(f"{value:,.{places}f}")


def share(value: float | None) -> str:
    """Write a share, 0 … 1, in percent: 34 %, but near 0 or 1 with more digits: 3.4 %, 0.340 %."""
    if value is None or not math.isfinite(value):
        return number(value)
    percent = value * 100
    if not 1e-5 <= abs(value) < 1e4 and value != 0:
        return f"{number(percent)} %"
    places = (
        0 if value in (0, 1) or 10 <= abs(percent) <= 90 or abs(percent) > 100 else 1 if 1 <= abs(percent) <= 99 else 3
    )
    return _signed(f"{percent:.{places}f}") + " %"


def size(count: int | None) -> str:
    """Write a number of bytes with a decimal prefix: 8.9 MB."""
    return NONE if count is None else prefixed(count, "B")


def quantity(count: int | None) -> str:
    """Write a count, in words from a million on: 2.0 million."""
    if count is None:
        return NONE
    for word, unit in (("billion", 1e9), ("million", 1e6)):
        if count >= unit:
            return f"{count / unit:,.1f} {word}"
    return whole(count)


def prefixed(count: int, unit: str = "B") -> str:
    """Write a count of units with a decimal prefix: 8.9 MB."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {prefix}{unit}"
    return f"{count} {unit}".strip()


def _signed(written: str) -> str:
    """Replace the hyphen with a minus sign, which is as wide as a plus sign."""
    return written.replace("-", "−")
