"""A state that goes to and fro between Python and C++, and draws of both: equal to the bit, however long it lasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conforming import Inside

from conformance.driver import packed, unpacked
from conformance.run import FOLDER
from conformance.talking import Talk

STEPS, HOP = 10_000, 100
DRAWS = 300
pytestmark = [pytest.mark.slow(keep=9), pytest.mark.timeout(1200)]  # whoever comes first builds


def opened(driver: Inside | Talk, name: str, update: str, b: int) -> None:
    """Load one of the list's bundles in a driver and open a stream of b sequences."""
    for request in (
        {"do": "load", "path": str(FOLDER / "bundles" / name), "update": update},
        {"do": "open", "b": b, "memory_length": None},
    ):
        told(driver, request)


def told(driver: Inside | Talk, request: dict[str, Any]) -> Any:
    """Return a driver's answer to a request that it does not refuse."""
    reply = driver.ask(request)
    assert "ok" in reply, reply
    return reply["ok"]


@pytest.mark.parametrize(("name", "update", "b"), [("policy-16", "replace", 2), ("ring", "ring", 2)])
def test_a_state_that_hops_to_c_and_back_is_that_of_python_alone(
    built: Path, engine: Path, name: str, update: str, b: int
) -> None:
    random, stayed, python = np.random.default_rng(7), Inside(), Inside()
    with Talk([str(built / "txl-driver")], 60.0) as c:
        for driver in (stayed, python, c):
            opened(driver, name, update, b)
        for step in range(STEPS):
            here, there = (python, c) if step // HOP % 2 == 0 else (c, python)
            if name == "ring":
                size = int(random.integers(1, 5))
                counts = random.integers(0, size + 1, b)
                inputs = {"tokens": packed(random.integers(0, 41, (b, size), np.int32))}
            else:  # it takes whole segments alone
                size = int(random.choice([1, 4]))
                counts = random.choice([0, size], b)
                inputs = {"obs": packed(random.standard_normal((b, size, 6), np.float32))}
            run = {"do": "run", "inputs": inputs, "counts": counts.tolist(), "commit": True}
            assert told(here, run) == told(stayed, run), step
            if step % HOP == HOP - 1:
                state = told(stayed, {"do": "state"})
                assert told(here, {"do": "state"}) == state, step
                told(there, {"do": "restore", "bytes": told(here, {"do": "save"})["bytes"]})
                assert told(there, {"do": "state"}) == state, step


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("cuts", [(None, None), (5, None), (None, 0.9), (20, 0.8)])
def test_what_it_draws_is_what_python_draws(
    built: Path, engine: Path, temperature: float, cuts: tuple[int | None, float | None]
) -> None:
    prompts = np.array([[5, 3, 8, 1], [2, 7, 7, 4]], np.int32)
    sampling = {"temperature": temperature, "top_k": cuts[0], "top_p": cuts[1], "seed": 2**70 + 11}
    request = {"do": "generate", "tokens": packed(prompts), "counts": [4, 3], "count": DRAWS, **sampling}
    python = Inside()
    with Talk([str(built / "txl-driver")], 60.0) as c:
        for driver in (python, c):
            opened(driver, "clusters", "ring", 2)
        found, expected = told(c, request), told(python, request)
    assert found == expected
    drawn = unpacked(found["tokens"])
    assert drawn.shape == (DRAWS, 2)
    assert temperature == 0 or len(np.unique(drawn)) > 2
