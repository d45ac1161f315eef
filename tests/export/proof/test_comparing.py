"""The distance of values from what is right: relative to what, and what counts as infinitely far."""

from __future__ import annotations

import math

import numpy as np
import pytest
from txl_export.proof.comparing import PIECE, TensorErrors


def errors(expected: list[float], found: list[float], nats: bool = False) -> TensorErrors:
    result = TensorErrors(nats=nats)
    result.add((np.array(expected), np.array(found, np.float32)))
    return result


def test_errors_are_relative_to_the_largest_value_so_far_from_one_on():
    small, large = errors([0.1, 0.2], [0.1, 0.3]), errors([10, -100], [10, -101])
    assert small.largest == pytest.approx(0.1, rel=1e-6)
    assert large.largest == pytest.approx(0.01, rel=1e-6)
    large.add((np.array([1.0]), np.array([2.0])))
    assert large.tensor.most == pytest.approx([0.01, 0.01])
    assert large.tensor.mean == pytest.approx([0.005, 0.01])


def test_values_that_stand_for_never_say_nothing_of_the_size_and_are_compared_with_themselves():
    found = errors([-1e30, 0.5], [-1e30, 0.5001])
    assert found.largest == pytest.approx(1e-4, rel=1e-3)
    assert errors([-1e30], [-2e30]).largest == pytest.approx(1)
    assert errors([-math.inf, 1], [-math.inf, 1]).largest == 0
    assert errors([-math.inf], [0]).largest == math.inf


@pytest.mark.parametrize("masked", [-1e4, -65504, -1e8])
def test_one_large_value_does_not_hide_errors_beside_it(masked):
    found = errors([masked, 0.5], [masked, 0.51])
    assert found.largest == pytest.approx(1e-2, rel=1e-3)
    found.add((np.array([0.5]), np.array([0.51])))
    assert found.tensor.most[1] == pytest.approx(1e-2), "nor later on"
    assert errors([masked, 0.5], [masked * 1.01, 0.5]).largest == pytest.approx(1e-2, rel=1e-3)
    half = errors([masked, 0.5, -0.5], [masked, 0.51, -0.49])
    assert half.deviation == pytest.approx(0.02, rel=1e-3)


def test_where_most_values_are_large_they_are_what_the_deviation_is_relative_to():
    values = np.random.default_rng(0).normal(0, 1e5, 10_000)
    found = TensorErrors()
    found.add((values, values + 100))
    assert found.deviation == pytest.approx(1e-3, rel=0.02)


def test_log_probabilities_differ_by_nats_except_where_they_mean_never():
    assert errors([-50, -0.1], [-50, -0.2], nats=True).largest == pytest.approx(0.1, rel=1e-4)
    assert errors([-1e4, -0.1], [-1.1e4, -0.1], nats=True).largest == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_infinitely_far(value):
    found = errors([0.0, 1.0], [0.0, value])
    assert found.largest == found.deviation == math.inf


def test_another_shape_is_infinitely_far():
    found = errors([0.0, 1.0], [0.0])
    assert found.shapes == 1
    assert found.largest == math.inf


def test_many_values_are_compared_some_at_a_time_and_as_one():
    draws = np.random.default_rng(0)
    expected = draws.standard_normal((3, PIECE // 2))
    found = expected + 1e-3
    found[2, 7] += 1
    whole, parts = TensorErrors(), TensorErrors()
    whole.add((expected, found))
    parts.add(*zip(expected, found, strict=True))
    for attribute in ("largest", "deviation", "spread"):
        assert getattr(whole, attribute) == pytest.approx(getattr(parts, attribute), rel=1e-12)
    assert whole.tensor.mean == pytest.approx(parts.tensor.mean, rel=1e-12)
    assert whole.largest == pytest.approx(1.001 / np.abs(expected).max())


def test_the_deviation_is_relative_to_the_spread_of_the_values():
    draws = np.random.default_rng(0)
    values = draws.normal(5, 2, 10_000)
    found = TensorErrors()
    for part in np.split(values, 10):
        found.add((part, part + 0.02))
    assert found.deviation == pytest.approx(0.01, rel=0.02)
    assert errors([3, 3], [3.03, 3.03]).deviation == pytest.approx(0.01, rel=1e-3), "all alike: of their size"
    assert errors([0, 0], [0, 0]).deviation == 0
