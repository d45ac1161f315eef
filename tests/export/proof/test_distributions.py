"""Divergence of log-probabilities, with tokens that may not come."""

from __future__ import annotations

import math

import numpy as np
import pytest
from txl_export.proof.comparing import ChainErrors, TensorErrors
from txl_export.proof.distributions import Distributions
from txl_report.schema.verification import Chain


def compared(expected: np.ndarray, found: np.ndarray) -> tuple[ChainErrors, TensorErrors]:
    chain = ChainErrors(Chain(name="", streams=1, segments=0, positions=0, rows=[]))
    errors = TensorErrors(nats=True)
    Distributions(chain, errors, expected.shape[1]).compare(expected, found)
    errors.end_segment()
    return chain, errors


def masked() -> np.ndarray:
    """Two rows, whose last token may not come."""
    return np.array([[math.log(0.5), math.log(0.25), math.log(0.25), -math.inf]] * 2)


def test_a_token_that_may_not_come_on_either_side_lies_nowhere_between():
    chain, errors = compared(masked(), masked().astype(np.float32))
    assert max(chain.kl) < 1e-8
    assert errors.largest < 1e-6
    assert (chain.chain.decided, chain.chain.agreeing) == (2, 2)


@pytest.mark.parametrize("turned", [False, True])
def test_one_that_comes_on_one_side_is_infinitely_far(turned):
    other = masked()
    other[1, 3] = -1e4
    chain, errors = compared(*((other, masked()) if turned else (masked(), other)))
    assert math.isinf(errors.largest)
    assert math.isfinite(chain.kl[0])


def test_other_tokens_are_judged_beside_it():
    other = masked()
    other[0, :2] = other[0, 1::-1]
    chain, _ = compared(masked(), other)
    assert chain.kl[0] == pytest.approx(0.25 * math.log(2), rel=1e-9)
    assert chain.kl[1] == pytest.approx(0, abs=1e-12)
