"""Make segments to compare a step in C with its bundle, in which sequences are idle, end early or are reset."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from txl_export.proof.input_source import InputSource
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Array, Ids

from txl_deploy.plain_c.step import PlainStep

MIXED = 48
"""Number of segments of all kinds (whole, short, idle, reset) after the segments that fill the memory."""
STEADY = 8
"""Number of consecutive segments in which inputs that may be flags are 0, then random, then 1, then random."""
FILLING = 64, 2000
"""Number of whole segments that fill a state without memory rows, and maximum number that fill memory rows."""


class Segment(NamedTuple):
    """A segment: a mask of the sequences to reset before it, each sequence's number of valid positions, and inputs."""

    which: NDArray[np.bool_]
    counts: Ids
    inputs: dict[str, Array]


def filling(manifest: Manifest, length: int) -> int:
    """Return the number of whole segments that fill the memory."""
    return min(FILLING[1], math.ceil(manifest.memory_length / length)) or FILLING[0]


def segments(step: PlainStep, whole: int, mixed: int, seed: int) -> Iterator[Segment]:
    """Yield `whole` segments in which all positions count, then `mixed` segments of all kinds.

    An input of one value per sequence and position may be a flag that clears the states, like `episode_start`. Random
    flags would clear the states in every step, so such an input is 0 for `STEADY` segments, then 1, then random.
    """
    manifest, length = step.manifest, step.program.segment_length
    draws, batch, can = np.random.default_rng(seed), manifest.batch_size, manifest.can
    source = InputSource(manifest, None, draws)
    for number in range(-whole, mixed):
        counts, which = np.full(batch, length, np.int32), np.zeros(batch, np.bool_)
        if number >= 0:
            if step.takes_less and number % 2:
                counts[:] = draws.integers(1, length + 1, batch if can.run_apart else 1)
            if number % 4 == 3:
                idle = draws.random(batch) < 0.5 if batch > 1 and can.run_apart else np.ones(batch, np.bool_)
                counts[idle] = 0
            if number % 8 == 6:
                which[:] = draws.random(batch) < 0.5 if batch > 1 and can.run_apart else True
        inputs, (held, random) = source.take(batch, length), divmod((number + whole) // STEADY % 4, 2)
        for entry in () if random else manifest.given:
            if entry.vocab is None and math.prod(entry.axes.alone.sizes(1, 1)) == 1:
                inputs[entry.name][...] = held
        yield Segment(which, counts, inputs)


def expected(stream: Stream, step: PlainStep, segment: Segment) -> dict[str, Array]:
    """Run a segment on the bundle and return its outputs, e.g. {"y": [2, 5, 8]}.

    If the segment has fewer valid positions than L and the step has shorter steps, the bundle's shorter steps run these
    positions, and the outputs of all other positions are 0.
    """
    count = int(segment.counts[0])
    if not step.shorter or count in (0, step.program.segment_length):
        return stream.run(segment.inputs, lengths=segment.counts)
    manifest, results = step.manifest, {}
    fed = {entry.name: segment.inputs[entry.name][entry.axes.window(0, count)] for entry in manifest.given}
    outputs = stream.feed(fed)
    for entry in manifest.outputs:
        results[entry.name] = np.zeros(entry.sizes(1, step.program.segment_length), np.dtype(entry.dtype))
        results[entry.name][entry.axes.window(0, count)] = outputs[entry.name]
    return results
