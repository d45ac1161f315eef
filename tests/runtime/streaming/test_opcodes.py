"""An interrupt may come at any opcode of an operation: the stream is as before or as after it, or says it is broken.

What may end in the middle ends after a whole segment. Each result is compared with that of a stream that nobody
interrupted, bit for bit. `TXL_EVERY_OPCODE=1` tries every one, else some of each operation are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from opcodes import ALONE, EVERY, Trial, operations
from step_models import FEATURES, MODELS, VOCABULARY
from txl_runtime import Model, load

V = 41
FORMS = ("ring", "rolled", "clusters", "recurrent", "growing", "counting")
NAMES = ("run", "try", "feed arrays", "reset", "select", "snapshot", "state", "restore")
TOKENS = ("step", "feed", "last", "score", "generate", "generate, fed")
CASES = [(form, name) for form in FORMS for name in (*NAMES, *(TOKENS if form not in ("recurrent", "growing") else ()))]
CASES += [(form, name) for form in FORMS if form != "growing" for name in ALONE]
CASES += [(form, "part") for form in FORMS if form not in ("rolled", "growing")]
LONG = [("rolled", "state"), ("rolled", "snapshot"), ("rolled", "generate")]
PAIRS = [case for n, case in enumerate(CASES) if n % 3 == len(case[1]) % 3 and case not in LONG] + [
    ("counting", "generate")
]
"""Some operations of every form and every operation with some form, for what runs each time."""
FAST, SLOW = 97, 79
"""One of 97, or of 79, opcodes is tried; primes, so that they fall on ever other places of a loop."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def find(form: str) -> Model:
        if form not in made:
            if form in MODELS:
                path = MODELS[form]().write(tmp_path_factory.mktemp("steps") / f"{form}.txl")
                made[form] = load(path, "cpu", threads=1)
            else:
                name, update = ("clusters", "ring") if form == "clusters" else ("ring", form)
                made[form] = load(frozen(name), "cpu", threads=1, update=update)
        return made[form]

    return find


def inputs_of(form: str, b: int, columns: int) -> dict[str, Any]:
    draws = np.random.default_rng(columns)
    if form == "recurrent":
        return {"obs": draws.normal(size=(b, columns, FEATURES)).astype(np.float32), "starts": np.arange(b) == 1}
    vocabulary = {"growing": VOCABULARY, "counting": VOCABULARY}.get(form, V)
    return {"tokens": draws.integers(0, vocabulary, (b, columns)).astype(np.int32)}


def trial(model: Model, form: str, name: str, looking: bool = False) -> Trial:
    """An operation on a stream that has come some way; of as many sequences as the model has, or fewer."""
    b = model.batch_size if form in ("growing", "rolled", "clusters") else 2
    longest = model.segment_lengths[0]
    stream = model.stream(b)
    stream.feed(inputs_of(form, b, 2 * longest))
    before = stream.snapshot()
    stream.feed(inputs_of(form, b, longest))
    counts = np.array([longest] * b)
    if form != "growing":
        counts[1] = 0 if form == "recurrent" else 1
    found = operations(lambda b, columns: inputs_of(form, b, columns), counts, before) | ALONE
    return Trial(
        model, stream.snapshot(), found[name], lambda s: s.run(inputs_of(form, s.batch_size, longest)), looking
    )


@pytest.mark.parametrize(("form", "name"), PAIRS)
def test_a_stream_is_as_before_or_as_after_or_says_that_it_is_broken(models, form, name):
    found = trial(models(form), form, name)
    first = 1 + 7 * len(form + name) % FAST  # another place in each
    assert found.go(first, FAST)[0] or first > FAST // 2
    assert found.go(first, 5 * FAST, fresh=True)[0] or first > FAST // 2


@pytest.mark.slow(keep=12)
@pytest.mark.timeout(0 if EVERY else 300)
@pytest.mark.parametrize(("form", "name"), CASES)
def test_a_stream_is_so_at_very_many_opcodes(models, form, name):
    found = trial(models(form), form, name)
    for fresh in (False, True):
        done, broken = found.go(1, EVERY or SLOW, fresh)
        print(f"{form}, {name}{', at first' if fresh else ''}: {done} interrupts, {broken} left a broken stream")
        assert done
