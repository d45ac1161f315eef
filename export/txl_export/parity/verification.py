"""Is the bundle the same function as PyTorch's? Chained segments, memory included, judged by the ladder.

Chains are streams run side by side through the runtime and through the reference, from empty memory until it has
rolled over many times. After every segment log-probabilities of all counted rows AND the whole memory are compared, so
that an error which only grows through the recurrence cannot hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import CheckError
from txl_runtime.host.onnxruntime_cpu import OnnxRuntimeCpu
from txl_runtime.ladder import GAIN, NEAR_TIE, no_drift_limit, rung
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model, load
from txl_runtime.streaming.stream import Stream
from txl_runtime.update_rules import usable_updates

from txl_export.families.transformer_xl.reference import Memory, Reference
from txl_export.parity.heap import give_back, trim

__all__ = [
    "ChainResult",
    "Gate",
    "Parity",
    "ParityError",
    "ReferenceStreams",
    "TextResult",
    "openers",
    "verify_models",
]

Ids = NDArray[np.int32]

DRIFT_ROWS = 64
DISTINCT_IDS, RUN = 4096, 16
"""Of a large vocabulary so many ids are drawn, in runs of neighbours: every page of the embedding that is touched
brings those around it along, once per open program."""

CHUNK = 300_000
"""Log-probabilities compared at a time: in float64 they and what is computed of them fit into a core's share of cache.
A million takes three times as long, and a large vocabulary at once would take gigabytes."""

CHEAP_MEMORY, SPARSE_MEMORY = 8_000_000, 8
"""A memory of more bytes than this per stream is compared at every eighth segment and the last, instead of at each."""

TEXT_SEGMENTS, TEXT_TOKENS = 256, 2048
"""Perplexity is compared on this many segments of a text, or tokens if that is more; all of it would only take long."""


@dataclass
class ChainResult:
    """One chain: what was run and how far apart the two sides were.

    Attributes:
        name: what kind of segments.
        streams: sequences side by side.
        segments: segments run.
        positions: rows compared.
        max_logprobs, max_memory: largest |Δ|; memory relative to max(1, largest |value| of the reference so far).
        mean_logprobs: per segment, mean |Δ|: the drift curve.
        rows: per segment, rows compared.
        max_per_segment: per segment, largest |Δ| of a log-probability.
        full_from: first segment that met a full memory; None if none did.
        kl: per position, KL divergence of the runtime from the reference, nats.
        agreeing, decided: positions where the best token agrees, of those that are no near-ties.
    """

    name: str
    streams: int
    segments: int = 0
    positions: int = 0
    max_logprobs: float = 0.0
    max_memory: float = 0.0
    mean_logprobs: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    max_per_segment: list[float] = field(default_factory=list)
    full_from: int | None = None
    kl: list[float] = field(default_factory=list)
    agreeing: int = 0
    decided: int = 0

    @property
    def early_and_late(self) -> tuple[float, float] | None:
        """Mean |Δ| over the first and the last quarter of the segments after memory was full; None if too few.

        A quarter of less than 64 rows says more of its tokens than of the memory.
        """
        means, rows = (np.array(values[self.full_from or 0 :]) for values in (self.mean_logprobs, self.rows))
        quarter = len(means) // 4
        ends = (slice(0, quarter), slice(len(means) - quarter, None))
        if self.full_from is None or quarter < 2 or min(rows[end].sum() for end in ends) < DRIFT_ROWS:
            return None
        early, late = (float(np.average(means[end], weights=rows[end])) for end in ends)
        return early, late


@dataclass(frozen=True)
class TextResult:
    """Perplexity of one text, both ways."""

    tokens: int
    reference_nll: float
    runtime_nll: float

    @property
    def relative(self) -> float:
        """|Δ perplexity| / perplexity of the reference."""
        return abs(math.expm1(self.runtime_nll - self.reference_nll))


@dataclass(frozen=True)
class Gate:
    """One judged number. `passed` is None where there was nothing to judge it on."""

    name: str
    value: float | None
    limit: float
    passed: bool | None

    @property
    def verdict(self) -> str:
        """For people."""
        return {True: "passed", False: "FAILED", None: "not judged"}[self.passed]


@dataclass(frozen=True)
class Parity:
    """A finished verification.

    Attributes:
        backend: description of the engine.
        precision: of the bundle.
        reference: what it was compared with.
        chains, text, gates: what was run and judged.
        sensitivity: for quantised weights, the KL divergence that each layer causes alone.
    """

    backend: str
    precision: str
    reference: str
    chains: tuple[ChainResult, ...]
    text: TextResult | None
    gates: tuple[Gate, ...]
    sensitivity: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no gate failed."""
        return all(gate.passed is not False for gate in self.gates)

    def with_gain(self, error: float) -> Parity:
        """The same with a gate on how faithfully matrices were quantised."""
        gate = Gate("quantised weights (gain)", error, GAIN, error <= GAIN)
        return replace(self, gates=(*self.gates, gate))

    def require(self) -> None:
        """Raise ParityError, naming the failing gates, unless all passed."""
        failing = [gate for gate in self.gates if gate.passed is False]
        if failing:
            cells = "; ".join(f"{gate.name} is {gate.value:.3g}, limit {gate.limit:.3g}" for gate in failing)
            advice = "see the table, and report the checkpoint's family and config"
            if self.sensitivity:
                worst = sorted(self.sensitivity, key=lambda layer: -self.sensitivity[layer])[:2]
                keeping = " ".join(f"--keep {layer}" for layer in worst)
                advice = f"{' and '.join(worst)} suffer most: keep them in float32 with {keeping}, or take more bits"
            raise ParityError(f"parity failed: {cells}; {advice}", self)

    def summary(self) -> dict[str, object]:
        """The few numbers that go into the manifest."""
        return {gate.name: gate.value for gate in self.gates if gate.value is not None}

    def document(self) -> dict[str, object]:
        """Everything, as plain JSON."""
        kl = np.array([value for chain in self.chains for value in chain.kl])
        return {
            "passed": self.passed,
            "backend": self.backend,
            "precision": self.precision,
            "reference": self.reference,
            "gates": [{**_fields(gate), "verdict": gate.verdict} for gate in self.gates],
            "kl": {"mean": float(kl.mean()), "p99.9": float(np.quantile(kl, 0.999)), "max": float(kl.max())},
            "chains": [
                {name: value for name, value in _fields(chain).items() if name != "kl"} for chain in self.chains
            ],
            "text": None if self.text is None else {**_fields(self.text), "relative": self.text.relative},
            "sensitivity": dict(self.sensitivity),
        }


