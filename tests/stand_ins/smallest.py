"""The smallest model that has everything: what tests export that export hundreds of times."""

from __future__ import annotations

from pathlib import Path

import txl_export
from support import random_state, small_config

SMALLEST = small_config(vocab_size=12, n_layer=1, n_head=1, d_model=8, d_head=8, d_inner=8, d_embed=8, memory_length=2)


def export_smallest(target: Path, force: bool = False, seed: int = 0, verify: bool = False) -> None:
    """A bundle of one program."""
    state = random_state(SMALLEST, seed)
    txl_export.export(state, target, config=SMALLEST, segment_length=1, verify=verify, force=force)
