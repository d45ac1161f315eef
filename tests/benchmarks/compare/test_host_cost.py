"""The benchmark of what Python costs around a step on a device."""

from __future__ import annotations

import sys
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


@pytest.mark.parametrize("sides", [host_cost.NEW, (*host_cost.OLD, *host_cost.NEW)])
def test_both_ways_are_rows_and_an_old_checkout_may_be_left_out(sides: tuple[str, ...]) -> None:
    answers = {
        side: [{"tenth": 2000.0 * (1 + place), "median": 9000.0, "calls": 9}] for place, side in enumerate(sides)
    }
    lines = host_cost._table({f"decode: {way}": answers for way in host_cost.WAYS}).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| decode: recorded", "| decode: singly"]
    assert "1 thread" in lines[0]
    assert {line.count("|") for line in lines} == {len(sides) + 4 + (2 if len(sides) == 3 else 0)}
    assert "| 9.0 (9.0 … 9.0) | 9" in lines[2]
    assert ("2.00 (2.00 … 2.00)" in lines[2]) == (len(sides) == 3)


def test_a_checkout_that_is_none_is_refused_before_bundles_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_cost, "export_bundles", lambda *_: pytest.fail("bundles were exported"))
    for sources in ([tmp_path / "nowhere"], [ROOT, "--new", tmp_path]):
        monkeypatch.setattr(sys, "argv", ["host_cost.py", *map(str, sources)])
        with pytest.raises(SystemExit) as ended:
            host_cost.main()
        assert ended.value.code == 2
        assert f"{sources[-1]} has no runtime/txl_runtime, expected a checkout" in capsys.readouterr().err
