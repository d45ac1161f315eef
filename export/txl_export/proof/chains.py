"""Runs chains of segments through bundle and reference, from fresh states until every state has long been full.

The longest chain runs whole segments; gates judge drift on it. Other chains run the other segment lengths, and one
chain calls all operations of a stream in turn, on random sequences. If the runtime counts memory rows, chains end soon
after memory is full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain as iterate
from itertools import cycle, islice, repeat
from typing import Any

import numpy as np
from txl_report.schema.verification import Chain
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.types import Array, Ids

from txl_export.proof.comparing import DRIFT_ROWS, ChainErrors
from txl_export.proof.gates import drifting
from txl_export.proof.input_source import InputSource
from txl_export.proof.references import Reference
from txl_export.proof.side_by_side import SideBySide, Trial

SEGMENTS = 200
"""Least number of segments of all chains together, if the manifest does not show when states are full."""

LONG, SHORT, MIXED, ALONE = 120, 24, 64, 16
"""Numbers of segments, in this order: of the chain that shows drift, of the chain of each other length, of the chain
with all operations, and of the chain of a single sequence."""

PATIENCE = 4
"""Largest factor by which a chain is lengthened while its states are not full."""

FLAGGED = 10
"""Number of segments of the longest chain after which the first sequence's episode no longer ends. Random flags end an
episode after a few steps, so a counter of steps that saturates at 100 would never get there."""

LONGER, TRIES = 4, 2
"""In half precision a chain that drifts is run again `LONGER` times as long, at most `TRIES` times."""

SAMPLED = 2000
"""Maximum number of segments to which the longest chain is lengthened to read every sample; `WORK` may allow fewer."""

LIVE = 8
"""Maximum number of independent sequences that run in a segment, because the reference runs them one by one."""

TURNS = ("", "look", "save", "reset", "copy", "look", "restore", "select", "", "grow", "copy")
"""The operation before each segment of the chain with all operations, repeated from the start; "" means none."""

WORK = 2e12
"""Maximum number of multiplications (parameters × positions) of the reference in all chains: larger models run fewer
sequences."""


@dataclass(frozen=True)
class Planned:
    """A chain to run.

    Attributes:
        name: the label in the report.
        streams: the number of sequences.
        lengths: the length of each segment; the last length is repeated while states are not full.
        most: the maximum number of segments with these repetitions.
        mixed: "" if all positions of segments are valid, "counts" if each sequence has a random number of valid
            positions, "operations" if an operation on the stream also precedes each segment.
        quiet: whether the episode of the first sequence stops ending after `FLAGGED` segments.
        seed: the seed of the chain's random inputs.
    """

    name: str
    streams: int
    lengths: tuple[int, ...]
    most: int = 0
    mixed: str = ""
    quiet: bool = False
    seed: int = 0

    @property
    def segments(self) -> int:
        """The least number of segments that the chain runs."""
        return len(self.lengths)


def planned(manifest: Manifest, segments: int | None, samples: int = 0, brief: bool = False) -> list[Planned]:
    """Return the chains for a bundle; the longest one comes first.

    Args:
        segments: number of segments of the longest chain; None to choose it here.
        samples: number of samples that the longest chain should read.
        brief: whether chains may end soon after the states are full, too early to judge drift.
    """
    if manifest.can.count_rows:
        return _numbered(_planned_rows(manifest, segments, brief))
    lengths, many = manifest.segment_lengths, live_sequences(manifest)
    operations = MIXED if segments is None else max(8, min(MIXED, segments))
    rest = [_operations_of(manifest, operations)]
    rest += [Planned(f"segments of {length}", many, (length,) * SHORT, PATIENCE * SHORT) for length in lengths[1:]]
    if manifest.batch_size > 1 and manifest.can.run_apart:
        rest.append(Planned("one sequence alone", 1, (lengths[0],) * ALONE))
    to_judge_drift = 6 * math.ceil(DRIFT_ROWS / (lengths[0] * many))  # enough if a third of these fills the state
    longest = max(LONG, to_judge_drift, SEGMENTS - sum(chain.segments for chain in rest))
    sampled = max(longest, min(math.ceil(samples / many), SAMPLED, int(_affordable(manifest) / many)))
    most = max(sampled, PATIENCE * longest)
    first = (lengths[0],) * (segments or sampled)
    return _numbered([Planned(f"segments of {lengths[0]}", many, first, segments or most, quiet=True), *rest])


def _numbered(chains: Iterable[Planned]) -> list[Planned]:
    """Number the chains' seeds, so that each draws different inputs."""
    return [replace(chain, seed=seed) for seed, chain in enumerate(chains)]


