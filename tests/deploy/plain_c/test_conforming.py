"""The conformance list over packages in plain C: what a step, a reset and a copied struct can do of it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from conforming import FOLDER, TESTS
from txl_runtime.listener import Silent

from conformance.run import Conformance

DRIVER = sys.executable, str(TESTS / "conformance" / "plain_c_driver.py")
PASSED = {
    "policy-1": 7,
    "policy-16": 8,
    "lookahead": 8,
    "lockstep": 7,
    "axes": 8,
    "table": 8,
    "ring": 12,
    "hidden": 9,
    "clusters": 6,
    "zeros": 6,
    "int8": 6,
    "release-0.8": 6,
}
"""Vectors by bundle that are for nothing but what a package promises."""
pytestmark = [
    pytest.mark.slow(keep=2),
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler of C (cc)"),
]


@pytest.fixture
def rolled_list(tmp_path: Path) -> Path:
    """The list with rolled memory wherever it asks for a ring: the answers are the same."""
    for name in ("bundles", "bad_bundles", "index.json"):
        (tmp_path / name).symlink_to(FOLDER / name)
    (tmp_path / "vectors").mkdir()
    for path in (FOLDER / "vectors").iterdir():
        text = path.read_text().replace('"update":"ring"', '"update":"rolled"')
        assert '"ring"' not in text
        (tmp_path / "vectors" / path.name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("bundle", PASSED)
def test_a_package_keeps_what_the_list_asks_of_a_step(bundle: str, rolled_list: Path) -> None:
    (tally,) = Conformance(rolled_list, DRIVER, 300.0, [bundle]).run(Silent())
    assert not tally.failures
    assert tally.passed == PASSED[bundle]
    assert tally.largest is not None
    assert tally.largest <= (tally.limit or 0.0)


@pytest.mark.parametrize("bundle", ["growing", "half", "stages"])
def test_what_no_package_is_made_of_is_said_to_be_unsupported(bundle: str, rolled_list: Path) -> None:
    (tally,) = Conformance(rolled_list, DRIVER, 300.0, [bundle]).run(Silent())
    assert not tally.failures
    assert tally.passed == 0
    assert tally.unsupported == tally.vectors
