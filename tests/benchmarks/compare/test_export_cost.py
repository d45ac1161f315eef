"""What an export costs is counted in parts, of a model of each kind."""

from __future__ import annotations

from pathlib import Path

import export_cost
import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(export_cost.MODELS))
def test_every_part_of_an_export_is_counted(name):
    found = export_cost.measured(ROOT, name, 2)
    assert list(found) == list(export_cost.PARTS)
    assert all(seconds > 0 for seconds in found.values())
