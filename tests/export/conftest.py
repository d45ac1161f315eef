"""What holds for tests of the export alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kept_bundles import Maker


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """As everywhere, but exported in this run: no bundle of a run before is taken where the export is tested."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base  # one folder for all workers
    maker = Maker(run / "bundles of this run", base / "bundles")
    yield maker.make
    assert not maker.changed(), "a test changed a bundle that others share; copy it first"
