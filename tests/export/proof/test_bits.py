"""Bits that have to be the same."""

from __future__ import annotations

import numpy as np
import pytest
from txl_export.proof.bits import differing_values


@pytest.mark.parametrize(
    ("expected", "found", "differing"),
    [
        (np.zeros((2, 0)), np.zeros((2, 0)), 0),
        (np.zeros(3, np.float32), np.array([0, -0.0, 1], np.float32), 2),
        (np.full(2, np.nan), np.full(2, np.nan), 0),
        (np.zeros(3, np.float32), np.zeros(3), 3),
        (np.zeros((0, 2)), np.zeros((1, 2)), 2),
        (np.array(7, np.int32), np.array(8, np.int32), 1),
    ],
    ids=["no rows", "a sign and a value", "NaN", "dtype", "shape", "a scalar"],
)
def test_bits_are_compared_and_not_values(expected, found, differing):
    assert differing_values(expected, found) == differing
