"""An interrupt may come wherever the interpreter looks at signals: a stream of a device is as before or as after, too.

The stand-in for the driver is not interrupted: the real one is no Python. See the same of streams on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from opcodes import ALONE, EVERY, Trial, operations
from random_operations import Case
from stand_ins.driver import FakeDriver
from step_models import FEATURES
from txl_runtime import Model

pytestmark = pytest.mark.device

KINDS = (("plain", "ring"), ("plain", "rolled"), ("recurrent", "replace"))
NAMES = ("run", "try", "feed arrays", "reset", "select", "snapshot", "state", "restore", *ALONE)
TOKENS = ("step", "feed", "last", "score", "generate")
CASES = [(kind, name) for kind in KINDS for name in (*NAMES, *(TOKENS if kind[0] == "plain" else ()))]
CASES += [(kind, "part") for kind in KINDS if "rolled" not in kind]
STEP = 29


def trial(case: Case, model: Model, name: str) -> Trial:
    """An operation on a stream that has come some way."""
    draws = np.random.default_rng(0)

    def inputs(b: int, columns: int) -> dict[str, Any]:
        if case.name == "recurrent":
            return {"obs": np.ones((b, columns, FEATURES), np.float32), "starts": np.arange(b) == 1}
        return {"tokens": (np.arange(b * columns, dtype=np.int32) % (model.vocab_size or 1)).reshape(b, columns)}

    longest, b = model.segment_lengths[0], int(draws.integers(2, 4))
    stream = model.stream(b)
    stream.feed(inputs(b, 2 * longest))
    before = stream.snapshot()
    stream.feed(inputs(b, longest))
    counts = np.array([longest] * b)
    counts[1] = 0 if case.name == "recurrent" else 1
    found = operations(inputs, counts, before) | ALONE
    return Trial(model, stream.snapshot(), found[name], lambda s: s.run(inputs(s.batch_size, longest)), looking=True)


@pytest.fixture
def opened_case(cases: Callable[[str, str], Case]) -> Iterator[Callable[[tuple[str, str]], tuple[Case, Model]]]:
    made: list[Model] = []

    def find(kind: tuple[str, str]) -> tuple[Case, Model]:
        case = cases(*kind)
        made.append(case.open(FakeDriver(1)))
        return case, made[-1]

    yield find
    with ThreadPoolExecutor(1) as other:
        free = [other.submit(model.backend.lock.acquire, blocking=False).result() for model in made]
    assert all(free), "the lock is held for ever"
    # An interrupt where a `with` of Python begins to leave keeps CUDA's context current until the object is used again:
    # for ever, where it was made for that `with` alone. All else that the stand-in tells is a failure.
    for driver in FakeDriver.made:
        driver.unwind()


@pytest.mark.timeout(0 if EVERY else 300)
@pytest.mark.parametrize(("kind", "name"), CASES, ids=str)
def test_a_stream_of_a_device_is_as_before_or_as_after_or_says_that_it_is_broken(opened_case, kind, name):
    done, broken = trial(*opened_case(kind), name).go(1 + len(name) % STEP, EVERY or STEP)
    print(f"{kind} {name}: {done} interrupts, {broken} left a broken stream")
    assert done
