"""What any step is verified on: chains of segments, from the beginning until every state has long been full.

The longest chain runs whole segments and is the one that drift is judged on. Others run every other length, and one of
each operation of a stream in turn, at random rows and with whatever the bundle allows in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.types import Ids

from txl_export.proof.bits import Bits
from txl_export.proof.gates import drifting
from txl_export.proof.input_source import InputSource
from txl_export.proof.parity import DRIFT_ROWS
from txl_export.proof.references import Reference
from txl_export.proof.side_by_side import SideBySide
from txl_export.proof.tensor_errors import StepChain

SEGMENTS = 200
"""So many segments are chained in all, at least."""

LONG, SHORT, MIXED, ALONE = 120, 24, 64, 16
"""Segments of the chain for drift, of every other length, of the chain with all operations, of one sequence alone."""

PATIENCE = 4
"""A chain becomes at most this many times as long where states are not full yet."""

LONGER, TRIES = 4, 2
"""In half precision a chain that shows drift is run again so many times as long, at most so often."""

SAMPLED = 2000
"""The longest chain becomes at most so long for every sample to be read, and no longer than `WORK` allows."""

LIVE = 8
"""As many sequences of a segment run through the reference at most: those that are independent run one by one."""

TURNS = ("", "look", "save", "reset", "copy", "look", "restore", "select", "", "grow", "copy")
"""What is done before the segments of the chain with all operations."""

WORK = 2e12
"""Multiplications that the reference may take in all; larger models have fewer sequences per segment."""


@dataclass(frozen=True)
class Planned:
    """A chain to run.

    Attributes:
        name: for people.
        streams: sequences side by side.
        length: L of its whole segments; 0 for the chain of all operations.
        segments: how many.
        most: how many where states are not full by then.
    """

    name: str
    streams: int
    length: int
    segments: int
    most: int


def planned(manifest: Manifest, segments: int | None, samples: int = 0) -> list[Planned]:
    """The chains of a bundle, which reads so many samples; the longest chain first."""
    lengths, many = manifest.segment_lengths, live_sequences(manifest)
    operations = MIXED if segments is None else max(8, min(MIXED, segments))
    rest = [Planned("all operations, lengths mixed", manifest.batch_size, 0, operations, operations)]
    rest += [Planned(f"segments of {length}", many, length, SHORT, PATIENCE * SHORT) for length in lengths[1:]]
    if manifest.batch_size > 1 and manifest.can.run_apart:
        rest.append(Planned("one sequence alone", 1, lengths[0], ALONE, ALONE))
    to_judge_drift = 6 * math.ceil(DRIFT_ROWS / (lengths[0] * many))  # also if a third of them fills the state
    longest = max(LONG, to_judge_drift, SEGMENTS - sum(chain.segments for chain in rest))
    sampled = max(longest, min(math.ceil(samples / many), SAMPLED, int(_affordable(manifest) / many)))
    most = max(sampled, PATIENCE * longest)
    first = Planned(f"segments of {lengths[0]}", many, lengths[0], segments or sampled, segments or most)
    return [first, *rest]


def live_sequences(manifest: Manifest) -> int:
    """How many sequences of a segment run: all in lockstep."""
    if not manifest.can.run_apart:
        return manifest.batch_size
    return max(1, min(manifest.batch_size, LIVE, int(_affordable(manifest) / SEGMENTS)))


def _affordable(manifest: Manifest) -> float:
    """How many segments the reference may take, of all sequences together."""
    return WORK / (max(manifest.parameters, 1) * manifest.segment_lengths[0])


@dataclass(frozen=True)
class Trial:
    """What chains are run on.

    Attributes:
        model: the bundle.
        reference: what it should be equal to.
        samples: real inputs by name, or None.
        bits: what is found of bits.
        folder: for snapshots.
        listener: hears of progress.
        handing_over: whether the bundle goes on from the reference's state after every segment.
        begun: numbers of the samples that chains of whole segments read.
    """

    model: Model
    reference: Reference
    samples: Mapping[str, Any] | None
    bits: Bits
    folder: Path
    listener: Listener
    handing_over: bool = False
    begun: set[int] = field(default_factory=set)


def run_chain(trial: Trial, chain: Planned, seed: int = 0) -> StepChain:
    """Run one chain on both sides and compare them after every segment."""
    result, draws = StepChain(chain.name, chain.streams), np.random.default_rng(seed)
    side = SideBySide(trial.model, trial.reference, result, trial.bits, trial.folder, trial.handing_over)
    source = InputSource(trial.model.manifest, trial.samples, draws, chain.segments * chain.streams)
    if not chain.length:
        _operations(trial, chain.segments, side, source, draws)
    else:
        counts = np.full(chain.streams, chain.length, np.int32)
        while result.segments < chain.segments or (result.segments < chain.most and side.filling()):
            side.segment(source.take(chain.streams, chain.length), counts)
            if result.segments <= chain.segments:
                trial.listener.advance()
    side.finish()
    if chain.length:
        trial.begun.update(source.begun)
        result.full_from, result.filling, result.counting = side.full_from(), side.filling(), side.counting()
    return result


def settled(trial: Trial, precision: str, chain: Planned, ran: StepChain, seed: int) -> StepChain:
    """A chain as it is where its error does not drift. Else a chain `LONGER` times as long, whose drift is judged from
    where this one ended.

    Rounded weights take a slow state to another place, and the error grows until it is there. By then it grows no more;
    one that a recurrence gathers still does. Where sequences are independent, fewer of them run, so that it takes no
    longer than before.
    """
    for _ in range(TRIES):
        if not drifting(precision, trial.model.backend.name, ran):
            break
        trial.listener.stage("look at the drift in a longer chain")
        segments, before = LONGER * ran.segments, ran.segments
        streams = max(1, chain.streams // LONGER) if trial.model.manifest.can.run_apart else chain.streams
        chain = replace(chain, streams=streams, segments=segments, most=segments)
        ran = run_chain(trial, chain, seed)
        if ran.full_from is not None:
            ran.full_from = max(ran.full_from, before)
    return ran


def _operations(trial: Trial, segments: int, side: SideBySide, source: InputSource, draws: np.random.Generator) -> None:
    """Segments of all lengths with an operation before each, every one of them in turn; after a look the segment is
    also run without becoming part of the state.
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
    """A segment's length, and the rows that count of each sequence: some idle, one at least runs."""
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
