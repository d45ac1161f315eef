"""Score units on one model: as many side by side as it has rows, each from fresh memory, on several threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from queue import SimpleQueue

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import TxlError
from txl_runtime.model import Model
from txl_runtime.streaming.inputs import require_tokens

from txl_deploy.corpora.documents import Unit

SEGMENTS_PER_CALL = 16
"""Longest segments per call: memory does not depend on a document's length."""
MOST_DOCUMENTS = 4096
"""Documents of a window, which is read ahead and sorted by length, so that few rows wait for a batch's longest."""
ENOUGH_TOKENS, MOST_TOKENS = 1 << 20, 1 << 26
"""Tokens at which a window with documents for every row ends; and those at which any window ends."""
Told = Callable[[Sequence[Unit], float], None]
"""Receives a batch and the share of it that was scored since the last call."""
Scored = tuple[list[Unit], list[float | str]]
"""A batch, and for each unit the sum of its negative log-likelihoods in nats, or the reason why there is none."""


def rows_of(manifest: Manifest) -> int:
    """Return the number of documents of different lengths that one stream of a model scores at once.

    Only independent sequences whose segments may hold any number of tokens can differ in length; other models score one
    document at a time.
    """
    return manifest.batch_size if manifest.can.run_apart and manifest.can.run_ragged else 1


def batches(units: Iterable[Unit], rows: int, jobs: int = 1) -> Iterator[list[Unit]]:
    """Yield units of similar length, `rows` at a time, window by window; within a window the longest come first."""
    window: list[Unit] = []
    tokens, least = 0, 4 * rows * jobs
    for unit in units:
        window.append(unit)
        tokens += len(unit.ids)
        enough = tokens >= ENOUGH_TOKENS and len(window) >= least
        if enough or tokens >= MOST_TOKENS or len(window) >= max(MOST_DOCUMENTS, least):
            yield from _sorted(window, rows)
            window, tokens = [], 0
    yield from _sorted(window, rows)


def _sorted(window: list[Unit], rows: int) -> Iterator[list[Unit]]:
    ordered = sorted(window, key=lambda unit: (-len(unit.ids), unit.index))
    return (ordered[first : first + rows] for first in range(0, len(ordered), rows))


class Scorer:
    """A model with one stream.

    Raises:
        UsageError: the model cannot score.
    """

    def __init__(self, model: Model) -> None:
        require_tokens(model.manifest, "score")
        self.rows = rows_of(model.manifest)
        self._stream = model.stream(self.rows)
        self._chunk = model.segment_lengths[0] * SEGMENTS_PER_CALL

    def score(self, units: Sequence[Unit], told: Told = lambda units, share: None) -> list[float | str]:
        """Score at most `rows` units side by side.

        Returns:
            For each the sum of its negative log-likelihoods in nats, or the reason why there is none. If the engine
            fails, the units are repeated one by one, so that only the faulty one has none.
        """
        try:
            totals = self._totals(units, told)
        except TxlError as error:
            return [found for unit in units for found in self.score([unit], told)] if len(units) > 1 else [str(error)]
        return [total if math.isfinite(total) else _no_number(total) for total in totals]

    def _totals(self, units: Sequence[Unit], told: Told) -> list[float]:
        """Sum every unit's results, in float64."""
        stream, totals = self._stream, [0.0] * len(units)
        stream.reset()
        most = max(len(unit.ids) for unit in units)
        for first in range(0, most - 1, self._chunk):
            columns = min(self._chunk, most - 1 - first) + 1
            tokens, lengths = np.zeros((self.rows, columns), np.int32), np.zeros(self.rows, np.int32)
            for row, unit in enumerate(units):
                piece = unit.ids[first : first + columns]
                tokens[row, : len(piece)], lengths[row] = piece, len(piece)
            nll = stream.score(tokens) if self.rows == 1 else stream.score(tokens, lengths)
            for row in range(len(units)):
                totals[row] += float(nll[row, : max(int(lengths[row]) - 1, 0)].sum(dtype=np.float64))
            told(units, (columns - 1) / (most - 1))
        return totals


def _no_number(total: float) -> str:
    return (
        f"log-probabilities add up to {total}, expected a number; `txl-deploy verify` the bundle, and export fp16 "
        "again in fp32 or bf16"
    )


def on_threads(model: Model, work: Iterable[list[Unit]], jobs: int, told: Told) -> Generator[Scored]:
    """Yield batches as they are finished, by `jobs` threads with a stream each; with 1 job, by this thread."""
    if jobs == 1:
        scorer = Scorer(model)
        for batch in work:
            yield batch, scorer.score(batch, told)
        return
    free, ended = SimpleQueue[Scorer](), threading.Event()
    for _ in range(jobs):
        free.put(Scorer(model))

    def going(units: Sequence[Unit], share: float) -> None:
        if ended.is_set():  # an interrupt reaches the main thread alone, so workers look here
            raise InterruptedError
        told(units, share)

    def score(batch: list[Unit]) -> Scored:
        scorer = free.get()
        try:
            return batch, scorer.score(batch, going)
        finally:
            free.put(scorer)

    running: set[Future[Scored]] = set()
    pool = ThreadPoolExecutor(jobs)
    try:
        for batch in work:
            running.add(pool.submit(score, batch))
            if len(running) > 2 * jobs:  # for each thread one batch at work and one that waits
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
        yield from (each.result() for each in as_completed(running))
    finally:
        ended.set()
        pool.shutdown(cancel_futures=True)
