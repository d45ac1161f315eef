"""Chromium for the tests of one module: while it runs, its thread can start no event loop, as other tests do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browsing import browser


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    """A browser."""
    with browser() as started:
        yield started
