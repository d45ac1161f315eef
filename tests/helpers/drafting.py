"""A pace that never pauses, and a Transformer-XL whose segments are as many steps, for tests of drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from resealing import copied, reseal
from txl_runtime.streaming.lookup import Pace


class Eager(Pace):
    """A pace that allows every draft."""

    def allows(self) -> bool:
        return True


def windowed(make_bundle: Callable[..., Path], target: Path, **options: Any) -> Path:
    """A copy of a bundle whose queries see M + 1 keys at most, with segments of 8, 5 and 1."""
    source = make_bundle(same_length=True, segment_length=(8, 5, 1), batch_size=3, verify=False, **options)
    return reseal(copied(source, target), stepwise=8)