class ParityError(CheckError):
    """Gates failed; `parity` is the whole verification, `details` what --json shows of it."""

    def __init__(self, message: str, parity: Parity) -> None:
        super().__init__(message)
        self.parity = parity
        self.details = {"parity": parity.document()}


def _fields(thing: object) -> dict[str, object]:
    return dict(vars(thing))


class ReferenceStreams:
    """The reference run as the runtime runs streams: each with a memory and a length of its own.

    Attributes:
        large: whether the model is, so that float32 has to do.
    """

    def __init__(self, reference: Reference, count: int) -> None:
        self.reference = reference
        self.memories: list[Memory] = [reference.initial_memory(1) for _ in range(count)]
        self.large = reference.dtype != torch.float64

    def step(self, tokens: Ids, counts: Ids) -> NDArray[Any]:
        """One segment, [b, T] → [b, T, V]; rows beyond the counts are zero. Streams in like states run together."""
        shape = (*tokens.shape, self.reference.config.vocab_size)
        result: NDArray[Any] = np.zeros(shape, np.float32 if self.large else np.float64)  # pages come when written
        alike: dict[tuple[int, int], list[int]] = {}
        for row, count in enumerate(counts.tolist()):
            if count:
                alike.setdefault((count, self.memories[row][0].shape[1]), []).append(row)
        for (count, _), rows in alike.items():
            memories = [self.memories[row] for row in rows]
            alone = len(rows) == 1  # then nothing is copied: a long memory is larger than the model
            joined = memories[0] if alone else [torch.cat(layer) for layer in zip(*memories, strict=True)]
            for row in rows:
                self.memories[row] = []
            del memories
            logprobs, after = self.reference(torch.from_numpy(tokens[rows, :count]), _handed_over(joined))
            if count == tokens.shape[1] and len(rows) == len(tokens):
                result = logprobs.numpy()  # all streams alike, the usual case: no second copy of a large vocabulary
            else:
                result[rows, :count] = logprobs.numpy()
            for index, row in enumerate(rows):
                self.memories[row] = [layer[index : index + 1] for layer in after]
        return result

    def memory(self, form: str) -> Iterator[tuple[str, NDArray[Any]]]:
        """Name and values as `Stream.memory()` has them, shorter streams zero-padded on the left; one at a time,
        because all of them together would be several times the model where the memory is long.
        """
        rows = max(memory[0].shape[1] for memory in self.memories)
        streams = (_named(self.reference, memory, form) for memory in self.memories)
        for tensors in zip(*streams, strict=True):
            padded = []
            for _, tensor in tensors:
                plain = tensor[0].numpy()
                padded.append(np.pad(plain, [(rows - plain.shape[0], 0), *[(0, 0)] * (plain.ndim - 1)]))
            yield tensors[0][0], np.stack(padded)


