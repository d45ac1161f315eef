"""A bundle that a test may build into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from resealing import copied


@pytest.fixture
def bundle(make_bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a small one."""
    return copied(make_bundle(verify=False), tmp_path / "small.txl")
