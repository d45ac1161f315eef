"""A soak finds what it looks for: growth, drift, and models that are neither version. The run itself is a slow test."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import soak
import soak_page

STEPS, WINDOWS = 1_000_000, 200


def samples(**changed: Any) -> list[dict[str, Any]]:
    """A flat run, as it is measured; what is changed is a function of the share of the run that is over."""
    draws = np.random.default_rng(0)
    flat: dict[str, Any] = {"resident": 90e6, "allocated": 30e6, "python": 120e3, "descriptors": 6, "threads": 4}
    flat |= {"files": 9, "mapped": 200, "mappings": 350, "p50": 1.0, "p99": 2.0, "max": 9.0}
    found = []
    for window in range(1, WINDOWS + 1):
        sample = {"step": window * STEPS // WINDOWS, **flat}
        sample |= {name: value(window / WINDOWS) for name, value in changed.items()}
        for name in ("resident", "allocated"):
            sample[name] += 1e5 * draws.normal()
        found.append(sample)
    return found


def document() -> dict[str, Any]:
    """A run in which nothing was wrong."""
    looks = [
        {"step": step, "fill_exact": True, "memory": 1e-6, "memory_fresh": 1e-6, "logprobs": 1e-5}
        | {"logprobs_fresh": 1e-5, "mean": 1e-6}
        for step in range(20)
    ]
    own = {"count_exact": True, "looks": [{"step": 10, "bundle": [1e-6] * 3, "float32": [1e-6] * 3}]}
    reloads = {"wrong": [], "loads": 30, "replacements": 20, "seconds": [0.1]}
    return {
        "samples": samples(),
        "held": looks,
        "own": own,
        "reloads": reloads,
        "seconds": 1.0,
        "operations": {"decode": 1},
    }


def test_a_flat_run_is_well() -> None:
    assert soak.verdicts(document()) == []
    growth = soak_page.slope(samples(), "resident")
    assert growth is not None
    assert abs(growth[0]) < 2 * growth[1] < 1, "the interval holds the truth, which is 0"


@pytest.mark.parametrize("name", ["descriptors", "threads", "files", "mapped", "mappings"])
def test_what_is_left_open_is_found_among_what_is_open_for_a_while(name: str) -> None:
    blinking = samples(**{name: lambda share: 300 + (50 if int(share * WINDOWS) % 3 else 0)})
    assert soak_page.leaks(blinking) == []
    leaking = samples(**{name: lambda share: 300 + int(200 * share) + (50 if int(share * WINDOWS) % 3 else 0)})
    assert [line.split()[0] for line in soak_page.leaks(leaking)] == [name]


@pytest.mark.parametrize("name", ["resident", "allocated"])
def test_memory_that_grows_steadily_is_found(name: str) -> None:
    (said,) = soak_page.leaks(samples(**{name: lambda share: 90e6 + 8e6 * share}))
    assert said.startswith(f"{name} memory grows by")
    slope = soak_page.slope(samples(**{name: lambda share: 90e6 + 8e6 * share}), name)
    assert slope is not None
    assert slope[0] == pytest.approx(8, abs=2 * slope[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["held"][3].update(logprobs=2e-4), "step 3: log-probabilities are"),
        (lambda d: d["held"][3].update(logprobs_fresh=2e-4), "step 3: log-probabilities are"),
        (lambda d: d["held"][-1].update(memory=2e-4), "step 19: the memory is"),
        (lambda d: d["held"][4].update(fill_exact=False), "step 4: the stream remembers"),
        (lambda d: [look.update(mean=4e-6) for look in d["held"][-5:]], "mean errors went from"),
        (lambda d: d["own"].update(count_exact=False), "a count of steps"),
        (lambda d: d["own"]["looks"][0].update(bundle=[1e-6, 9e-6, 1e-6]), "own step 10"),
        (lambda d: d["reloads"]["wrong"].append("a model answered as neither version"), "a model answered as neither"),
        (lambda d: d["reloads"].update(replacements=0), "the bundle was never replaced"),
    ],
)
def test_each_verdict_is_reached(change: Any, said: str) -> None:
    found = copy.deepcopy(document())
    change(found)
    (line,) = soak.verdicts(found)
    assert line.startswith(said)