def _handed_over(memory: Memory) -> Iterator[torch.Tensor]:
    """The layers of a memory, each gone as soon as the next is asked for."""
    memory.reverse()
    while memory:
        yield memory.pop()


def _named(reference: Reference, memory: Memory, form: str) -> Iterator[tuple[str, torch.Tensor]]:
    if form == "hidden":
        yield from ((f"layers.{i:02d}.hidden", rows) for i, rows in enumerate(memory))
        return
    for i, (key, value) in enumerate(reference.keys_and_values(memory)):
        yield f"layers.{i:02d}.key", key
        yield f"layers.{i:02d}.value", value


def openers(
    folder: Path, manifest: Manifest, backend: str = "auto", threads: int | None = None
) -> list[Callable[[], Model]]:
    """What loads a bundle for each update rule that runs here; hashes are checked once. Engines have one rule."""
    if backend in ("rtx", "tensorrt"):
        return [partial(load, folder, backend, threads)]
    return [
        partial(load, folder, backend, threads, verify_files=number == 0, update=rule, lean=number > 0)
        for number, rule in enumerate(usable_updates(manifest.updates))
    ]


def verify_models(
    openers: Sequence[Callable[[], Model]],
    reference: Reference,
    source: str,
    text: Ids | None = None,
    segments: int | None = None,
    listener: Listener | None = None,
    seed: int = 0,
    stand_in_for: str | None = None,
) -> Parity:
    """Run the chains and the text, and judge them by the ladder.

    Args:
        openers: what loads the bundle, once per way to run it (update rule); one is open at a time, because each holds
            its weights. The first is the one users get: it alone runs the long chains and the text.
        reference: the model it should be equal to.
        source: where the reference's weights came from, for the report.
        text: token ids [T] of real text; without it tokens are random and distribution gates are not judged.
        segments: of the longest chain; None for enough to roll the memory over.
        listener: hears of progress.
        seed: of random tokens and lengths.
        stand_in_for: the precision to judge by, where what is loaded is a float32 copy that rounds to it.
    """
    listener = listener or Silent()
    chains: list[ChainResult] = []
    compared: TextResult | None = None
    for number, opener in enumerate(openers):
        listener.stage("load the bundle")
        give_back()
        model = opener()
        plans = list(_plans(model, segments, text, seed, brief=number > 0))
        listener.stage(f"verify against PyTorch, {model.update} memory", sum(len(plan.calls) for plan in plans))
        chains += [_run_chain(model, reference, plan, listener) for plan in plans]
        if not number:
            first = model.manifest, model.backend.name, model.backend.description
            if text is not None:
                limit = max(TEXT_SEGMENTS * model.segment_lengths[0], TEXT_TOKENS)
                compared = _compare_text(model, reference, text[: limit + 1], listener)
        del model
    manifest, backend, description = first
    dtype = str(reference.dtype).removeprefix("torch.")
    precision: str = stand_in_for or manifest.precision
    if stand_in_for:
        description = f"{description}, in float32 rounded to {stand_in_for} (indicative)"
    gates = tuple(_judge(manifest, precision, backend, chains, compared))
    return Parity(description, precision, f"{source}, computed in {dtype}", tuple(chains), compared, gates)


