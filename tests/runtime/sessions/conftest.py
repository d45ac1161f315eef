"""Models of every kind, opened once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins.steps import looking, speaking, write
from step_models import counting, growing, recurrent
from txl_runtime import Model, load

STEPS = {
    "counting": counting,
    "recurrent": recurrent,
    "growing": growing,
    "looking": looking,
    "words first": lambda: speaking(("B", "L")),
    "time first": lambda: speaking(("L", "B")),
    "one by one": lambda: speaking(("B",), (1,)),
    "lockstep": lambda: speaking(("B", "L"), streams="lockstep"),
    "joint": lambda: speaking(("B", "L"), streams="lockstep"),
    "fours": lambda: speaking(("B", "L"), (4,)),
}
FIELDS: dict[str, dict[str, Any]] = {"joint": {"joint": True}}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "ring": {},
    "rolled": {"update": "rolled"},
    "clusters": {"config": {"cutoffs": (20, 40), "div_val": 2}},
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, make_bundle):
    made: dict[str, Model] = {}

    def make(kind: str) -> Model:
        if kind not in made and kind in STEPS:
            path = tmp_path_factory.mktemp("own") / "own.txl"
            made[kind] = load(write(STEPS[kind](), path, **FIELDS.get(kind, {})), backend="cpu", threads=1)
        elif kind not in made:
            options = dict(TRANSFORMERS[kind])
            update = options.pop("update", None)
            path = make_bundle(batch_size=3, **options)  # as other tests export them
            made[kind] = load(path, backend="cpu", threads=1, update=update)
        return made[kind]

    return make


@pytest.fixture(scope="session")
def many_rows(make_bundle: Callable[..., Path]) -> Path:
    """A small random bundle of 16 rows, or the one that TXL_SESSIONS_BUNDLE names."""
    named = os.environ.get("TXL_SESSIONS_BUNDLE")
    return Path(named) if named else make_bundle(batch_size=16, verify=False)
