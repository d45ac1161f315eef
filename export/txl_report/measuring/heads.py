"""What attention heads look at: how far back, how much of it in the memory, how evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from txl_runtime.listener import Listener, Silent
from txl_runtime.types import Floats

from txl_report.facts.plain import Missing
from txl_report.measuring.averages import FEWEST_BLOCKS
from txl_report.measuring.pictures import pictures_of
from txl_report.measuring.results import DistanceBin, HeadFacts, HeadsLook
from txl_report.measuring.texts import checked_ids

if TYPE_CHECKING:
    from txl_runtime.model import Model

SEGMENTS, QUERIES = 32, 2_048
"""Looked at: so many segments, or fewer long ones that have so many tokens, though enough for an error."""
NO_PROGRAM = "This bundle has no program that tells where the model looks; export the checkpoint with --attention."


def look_at_heads(
    model: Model,
    ids: ArrayLike,
    listener: Listener | None = None,
    *,
    segments: int | None = None,
) -> HeadsLook | Missing:
    """Look at a model's attention while it reads a text.

    Segments that only fill the memory are read first. Then every query, a token of a segment, sees M memory rows and
    its own segment up to itself.

    Args:
        model: of a bundle with an attention program.
        ids: int [T], the text as token ids; its start is used.
        listener: hears how many segments were looked at.
        segments: how many are looked at, at most; 32 without it, and as few as 8 where segments are long.

    Returns:
        What every head looks at on average, and pictures of the last segment; or why nobody can look.

    Raises:
        UsageError: the ids are not of this model.
    """
    listener = listener or Silent()
    given, length, rows = checked_ids(model, ids), model.segment_lengths[0], model.memory_length or 0
    warm_up = -(-rows // length)
    if segments is None:
        segments = min(SEGMENTS, max(FEWEST_BLOCKS, QUERIES // length))
    there = min((len(given) // length) - warm_up, segments)
    reason = "" if model.manifest.attention else NO_PROGRAM
    if not reason and there < 1:
        needed = (warm_up + 1) * length
        reason = f"The memory and a segment need a text of at least {needed:,} tokens, this one has {len(given):,}."
    if reason:
        return Missing(reason)
    stream = model.stream(1)
    listener.stage("looking at attention", warm_up + there)
    sums: _Sums | None = None
    looked = np.zeros((0, 0, 0, 0), np.float32)
    first = 0
    for index in range(warm_up + there):
        first = index * length
        segment = given[None, first : first + length]
        if index >= warm_up:
            looked = stream.attention(segment)[:, 0]
            sums = sums or _Sums.of(looked, rows)
            sums.add(looked)
        listener.advance()
        stream.feed(segment, last=True)
    assert sums is not None, "one segment at least was looked at"
    facts = sums.facts(length)
    bins = _bins(rows + length)
    return HeadsLook(
        segments=len(sums.distances),
        queries=len(sums.distances) * length,
        segment_length=length,
        memory_length=model.memory_length,
        layers=looked.shape[0],
        heads=looked.shape[1],
        facts=facts,
        beyond=sum(head.reach >= length for head in facts),
        mean_beyond=sum(head.distance >= length for head in facts),
        distance_bins=bins,
        distance_shares=np.stack([sums.shares[..., b.first : b.last + 1].sum(axis=-1) for b in bins], axis=-1),
        pictures=pictures_of(looked, given[first - rows : first + length], rows, facts, model.vocabulary),
    )


@dataclass
class _Sums:
    """What was added up over segments.

    Attributes:
        rows: M.
        profile: float64 [layers, heads, M + T], attention by distance.
        distances: of each segment, the mean distance float64 [layers, heads].
        memory, entropy: float64 [layers, heads].
        queries: how many there were.
    """

    rows: int
    profile: NDArray[np.float64]
    distances: list[NDArray[np.float64]]
    memory: NDArray[np.float64]
    entropy: NDArray[np.float64]
    queries: int = 0

    @classmethod
    def of(cls, looked: Floats, rows: int) -> _Sums:
        layers, heads, _, slots = looked.shape
        zeros = np.zeros((layers, heads))
        return cls(rows, np.zeros((layers, heads, slots)), [], zeros, zeros.copy())

    def add(self, looked: Floats) -> None:
        """One segment, [layers, heads, T, M + T]; slot j is M + q - j tokens before query q."""
        profile = np.zeros_like(self.profile)
        for query in range(looked.shape[2]):
            own = self.rows + query
            profile[..., : own + 1] += looked[:, :, query, own::-1]
        self.profile += profile
        self.distances.append(profile @ np.arange(profile.shape[-1]) / looked.shape[2])
        self.memory += looked[..., : self.rows].sum(axis=(2, 3), dtype=np.float64)
        for entropy, layer in zip(self.entropy, looked, strict=True):
            entropy -= (layer * np.log(np.maximum(layer, 1e-30))).sum(axis=(1, 2), dtype=np.float64)
        self.queries += looked.shape[2]

    @property
    def shares(self) -> NDArray[np.float64]:
        """The share of attention at each distance, [layers, heads, M + T]."""
        return self.profile / self.queries

    def facts(self, length: int) -> tuple[HeadFacts, ...]:
        """Every head, the one that looks least far back first."""
        distances = np.stack(self.distances)
        within = np.cumsum(self.shares, axis=-1)
        few = len(distances) < FEWEST_BLOCKS
        errors = distances.std(axis=0, ddof=0 if few else 1) / np.sqrt(len(distances))
        found = [
            HeadFacts(
                layer=layer,
                head=head,
                distance=float(distances[:, layer, head].mean()),
                error=None if few else float(errors[layer, head]),
                memory_share=float(self.memory[layer, head] / self.queries),
                beyond_share=float(self.shares[layer, head, length:].sum()),
                reach=int(np.argmax(within[layer, head] >= 0.9 * within[layer, head, -1])),
                entropy=float(self.entropy[layer, head] / self.queries),
            )
            for layer, head in np.ndindex(distances.shape[1:])
        ]
        return tuple(sorted(found, key=lambda head: head.distance))


def _bins(slots: int) -> tuple[DistanceBin, ...]:
    """0, 1, 2 to 3, 4 to 7 …, to the longest distance that there can be."""
    edges = [0, *(2**power for power in range((slots - 1).bit_length()))]
    return tuple(
        DistanceBin(first, min(last, slots) - 1) for first, last in zip(edges, [*edges[1:], slots], strict=True)
    )
