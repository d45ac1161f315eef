"""What the command line draws."""

from __future__ import annotations

import math

import pytest

from txl_deploy.console import curve


def test_a_curve_has_a_bar_for_every_value_and_the_largest_is_the_highest():
    title, top, *_, last = curve([0.5, 1.0], "errors").splitlines()
    assert (title, top[-2:], last[-1]) == ("errors", " █", "2")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_marked_and_the_rest_is_drawn(value):
    lines = curve([0.5, value, 1.0], "errors").splitlines()
    assert lines[1].endswith("1 ┤ !█")
    assert all(line.endswith("█!█") for line in lines[4:7])


def test_nothing_finite_at_all_is_drawn_as_well():
    assert "!!!" in curve([math.nan] * 3, "errors")
