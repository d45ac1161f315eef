"""What an export costs is counted in parts, of a model of each kind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import export_cost  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("name", list(export_cost.MODELS))
def test_every_part_of_an_export_is_counted(name):
    found = export_cost.measured(ROOT, name, 2)
    assert list(found) == list(export_cost.PARTS)
    assert all(seconds > 0 for seconds in found.values())
