"""Ends every test of the device path with one question: would a GPU have gone wrong without a word?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from frozen import frozen
from random_operations import Case, open_case
from resealing import copied
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_stand_in
from txl_engines.bundles import build_bundle
from txl_runtime import Model, load
from txl_runtime.device import choosing


@pytest.fixture(autouse=True)
def _no_violations() -> Iterator[None]:
    """Each stand-in for the driver keeps what went wrong, whoever swallowed the status."""
    FakeDriver.made.clear()
    yield
    for driver in FakeDriver.made:
        driver.check()
    FakeDriver.made.clear()


@pytest.fixture
def opened(monkeypatch) -> Callable[..., Model]:
    """A fresh model of three sequences on a stand-in device, by its update rule; see `open_stand_in` for options."""

    def open_it(update: str, **options: Any) -> Model:
        monkeypatch.setattr(
            choosing, "open_device", lambda name, bundle, rule: open_stand_in(bundle, rule, name, **options)
        )
        return load(frozen("ring"), backend="rtx", update=update)

    return open_it


@pytest.fixture(scope="session")
def cases(make_bundle, tmp_path_factory) -> Callable[[str, str], Case]:
    """Bundles for random operations, each made and opened on the CPU once."""
    made: dict[tuple[str, str], Case] = {}

    def find(name: str, update: str) -> Case:
        if (name, update) not in made:
            made[name, update] = open_case(name, update, make_bundle, tmp_path_factory.mktemp("steps"))
        return made[name, update]

    return find


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Callable[..., Path]:
    """A bundle of two sequences and 41 words with graphs for ONNX Runtime, of some update rules."""
    made: dict[tuple[str, ...], Path] = {}

    def build(*updates: str) -> Path:
        if updates not in made:
            path = copied(frozen("0.8/clusters"), tmp_path_factory.mktemp("built") / "small.txl")
            for update in updates:
                build_bundle(path, "cuda", update=update)
            made[updates] = path
        return made[updates]

    return build
