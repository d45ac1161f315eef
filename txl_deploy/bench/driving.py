"""Make random inputs for the steps of any bundle, with the types, shapes and ranges in the bundle's tables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Input
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Array

STEADY = 8
"""Number of consecutive segments with unchanged shapes after which a growing state counts as full."""
MOST_SEGMENTS = 1000
"""Number of segments after which a state counts as full even if its size still changes."""


def is_transformer_xl(manifest: Manifest) -> bool:
    """Return True if a bundle is timed at the tasks of a Transformer-XL; every other bundle is timed at its steps."""
    return manifest.family_name == "transformer_xl"


def shortest_length(manifest: Manifest) -> int:
    """Return the shortest segment length at which a bundle is measured: 1 for a Transformer-XL, else its shortest."""
    return 1 if is_transformer_xl(manifest) else manifest.segment_lengths[-1]


def random_inputs(manifest: Manifest, length: int, seed: int = 0) -> dict[str, Array]:
    """Make one segment, e.g. {"tokens": int32 [B, L]}: floats are normal, ids uniform, other integers 0 or 1."""
    draws = np.random.default_rng(seed)
    return {entry.name: _random(entry, entry.sizes(manifest.batch_size, length), draws) for entry in manifest.given}


def _random(entry: Input, sizes: tuple[int, ...], draws: np.random.Generator) -> Array:
    if entry.dtype == "bool":
        return draws.random(sizes) < 0.5
    if entry.dtype == "int32":
        return draws.integers(0, entry.vocab or 2, sizes, np.int32)
    return draws.standard_normal(sizes, np.float32)


def filling(manifest: Manifest, stream: Stream | None, seed: int = 0) -> Iterator[dict[str, Array]]:
    """Yield random segments of the longest length until the state is full.

    If memory rows are counted, there are enough segments to fill the memory, and one more. Otherwise the state is full
    when its shapes stop changing; the caller runs every segment on `stream`, whose state shows the shapes. For example,
    {"ids": [4, 64]} is a segment.
    """
    longest, shapes, same = manifest.segment_lengths[0], list[tuple[int, ...]](), 0
    counted = -(-manifest.memory_length // longest) + 1 if manifest.can.count_rows else None
    for index in range(MOST_SEGMENTS if counted is None else counted):
        yield random_inputs(manifest, longest, seed + index)
        if counted is None and stream is not None:
            now = [array.shape for array in stream.state().values()]
            same = same + 1 if now == shapes else 0
            shapes = now
            if same >= STEADY:
                return
