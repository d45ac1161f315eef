"""Small bundles, and servers of them in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from frozen import frozen
from resealing import copied, reseal
from serving import Served


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that reads bytes, of 2 rows, whose boundary token is 10."""
    return reseal(copied(frozen("clusters"), tmp_path_factory.mktemp("letters") / "small.txl"), boundary_token=10)


@pytest.fixture(scope="session")
def served(letters: Path) -> Iterator[Served]:
    """A server of it with the usual limits."""
    server = Served(letters)
    yield server
    server.close()


@pytest.fixture
def serve(letters: Path) -> Iterator[Callable[..., Served]]:
    """Servers of it with other options."""
    opened: list[Served] = []

    def make(bundle: Path | None = None, **options: Any) -> Served:
        opened.append(Served(bundle or letters, **options))
        return opened[-1]

    yield make
    for server in opened:
        server.close()
