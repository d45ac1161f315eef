"""Does the bundle look where the reference looks? Attention probabilities, compared along a chain of segments.

The chain starts with an empty memory, fills it, and rolls it over. Some of its segments are filled in part, and some
leave a sequence idle. Before every step that is compared, both sides tell where the segment looks from the memory that
they have then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.types import Ids

from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity.oracle import OracleStreams

STREAMS, WHILE_FILLING, AFTERWARDS = 2, 8, 6
"""Sequences of the chain, since what one segment looks at is large; looks while the memory fills, and after that."""


def farthest_look(model: Model, reference: PaperModel, listener: Listener) -> float:
    """The largest |Δ| of a probability; NaN and what is no distribution count as far as can be."""
    streams = min(STREAMS, model.batch_size)
    stream, truth = model.stream(streams), OracleStreams(model.manifest, reference, streams)
    calls = list(_calls(model, streams))
    to_fill = len(calls) - AFTERWARDS
    every = max(1, to_fill // WHILE_FILLING)
    listener.stage("compare where it looks", len(calls))
    worst = 0.0
    for number, (tokens, counts) in enumerate(calls):
        if number >= to_fill or number % every == 0:
            found, expected = stream.attention(tokens, counts), truth.attention(tokens, counts)
            for ours, theirs in zip(found, expected, strict=True):  # layer by layer: a difference is as large as they
                worst = max(worst, float(np.nan_to_num(np.abs(ours - theirs), nan=np.inf).max()))
        stream.step(tokens, counts)
        truth.step(tokens, counts)
        listener.advance()
    return worst


def _calls(model: Model, streams: int) -> Iterator[tuple[Ids, Ids]]:
    """Tokens [b, T] and lengths [b] of each segment."""
    draws, longest = np.random.default_rng(5), model.segment_lengths[0]
    for number in range(math.ceil((model.memory_length or 0) / longest) + 2 + AFTERWARDS):
        width = 1 if number % 5 == 4 else longest
        counts = np.full(streams, width, np.int32)
        if number % 3 == 1:
            width = int(draws.integers(1, longest + 1))
            counts = draws.integers(0, width + 1, streams).astype(np.int32)
            counts[int(draws.integers(streams))] = width
        yield draws.integers(0, model.manifest.vocab_size, (streams, width)).astype(np.int32), counts
