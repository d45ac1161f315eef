"""Engines that are put into a bundle while the disk fails, the process dies or the power goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stand_ins.disk import compiler, run_cases
from stand_ins.smallest import export_smallest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="the failing disk is C for Linux; needs gcc"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "made.txl"
    export_smallest(path)
    return path


def checked(found: dict[str, Any], least: int) -> None:
    """No case went wrong, and there were as many as there should be."""
    assert found["failures"] == []
    assert found["cases"] >= least


def test_the_model_is_whole_and_every_engine_that_is_listed_whichever_call_fails(tmp_path, made):
    checked(run_cases(tmp_path, "engines", "EIO", "kill", "--step", 3, "--made", made), 30)


def test_engines_survive_a_loss_of_power(tmp_path, made):
    checked(run_cases(tmp_path, "engines", "power", "--made", made), 500)


def test_a_build_leaves_a_bundle_that_loads_and_the_next_one_finishes_it(tmp_path, made):
    checked(run_cases(tmp_path, "build", "kill", "--step", 8, "--made", made), 10)
