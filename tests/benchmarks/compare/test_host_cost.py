"""The benchmark of what Python costs around a step on a device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import host_cost
import pytest

ROOT = Path(__file__).parents[3]


def test_time_without_the_processor_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = iter(range(0, 10**12, 10**7)), [0]

    def call() -> None:
        used[0] += 700

    stand_in = SimpleNamespace(perf_counter_ns=lambda: next(clock), thread_time_ns=lambda: used[0])
    monkeypatch.setattr(host_cost, "time", stand_in)
    assert host_cost.timed(call, 0.1, lambda: 0) == {"tenth": 700, "median": 700, "calls": 0}
