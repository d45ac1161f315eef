"""Errors counted by decades: every size in one bin, whatever it is, and as NumPy counts them."""

from __future__ import annotations

import numpy as np
import pytest
from txl_export.proof.decades import EDGES, KL_EDGES, counts_of


@pytest.mark.parametrize("known", [True, False])
def test_sizes_are_counted_as_a_histogram_counts_them(known: bool):
    sizes = 10.0 ** np.random.default_rng(0).uniform(-12, 2, (50, 40))
    found = counts_of(sizes, largest=float(sizes.max()) if known else None)
    expected, _ = np.histogram(sizes, [0, *EDGES, np.inf])
    assert found.tolist() == expected.tolist()
    assert sum(counts_of([])) == 0


def test_an_edge_belongs_to_the_decade_above_it():
    assert counts_of([1e-9, 1e-4, 1.0]).tolist() == [0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert counts_of([0.0, np.nextafter(1e-9, 0), np.nextafter(1.0, 0)]).tolist() == [2, *[0] * 8, 1, 0]
    assert counts_of([-1e-17, 2e-15, 1e-13, 2.0], KL_EDGES).tolist() == [1, 1, 0, 1, *[0] * 12, 1]
    assert counts_of([1e-4, 1e-6], largest=1e-4).tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0], "the largest one, too"


def test_what_is_no_number_counts_as_infinitely_large():
    sizes = np.array([1e-5, np.nan, np.inf])
    assert counts_of(sizes, largest=float(sizes.max())).tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 2]
