"""Random inputs for any step: the bundle's tables give their types, shapes and ranges."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Input
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Array

STEADY = 8
"""A state is as large as it becomes when so many segments have left all its shapes as they were."""
MOST_SEGMENTS = 1000


def is_transformer_xl(manifest: Manifest) -> bool:
    """Whether a bundle is measured by what a Transformer-XL does; every other one is by its steps."""
    return manifest.family_name == "transformer_xl"


def shortest_length(manifest: Manifest) -> int:
    """How long the shortest segment is that a bundle is measured at: a single token of a Transformer-XL."""
    return 1 if is_transformer_xl(manifest) else manifest.segment_lengths[-1]


def random_inputs(manifest: Manifest, length: int, seed: int = 0) -> dict[str, Array]:
    """One segment of all sequences: normal values, uniform ids, and of other whole numbers 0 and 1."""
    draws = np.random.default_rng(seed)
    return {entry.name: _random(entry, entry.sizes(manifest.batch_size, length), draws) for entry in manifest.given}


def _random(entry: Input, sizes: tuple[int, ...], draws: np.random.Generator) -> Array:
    if entry.dtype == "bool":
        return draws.random(sizes) < 0.5
    if entry.dtype == "int32":
        return draws.integers(0, entry.vocab or 2, sizes, np.int32)
    return draws.standard_normal(sizes, np.float32)


def filling(manifest: Manifest, stream: Stream | None, seed: int = 0) -> Iterator[dict[str, Array]]:
    """Random segments of the longest length that fill a state.

    Where memory rows are counted, they fill the memory and then move every row of it out. Any other state is full when
    it grows no more, which `stream` tells: every segment has to be run on it.
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