def _planned_rows(manifest: Manifest, segments: int | None, brief: bool) -> Iterator[Planned]:
    """Yield the chains for a bundle with counted memory rows: enough segments to fill memory, then some more."""
    longest, *others = manifest.segment_lengths
    batch, to_fill = manifest.batch_size, math.ceil(manifest.memory_length / longest)
    to_judge_drift = 4 * math.ceil(DRIFT_ROWS / (longest * batch))
    many = to_fill + 8
    if not brief:
        many = segments if segments is not None else to_fill + max(12, min(to_fill, 32), to_judge_drift)
    yield Planned(f"segments of {longest}", batch, (longest,) * many)
    for length in others:
        yield Planned(f"segments of {length}", batch, (length,) * 4 + (longest,) * to_fill + (length,) * 16)
    mixed = 16 if brief else max(16, many // 2)
    yield Planned("mixed partial segments", batch, (longest,) * mixed, mixed="counts")
    if batch > 1:
        yield Planned("one sequence alone", 1, (longest,) * (to_fill + 4))
    if not brief:
        yield _operations_of(manifest, len(TURNS))


def _operations_of(manifest: Manifest, segments: int) -> Planned:
    lengths = (manifest.segment_lengths[0],) * segments
    return Planned("all operations, lengths mixed", manifest.batch_size, lengths, mixed="operations")


def live_sequences(manifest: Manifest) -> int:
    """Return the maximum number of sequences that run in a segment; in lockstep, the batch size."""
    if not manifest.can.run_apart:
        return manifest.batch_size
    return max(1, min(manifest.batch_size, LIVE, int(_affordable(manifest) / SEGMENTS)))


def _affordable(manifest: Manifest) -> float:
    """Return the number of segments of one sequence that `WORK` allows."""
    return WORK / (max(manifest.parameters, 1) * manifest.segment_lengths[0])


def run_chain(trial: Trial, chain: Planned) -> ChainErrors:
    """Run one chain on both sides, compare them after every segment, and return the errors."""
    manifest = trial.model.manifest
    facts = Chain(name=chain.name, streams=chain.streams, segments=0, positions=0, rows=[])
    errors, draws = ChainErrors(facts), np.random.default_rng(chain.seed)
    side = SideBySide(trial, errors)
    source = source_of(manifest, trial.reference, trial.samples, chain, draws)
    source.drawn = trial.drawn
    if chain.mixed == "operations":
        _operations(trial, chain.segments, side, source, draws)
        side.finish()
    else:
        calls = calls_of(chain, source, draws)
        while facts.segments < chain.segments or (facts.segments < chain.most and side.filling()):
            side.segment(*next(calls))
            if facts.segments <= chain.segments:
                trial.listener.advance()
        side.finish()
        trial.begun.update(source.begun)
        facts.full_from, facts.filling, facts.counting = side.full_from(), side.filling(), side.counting()
    return errors


def source_of(
    manifest: Manifest, known: Reference, samples: Mapping[str, Any] | None, chain: Planned, draws: np.random.Generator
) -> InputSource:
    """Return the source of a chain's inputs: samples, or random values."""
    count = chain.segments * chain.streams
    return InputSource(manifest, samples, draws, count, known.large, known.below, known.flags)


def calls_of(chain: Planned, source: InputSource, draws: np.random.Generator) -> Iterator[tuple[dict[str, Array], Ids]]:
    """Yield (inputs, counts [b] of valid positions) for each segment of a chain without operations, endlessly.

    For example, ({"x": [2, 5, 8]}, [5, 3]).
    """
    for number, length in enumerate(iterate(chain.lengths, repeat(chain.lengths[-1]))):
        counts = np.full(chain.streams, length, np.int32)
        if chain.mixed:
            width = int(draws.integers(1, length + 1))
            counts = draws.integers(0, width + 1, chain.streams).astype(np.int32)
            counts[int(draws.integers(chain.streams))] = width
        yield source.take(chain.streams, int(counts.max()), chain.quiet and number >= FLAGGED), counts


def settled(trial: Trial, precision: str, chain: Planned, ran: ChainErrors) -> tuple[Planned, ChainErrors]:
    """Return a chain and its errors if they do not drift; else a chain `LONGER` times as long with its errors.

    Drift of the longer chain is judged from the segment where the shorter one ended. Rounded weights move a slow state
    to a different limit: the error grows until the state reaches this limit, then stops. An error that a recurrence
    accumulates keeps growing. If sequences are independent, only a quarter of them run, so that the longer chain takes
    no more time.
    """
    manifest = trial.model.manifest
    for _ in range(TRIES):
        if not drifting(manifest, precision, trial.model.backend.name, ran):
            break
        trial.listener.stage("look at the drift in a longer chain")
        before = ran.chain.segments
        streams = max(1, chain.streams // LONGER) if manifest.can.run_apart else chain.streams
        chain = replace(chain, streams=streams, lengths=chain.lengths[:1] * (LONGER * before), most=0)
        ran = run_chain(trial, chain)
        if ran.chain.full_from is not None:
            ran.chain.full_from = max(ran.chain.full_from, before)
    return chain, ran


def _operations(trial: Trial, segments: int, side: SideBySide, source: InputSource, draws: np.random.Generator) -> None:
    """Run segments of random lengths, each after the next operation of `TURNS`.

    The operation "look" first runs a segment with commit=False.
    """
    manifest = trial.model.manifest
    for turn in islice(cycle(TURNS), segments):
        _operate(turn, manifest, side, draws)
        for commit in (False, True) if turn == "look" else (True,):
            length, counts = _drawn_counts(manifest, side.count, draws)
            side.segment(source.take(side.count, length), counts, commit)
        trial.listener.advance()


def _operate(turn: str, manifest: Manifest, side: SideBySide, draws: np.random.Generator) -> None:
    independent, batch = manifest.can.run_apart, manifest.batch_size

    def rows(count: int) -> list[int]:
        return [int(row) for row in draws.integers(0, side.count, count)]

    if turn == "save":
        side.save()
    elif turn == "restore":
        side.restore()
    elif turn == "reset":
        side.reset(sorted(set(rows(max(1, side.count // 2)))) if independent else None)
    elif turn == "select":
        side.select(rows(int(draws.integers(1, batch + 1))) if independent else draws.permutation(side.count).tolist())
    elif turn == "grow" and side.count < batch and independent:
        side.select([row % side.count for row in range(batch)])
    elif turn == "copy" and (independent or side.count == 1):
        side.copy(*rows(2))


def _drawn_counts(manifest: Manifest, count: int, draws: np.random.Generator) -> tuple[int, Ids]:
    """Draw a segment's length, and the number of valid positions of each sequence, int32 [b], not all 0."""
    lengths, live = manifest.segment_lengths, live_sequences(manifest)
    if not manifest.can.run_ragged:
        length = int(draws.choice(lengths))
        counts = np.full(count, length, np.int32)
    else:
        length = int(draws.integers(1, lengths[0] + 1))
        counts = draws.integers(1, length + 1, count).astype(np.int32)
    if manifest.can.run_apart:
        running = int(draws.integers(1, min(count, live) + 1))
        counts[draws.permutation(count)[running:]] = 0
    return length, counts
