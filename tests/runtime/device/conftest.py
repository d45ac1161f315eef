"""What every test of the device path is asked in the end: whether a GPU would have gone wrong without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from random_operations import Case, open_case
from stand_ins.driver import FakeDriver


@pytest.fixture(autouse=True)
def _no_violations() -> Iterator[None]:
    """Each stand-in for the driver keeps what went wrong, whoever swallowed the status."""
    FakeDriver.made.clear()
    yield
    for driver in FakeDriver.made:
        driver.check()
    FakeDriver.made.clear()


@pytest.fixture(scope="session")
def cases(make_bundle, tmp_path_factory) -> Callable[[str, str], Case]:
    """Bundles for random operations, each made and opened on the CPU once."""
    made: dict[tuple[str, str], Case] = {}

    def find(name: str, update: str) -> Case:
        if (name, update) not in made:
            made[name, update] = open_case(name, update, make_bundle, tmp_path_factory.mktemp("steps"))
        return made[name, update]

    return find
