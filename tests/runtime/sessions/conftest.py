"""Models of every kind, opened once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from frozen import frozen
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
TRANSFORMERS = {"ring": ("ring", "ring"), "rolled": ("ring", "rolled"), "clusters": ("clusters", "ring")}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    made: dict[str, Model] = {}

    def make(kind: str) -> Model:
        if kind not in made and kind in STEPS:
            path = tmp_path_factory.mktemp("own") / "own.txl"
            made[kind] = load(write(STEPS[kind](), path, **FIELDS.get(kind, {})), backend="cpu", threads=1)
        elif kind not in made:
            name, update = TRANSFORMERS[kind]
            made[kind] = load(frozen(name), backend="cpu", threads=1, update=update)
        return made[kind]

    return make


@pytest.fixture(scope="session")
def transformer() -> Path:
    """A small random bundle, or the one that TXL_SESSIONS_BUNDLE names."""
    named = os.environ.get("TXL_SESSIONS_BUNDLE")
    return Path(named) if named else frozen("ring")
