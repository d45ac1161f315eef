"""What a bundle is verified on: chains of segments, and a text.

Chains are streams run side by side through the runtime and through the reference, from empty memory until it has
rolled over many times. Each update rule runs every program's full segments, segments of mixed lengths with idle
sequences among them, and one sequence alone where there can be several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Ids

from txl_export.families.transformer_xl.parity.comparing import ChainComparison
from txl_export.families.transformer_xl.parity.oracle import ReferenceStreams
from txl_export.families.transformer_xl.reference import Reference
from txl_export.proof.decades import Decades
from txl_export.proof.distributions import Logprobs
from txl_export.proof.heap import trim
from txl_export.proof.parity import DRIFT_ROWS, ChainResult, TextResult

DISTINCT_IDS, RUN = 4096, 16
"""How many ids are drawn from a large vocabulary, and in runs of how many neighbours. Every id that is used brings a
page of the embedding into memory, once per open program; neighbours share pages."""

CHEAP_MEMORY, SPARSE_MEMORY = 8_000_000, 8
"""A memory of more bytes than the first number is compared after every eighth segment and the last, not after each."""

TEXT_SEGMENTS, TEXT_TOKENS = 256, 2048
"""Perplexity is compared on this many segments from the beginning of a text, or on this many tokens if that is more."""


@dataclass(frozen=True)
class Plan:
    """A chain to run: tokens [b, T] and lengths [b] of each segment."""

    name: str
    streams: int
    calls: Sequence[tuple[Ids, Ids]]


def plans(model: Model, segments: int | None, text: Ids | None, brief: bool) -> Iterator[Plan]:
    """Full segments of every program, mixed partial ones, and one stream alone where the batch is larger.

    Brief plans fill the memory and roll it over, but leave the judgement of drift to the others.
    """
    draws, batch, longest = np.random.default_rng(0), model.batch_size, model.segment_lengths[0]
    tokens = _TokenSource(model.manifest.vocab_size, text, draws)
    to_fill = math.ceil(model.manifest.memory_length / longest)
    to_judge_drift = 4 * math.ceil(DRIFT_ROWS / (longest * batch))
    many = to_fill + 8
    if not brief:
        many = segments if segments is not None else to_fill + max(12, min(to_fill, 32), to_judge_drift)

    def full(streams: int, length: int, count: int) -> list[tuple[Ids, Ids]]:
        return [(tokens.take(streams, length), np.full(streams, length, np.int32)) for _ in range(count)]

    rule = f", {model.update}" if len(model.manifest.updates) > 1 else ""
    yield Plan(f"segments of {longest}{rule}", batch, full(batch, longest, many))
    for length in model.segment_lengths[1:]:
        calls = full(batch, length, 4) + full(batch, longest, to_fill) + full(batch, length, 16)
        yield Plan(f"segments of {length}{rule}", batch, calls)
    mixed = []
    for _ in range(16 if brief else max(16, many // 2)):
        width = int(draws.integers(1, longest + 1))
        counts = draws.integers(0, width + 1, batch).astype(np.int32)
        counts[int(draws.integers(batch))] = width
        mixed.append((tokens.take(batch, width), counts))
    yield Plan(f"mixed partial segments{rule}", batch, mixed)
    if batch > 1:
        yield Plan(f"one stream alone{rule}", 1, full(1, longest, to_fill + 4))


class _TokenSource:
    """Token ids to run chains on: real text, read on and on from a random place per stream, or random ids."""

    def __init__(self, vocab_size: int, text: Ids | None, draws: np.random.Generator) -> None:
        self.text, self.draws = text, draws
        starts = draws.permutation(-(-vocab_size // RUN))[: DISTINCT_IDS // RUN] * RUN  # from all over it
        ids = (starts[:, None] + np.arange(RUN)).ravel()
        self.ids = ids[ids < vocab_size].astype(np.int32)
        self.places: dict[tuple[int, int], int] = {}

    def take(self, streams: int, length: int) -> Ids:
        """The next tokens, int32 [streams, length]."""
        if self.text is None:
            return self.draws.choice(self.ids, (streams, length))
        rows = np.empty((streams, length), np.int32)
        for row in range(streams):
            place = self.places.setdefault((streams, row), int(self.draws.integers(len(self.text))))
            rows[row] = np.take(self.text, np.arange(place, place + length), mode="wrap")
            self.places[streams, row] = (place + length) % len(self.text)
        return rows


def run_chain(model: Model, reference: Reference, plan: Plan, listener: Listener) -> ChainResult:
    """Run one chain on both sides and compare them after every segment."""
    result = ChainResult(plan.name, plan.streams)
    comparison = ChainComparison(result, model.manifest.vocab_size)
    stream, truth = model.stream(plan.streams), ReferenceStreams(reference, plan.streams)
    every = memory_every(model.manifest)
    for number, (tokens, counts) in enumerate(plan.calls):
        if result.full_from is None and stream.fill.min() == model.manifest.memory_length:
            result.full_from = number
        if truth.large:
            model.backend.release_pages()  # the reference needs the room
        _run_segment(comparison, truth, stream, tokens, counts)
        if number % every == 0 or number == len(plan.calls) - 1:
            comparison.memory(truth, stream, model.manifest.transformer_xl.memory)
        listener.advance()
    return result


def memory_every(manifest: Manifest) -> int:
    """After how many segments the memory is compared."""
    return 1 if manifest.state_bytes <= CHEAP_MEMORY else SPARSE_MEMORY


def _run_segment(
    comparison: ChainComparison, truth: ReferenceStreams, stream: Stream, tokens: Ids, counts: Ids
) -> None:
    """One segment on both sides; a function of its own so that its large arrays are gone before the next."""
    hidden = truth.run(tokens, counts)
    if truth.large:
        trim()  # else the runtime's memory would come on top of what the reference has freed
    found = stream.step(tokens, counts)

    def pairs() -> Iterator[tuple[Logprobs, Logprobs]]:
        for row, count in enumerate(counts.tolist()):
            first = 0
            for expected in truth.logprobs(hidden[row]):
                yield expected, found[row, first : first + len(expected)]
                first += len(expected)
            assert first == count, "every row that counts is compared"

    comparison.segment(pairs())
    if truth.large:
        trim()


def compare_text(model: Model, reference: Reference, text: Ids, listener: Listener) -> TextResult:
    """Mean nll of a text, of its beginning where it is long, with the same cuts on both sides, in one stream."""
    longest = model.segment_lengths[0]
    text = text[: max(TEXT_SEGMENTS * longest, TEXT_TOKENS) + 1]
    listener.stage("perplexity of the text", math.ceil((len(text) - 1) / longest))
    stream, memory = model.stream(1), reference.initial_memory(1)
    theirs, ours, errors = 0.0, 0.0, Decades()
    for first in range(0, len(text) - 1, longest):
        piece = text[first : first + longest + 1]
        hidden, memory = reference.hidden(torch.from_numpy(piece[None, :-1]), memory)
        targets = torch.from_numpy(piece[1:, None].astype(np.int64))
        known = []
        for expected in reference.log_probabilities(hidden[0]):
            wanted, targets = targets[: len(expected)], targets[len(expected) :]
            known.append(-expected.gather(1, wanted)[:, 0].double())
        nll, found = torch.cat(known).numpy(), stream.score(piece[None])[0].astype(np.float64)
        theirs, ours = theirs + float(nll.sum()), ours + float(found.sum())
        with np.errstate(invalid="ignore"):  # between infinities
            errors.add(np.abs(nll - found))
        listener.advance()
    positions = len(text) - 1
    return TextResult(len(text), theirs / positions, ours / positions, tuple(errors.document()))
