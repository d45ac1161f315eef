"""Any step driven with random inputs, of which nothing is known but the bundle's tables."""

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


def until_full(stream: Stream, manifest: Manifest, seed: int = 0) -> Iterator[dict[str, Array]]:
    """Random segments of the longest length, each of them to be run on the stream, until its state grows no more."""
    shapes: list[tuple[int, ...]] = []
    same = 0
    for index in range(MOST_SEGMENTS):
        yield random_inputs(manifest, manifest.segment_lengths[0], seed + index)
        now = [array.shape for array in stream.state().values()]
        same = same + 1 if now == shapes else 0
        shapes = now
        if same >= STEADY:
            return


def fill_steps(stream: Stream, manifest: Manifest) -> None:
    """Fill a stream's state with random segments."""
    for inputs in until_full(stream, manifest):
        stream.run(inputs)
