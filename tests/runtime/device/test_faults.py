"""Each fault that the device's code could have is found: by the numbers, by the stand-in, or by a status of the driver.

So what the random tests pass has none of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from random_operations import Case, play, threads
from seeded_faults import FAULTS, THREADED
from stand_ins.driver import FakeDriver

MOST_SEEDS = 40
FAST = (
    "a result is read before its step is done",
    "a record does not have the copy in",
    "spilled rows are not moved to the front",
)


def found_by(find: Callable[[str, str], Case], title: str) -> tuple[int, str]:
    """The number of seeds until somebody noticed a fault, and what was said then."""
    put, kinds = FAULTS[title]
    trial = threads if title == THREADED else play
    for number, kind in zip(range(MOST_SEEDS), itertools.cycle(kinds)):
        case = find(*kind)
        with pytest.MonkeyPatch.context() as patch:
            put(patch)
            try:
                trial(case, number // len(kinds))
            except Exception as error:
                if isinstance(error.__cause__ or error, TypeError | AttributeError | NameError):
                    raise  # the fault does not fit the code any more
                said = [line for driver in FakeDriver.made for line in driver.violations] or [str(error)]
                return number + 1, f"{kind[0]} {kind[1]}: {said[0]}"
            finally:
                FakeDriver.made.clear()
    return 0, ""


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=() if title in FAST else pytest.mark.device) for title in FAULTS]
)
def test_a_fault_is_found(cases, title, record_property):
    number, said = found_by(cases, title)
    record_property("found", f"{number}: {said}")
    assert number, f"{title}: nobody noticed in {MOST_SEEDS} seeds"