@dataclass(frozen=True)
class _Plan:
    """A chain to run: tokens [b, T] and lengths [b] of each segment."""

    name: str
    streams: int
    calls: Sequence[tuple[Ids, Ids]]


def _plans(model: Model, segments: int | None, text: Ids | None, seed: int, brief: bool) -> Iterator[_Plan]:
    """Full segments of every program, mixed partial ones, and one stream alone where the batch is larger.

    Brief plans fill the memory and roll it over, but leave the judgement of drift to the others.
    """
    draws, batch, longest = np.random.default_rng(seed), model.batch_size, model.segment_lengths[0]
    tokens = _TokenSource(model.vocab_size, text, draws)
    to_fill = math.ceil(model.memory_length / longest)
    to_judge_drift = 4 * math.ceil(DRIFT_ROWS / (longest * batch))
    many = to_fill + 8
    if not brief:
        many = segments if segments is not None else to_fill + max(12, min(to_fill, 32), to_judge_drift)

    def full(streams: int, length: int, count: int) -> list[tuple[Ids, Ids]]:
        return [(tokens.take(streams, length), np.full(streams, length, np.int32)) for _ in range(count)]

    rule = f", {model.update}" if len(model.manifest.updates) > 1 else ""
    yield _Plan(f"segments of {longest}{rule}", batch, full(batch, longest, many))
    for length in model.segment_lengths[1:]:
        calls = full(batch, length, 4) + full(batch, longest, to_fill) + full(batch, length, 16)
        yield _Plan(f"segments of {length}{rule}", batch, calls)
    mixed = []
    for _ in range(16 if brief else max(16, many // 2)):
        width = int(draws.integers(1, longest + 1))
        counts = draws.integers(0, width + 1, batch).astype(np.int32)
        counts[int(draws.integers(batch))] = width
        mixed.append((tokens.take(batch, width), counts))
    yield _Plan(f"mixed partial segments{rule}", batch, mixed)
    if batch > 1:
        yield _Plan(f"one stream alone{rule}", 1, full(1, longest, to_fill + 4))


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


def _run_chain(model: Model, reference: Reference, plan: _Plan, listener: Listener) -> ChainResult:
    result = ChainResult(plan.name, plan.streams)
    stream, truth = model.stream(plan.streams), ReferenceStreams(reference, plan.streams)
    every = 1 if model.manifest.state_bytes <= CHEAP_MEMORY else SPARSE_MEMORY
    scale = 1.0
    for number, (tokens, counts) in enumerate(plan.calls):
        if result.full_from is None and stream.fill.min() == model.memory_length:
            result.full_from = result.segments
        if truth.large and isinstance(model.backend, OnnxRuntimeCpu):
            model.backend.release_pages()  # the reference needs the room
        _run_segment(result, truth, stream, tokens, counts)
        if number % every == 0 or number == len(plan.calls) - 1:
            scale = _compare_memory(result, truth, stream, model.manifest.memory, scale)
        result.segments += 1
        listener.advance()
    return result


def _run_segment(result: ChainResult, truth: ReferenceStreams, stream: Stream, tokens: Ids, counts: Ids) -> None:
    """One segment on both sides; a function of its own so that its large arrays are gone before the next."""
    expected = truth.step(tokens, counts)
    if truth.large:
        trim()  # neither side should stand on what the other has freed
    found = stream.step(tokens, counts)
    # Views: copies of what counts would be as large again, and over a large vocabulary that is hundreds of megabytes.
    _compare(result, [(expected[row, :count], found[row, :count]) for row, count in enumerate(counts) if count])
    if truth.large:
        trim()


def _compare_memory(result: ChainResult, truth: ReferenceStreams, stream: Stream, form: str, scale: float) -> float:
    """Hold all of the memory against the reference's; the largest value seen so far, from 1 on, is the scale."""
    expected = truth.memory(form)
    for name, found in stream.iter_memory():
        known, rows = next(expected)
        assert known == name
        scale = max(scale, float(np.abs(rows).max(initial=0)))
        difference = np.abs(rows - found).max(initial=0)
        result.max_memory = max(result.max_memory, float(np.nan_to_num(difference, nan=np.inf)) / scale)
    return scale


def _compare(result: ChainResult, streams: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    """Add one segment to a chain's figures: expected and found rows [n, V] per stream; in float64, some at a time."""
    pieces = []
    for expected, found in streams:
        rows = max(1, CHUNK // expected.shape[1])
        for first in range(0, len(expected), rows):
            pieces.append(_compare_rows(result, expected[first : first + rows], found[first : first + rows]))
    count = sum(len(expected) for expected, _ in streams)
    result.positions += count
    result.rows.append(count)
    result.max_per_segment.append(max((largest for largest, _ in pieces), default=0.0))
    result.mean_logprobs.append(sum(total for _, total in pieces) / max(sum(e.size for e, _ in streams), 1))
    result.max_logprobs = max(result.max_logprobs, result.max_per_segment[-1])


def _compare_rows(result: ChainResult, expected: NDArray[Any], found: NDArray[Any]) -> tuple[float, float]:
    """Largest and summed |Δ| of some rows; KL and agreement go into the result."""
    truth, other = torch.from_numpy(expected).double(), torch.from_numpy(found).double()
    difference = (other - truth).abs().nan_to_num(nan=math.inf)  # NaN counts as infinitely far
    normal, agreed = (rows - rows.logsumexp(dim=1, keepdim=True) for rows in (truth, other))
    divergence = (normal.exp() * (normal - agreed)).sum(dim=1).nan_to_num(nan=math.inf)
    result.kl.extend(divergence.tolist())
    best = truth.topk(min(2, truth.shape[1]), dim=1).values
    decided = best[:, 0] - best[:, -1] >= (NEAR_TIE if best.shape[1] > 1 else 0)
    result.decided += int(decided.sum())
    result.agreeing += int((truth.argmax(dim=1) == other.argmax(dim=1))[decided].sum())
    return float(difference.max()), float(difference.sum())


def _compare_text(model: Model, reference: Reference, text: Ids, listener: Listener) -> TextResult:
    """Mean nll of a text, with the same cuts on both sides, one stream."""
    longest = model.segment_lengths[0]
    listener.stage("perplexity of the text", math.ceil((len(text) - 1) / longest))
    stream, memory = model.stream(1), reference.initial_memory(1)
    theirs, ours = 0.0, 0.0
    for first in range(0, len(text) - 1, longest):
        piece = text[first : first + longest + 1]
        logprobs, memory = reference(torch.from_numpy(piece[None, :-1]), memory)
        targets = torch.from_numpy(piece[None, 1:, None].astype(np.int64))
        theirs -= float(logprobs.double().gather(2, targets).sum())
        ours += float(stream.score(piece[None]).astype(np.float64).sum())
        listener.advance()
    return TextResult(len(text), theirs / (len(text) - 1), ours / (len(text) - 1))


def _judge(
    manifest: Manifest, precision: str, backend: str, chains: Sequence[ChainResult], text: TextResult | None
) -> Iterator[Gate]:
    """The gates of this precision and backend, in the ladder's order."""
    limits = rung(precision, backend)

    def gate(name: str, value: float | None, limit: float, judged: bool = True) -> Gate:
        passed = None if value is None or not judged else bool(value <= limit)
        return Gate(name, value, limit, passed)

    if limits.logprobs is not None:
        yield gate("log-probs max abs", max(chain.max_logprobs for chain in chains), limits.logprobs)
    if limits.memory is not None:
        worst = max(chain.max_memory for chain in chains) if manifest.memory_length else None
        yield gate("memory max abs (relative)", worst, limits.memory)
    drifts = [chain.early_and_late for chain in chains]
    ratios = [(late, no_drift_limit(early)) for early, late in (d for d in drifts if d)]
    worst_drift = max(ratios, key=lambda pair: pair[0] / pair[1], default=None)
    yield gate("drift (late mean abs)", worst_drift and worst_drift[0], worst_drift[1] if worst_drift else 0.0)
    kl = float(np.mean([value for chain in chains for value in chain.kl]))
    yield gate("KL mean", kl, limits.kl, text is not None)
    decided, agreeing = sum(chain.decided for chain in chains), sum(chain.agreeing for chain in chains)
    if limits.top1 is not None:
        differing = (decided - agreeing) / decided if decided else None
        yield gate("top-1 differing", differing, 1 - limits.top1, text is not None)
    yield gate("perplexity (relative)", None if text is None else text.relative, limits.perplexity)
