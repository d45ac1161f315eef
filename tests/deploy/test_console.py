"""Drawings of the command line."""

from __future__ import annotations

import math

import pytest

from txl_deploy import console
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


@pytest.mark.parametrize("width", [40, 60, 74, 80])
def test_no_line_of_a_curve_is_longer_than_the_terminal(width, monkeypatch):
    monkeypatch.setattr(console.stdout, "width", width)
    lines = curve([1.0] * 1234, "errors").splitlines()
    assert max(map(len, lines)) <= min(width, 75)
    assert min(width, 75) - max(map(len, lines)) < 12, "it is not much shorter either"
    assert lines[-1].endswith("segment 1 … 1234")


def test_a_curve_of_zeros_is_said_in_words():
    assert curve([0.0] * 30, "errors") == "errors: 0 in all 30 segments"
    assert curve([0], "errors") == "errors: 0 in the only segment"
