"""Verification is tested on a bundle whenever it was exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def make_bundle(kept_bundles: Callable[..., Path]) -> Callable[..., Path]:
    """As outside of tests/export."""
    return kept_bundles
