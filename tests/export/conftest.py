"""Tests of what an export writes look at bundles of this run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kept_bundles import Maker


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """As everywhere, but exported in this run: no bundle of a run before is taken."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base  # one folder for all workers
    maker = Maker(run / "bundles of this run", base / "bundles")
    yield maker.make
    assert not maker.changed(), "a test (not the last one, which is named here) changed a shared bundle; copy it first"
