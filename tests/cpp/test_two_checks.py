"""The check of graphs in C++ beside Python's: what one accepts, the other does, and both count the same bytes.

TXL_GRAPHS says how many random graphs of each kind there are; 20,000 were tried.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import two_checks
from two_checks import Asked, CheckInC, difference, made

GRAPHS = int(os.environ.get("TXL_GRAPHS", "500"))
pytestmark = [pytest.mark.slow(keep=20), pytest.mark.timeout(1200 + GRAPHS)]  # whoever comes first builds
SPECIAL = dict(two_checks.special())


@pytest.fixture(scope="module")
def check(built: Path) -> Iterator[CheckInC]:
    """The check in C++."""
    with CheckInC(built / "txl-graphs") as found:
        yield found


@pytest.mark.parametrize("kind", two_checks.KINDS)
def test_random_graphs_are_the_same_to_both(check: CheckInC, kind: str) -> None:
    accepted = refused = 0
    for seed in range(GRAPHS):
        asked = made(kind, seed)
        if asked is None:
            continue
        told, good = difference(asked, check)
        assert not told, f"{kind}, seed {seed}: {told}"
        accepted, refused = accepted + good, refused + (not good)
    assert min(accepted, refused) > GRAPHS // 30
    assert accepted + refused > GRAPHS // 2


@pytest.mark.parametrize("asked", SPECIAL.values(), ids=SPECIAL)
def test_special_graphs_are_the_same_to_both(check: CheckInC, asked: Asked) -> None:
    told, _ = difference(asked, check)
    assert not told
