"""Numbers as they are written."""

from __future__ import annotations

import math

import pytest
from txl_report.numbers import counted, fixed, number, power_of_ten, quantity, share, signed, size, whole


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (0.0, "0"),
        (1.0, "1.00"),
        (9.9999, "10.0"),
        (0.00012345, "1.23 × 10⁻⁴"),
        (0.0012345, "0.00123"),
        (-8.669e-6, "−8.67 × 10⁻⁶"),
        (123456.0, "123,456"),
        (999999.9, "1.00 × 10⁶"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "not a number"),
    ],
)
def test_measured_numbers_have_three_digits(value: float | None, expected: str):
    assert number(value) == expected


def test_counts_sizes_and_shares():
    assert [counted(0, "row"), counted(1, "row"), counted(16385, "row")] == ["0 rows", "1 row", "16,385 rows"]
    assert [whole(None), whole(16385), whole(-3)] == ["–", "16,385", "−3"]
    assert [size(0), size(999), size(8_700_000), size(None)] == ["0 B", "999 B", "8.7 MB", "–"]
    assert [quantity(1_974_784), quantity(512), quantity(2 * 10**9)] == ["2.0 million", "512", "2.0 billion"]
    assert [share(0), share(1), share(0.5), share(0.01), share(0.99999), share(9e-9), share(1.5)] == [
        "0 %",
        "100 %",
        "50 %",
        "1.0 %",
        "99.999 %",
        "9.00 × 10⁻⁷ %",
        "150 %",
    ]
    assert [signed(0.5), signed(-0.5), signed(0.0), signed(None)] == ["+0.500", "−0.500", "0", "–"]
    assert [fixed(1234.5), fixed(math.inf), fixed(-0.001)] == ["1,234.50", "∞", "−0.00"]
    assert [power_of_ten(-9), power_of_ten(-1), power_of_ten(0), power_of_ten(12)] == ["10⁻⁹", "0.1", "1", "10¹²"]
