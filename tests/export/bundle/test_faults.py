"""A bundle that is written while the disk fails, fills, dies or loses power: the old one, the new one, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stand_ins.disk import compiler, run_cases
from stand_ins.smallest import export_smallest

pytestmark = pytest.mark.skipif(compiler() is None, reason="the failing disk is C for Linux; needs gcc")
WRITING = ["open", "write", "sync", "rename", "mkdir", "unlink", "rmdir", "mmap", "truncate", "chmod", "link"]


def checked(found: dict[str, Any], least: int) -> None:
    """No case went wrong, and there were as many as there should be."""
    assert found["failures"] == []
    assert found["cases"] >= least


@pytest.mark.parametrize("scenario", ["placing, free name", "placing, force", "placing, force, no exchange"])
def test_placing_leaves_the_old_or_the_new_one_whichever_call_fails_and_wherever_it_is_stopped(tmp_path, scenario):
    checked(run_cases(tmp_path, scenario, "EIO", "kill", "interrupt", "--kinds", *WRITING), 70)


@pytest.mark.parametrize("scenario", ["placing, free name", "placing, force", "placing, force, no exchange"])
def test_placing_survives_a_loss_of_power(tmp_path, scenario):
    checked(run_cases(tmp_path, scenario, "power"), 500)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("scenario", ["export, free name", "export, force"])
def test_an_export_leaves_the_old_bundle_the_new_one_or_none(tmp_path, scenario):
    """Every tenth call; `benchmarks/soak/faults.py` tries all of them."""
    made = tmp_path / "made.txl"
    export_smallest(made)
    folder = Path(tmp_path / "faults")
    folder.mkdir()
    checked(run_cases(folder, scenario, "ENOSPC", "kill", "--step", 20, "--made", made, "--kinds", *WRITING), 6)


@pytest.mark.slow
def test_an_export_survives_a_loss_of_power(tmp_path):
    made = tmp_path / "made.txl"
    export_smallest(made)
    folder = Path(tmp_path / "faults")
    folder.mkdir()
    checked(run_cases(folder, "export, force", "power", "--step", 4, "--made", made), 300)
