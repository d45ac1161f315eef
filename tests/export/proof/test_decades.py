"""Errors counted by decades: every size in one bin, whatever it is, and as NumPy counts them."""

from __future__ import annotations

import numpy as np
import pytest
from txl_export.proof.decades import EDGES, KL_EDGES, Decades, decades_of, joined


@pytest.mark.parametrize("known", [True, False])
def test_sizes_are_counted_as_a_histogram_counts_them(known: bool):
    sizes = 10.0 ** np.random.default_rng(0).uniform(-12, 2, (50, 40))
    found = Decades()
    for part in np.split(sizes, 5):
        found.add(part, float(part.max()) if known else None)
    expected, _ = np.histogram(sizes, [0, *EDGES, np.inf])
    assert found.found() == tuple(expected.tolist())


def test_an_edge_belongs_to_the_decade_above_it():
    assert decades_of([1e-9, 1e-4, 1.0]).found() == (0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1)
    assert decades_of([0.0, np.nextafter(1e-9, 0), np.nextafter(1.0, 0)]).found() == (2, *[0] * 8, 1, 0)
    assert decades_of([-1e-17, 2e-15, 1e-13, 2.0], KL_EDGES).found() == (1, 1, 0, 1, *[0] * 12, 1)


def test_a_largest_size_on_an_edge_lies_above_it():
    found = Decades()
    found.add(np.array([1e-4, 1e-6]), 1e-4)
    assert found.found() == decades_of([1e-4, 1e-6]).found() == (0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0)


def test_what_is_no_number_counts_as_infinitely_large():
    found, sizes = Decades(), np.array([1e-5, np.nan, np.inf])
    found.add(sizes, float(sizes.max()))
    assert found.found() == (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 2)


def test_parts_are_joined_and_nothing_is_nothing():
    assert joined([decades_of([1e-3]), decades_of([1e-3, 5])]).found() == (0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 1)
    assert sum(joined([]).found()) == sum(decades_of([]).found()) == 0
