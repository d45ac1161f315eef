"""What every test of the device path is asked in the end: whether a GPU would have gone wrong without a word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_ins.driver import FakeDriver


@pytest.fixture(autouse=True)
def _no_violations() -> Iterator[None]:
    """Each stand-in for the driver keeps what went wrong, whoever swallowed the status."""
    FakeDriver.made.clear()
    yield
    for driver in FakeDriver.made:
        driver.check()
    FakeDriver.made.clear()
