"""The benchmark of what Python costs around a step on a device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import host_cost  # noqa: E402


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver that does nothing is compiled by gcc")
def test_a_checkout_against_itself_costs_what_it_costs():
    command = [sys.executable, ROOT / "benchmarks" / "host_cost.py", ROOT, "--rounds", "3", "--seconds", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    _, *rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 9
    for work, old, python, c, *_, calls in rows:
        assert 0.4 < float(python) / float(old) < 2.5, f"{work}: both sides are the same"
        assert float(c) < 10_000
        assert calls == "9, 9", "launch, record, wait, and the context got, pushed and popped twice"


def test_a_checkout_that_is_none_is_refused_before_bundles_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_cost, "_export", lambda *_: pytest.fail("bundles were exported"))
    for sources in ([tmp_path / "nowhere"], [ROOT, "--new", tmp_path]):
        monkeypatch.setattr(sys, "argv", ["host_cost.py", *map(str, sources)])
        with pytest.raises(SystemExit) as ended:
            host_cost.main()
        assert ended.value.code == 2
        assert f"{sources[-1]} has no runtime/txl_runtime, expected a checkout" in capsys.readouterr().err
