"""Score units with one model, on several threads; each sequence of a stream scores one unit, from empty memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from queue import SimpleQueue
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import TxlError
from txl_runtime.model import Model
from txl_runtime.streaming.inputs import require_tokens

from txl_deploy.corpora.documents import Unit
from txl_deploy.retrieval.store import Store

SEGMENTS_PER_CALL = 16
"""Number of longest segments per call, so that memory does not depend on a document's length."""
MOST_DOCUMENTS = 4096
"""Maximum number of documents in a window: documents that are read ahead and sorted by length, for less padding."""
ENOUGH_TOKENS, MOST_TOKENS = 1 << 20, 1 << 26
"""Number of tokens at which a window ends if it has 4 documents for every row, and at which it ends in any case."""
Told = Callable[[Sequence[Unit], float], None]
"""A function for progress: it gets a batch, and the share of the batch that was scored since the last call."""
Scored = tuple[list[Unit], list[float | str]]
"""A batch, and for each of its units the sum of negative log-likelihoods in nats, or the reason why there is none."""


def rows_of(manifest: Manifest) -> int:
    """Return the number of documents of different lengths that one stream of a model scores at once.

    Documents of different lengths need independent sequences, and segments in which any number of tokens may count. If
    a model lacks these, it scores one document at a time.
    """
    return manifest.batch_size if manifest.can.run_apart and manifest.can.run_ragged else 1


def batches(units: Iterable[Unit], rows: int, jobs: int = 1) -> Iterator[list[Unit]]:
    """Yield batches of `rows` units of similar length, window by window; each window begins with its longest units."""
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
    """A model with one stream, which scores units.

    Args:
        model: the model that scores.
        store: a datastore to search at each position. A document's own rows are hidden in it, so documents are scored
            one by one.

    Raises:
        UsageError: the model cannot score tokens.
    """

    def __init__(self, model: Model, store: Store | None = None) -> None:
        require_tokens(model.manifest, "score")
        self.rows, self._store = 1 if store else rows_of(model.manifest), store
        self._stream = model.stream(self.rows)
        self._chunk = model.segment_lengths[0] * SEGMENTS_PER_CALL

    def score(self, units: Sequence[Unit], told: Told = lambda units, share: None) -> list[float | str]:
        """Score at most `rows` units side by side.

        Returns:
            For each unit, the sum of its negative log-likelihoods in nats, or the reason why there is none. If the
            engine fails, the units are scored again one by one, so that only the faulty unit has no result.
        """
        try:
            totals = self._totals(units, told)
        except TxlError as error:
            return [result for unit in units for result in self.score([unit], told)] if len(units) > 1 else [str(error)]
        return [total if math.isfinite(total) else _no_number(total) for total in totals]

    def _totals(self, units: Sequence[Unit], report: Told) -> list[float]:
        """Return the sum of each unit's negative log-likelihoods, added up in float64."""
        stream, totals = self._stream, [0.0] * len(units)
        searched: dict[str, Any] = {"datastore": self._store.excluding(units[0].own)} if self._store else {}
        stream.reset()
        most = max(len(unit.ids) for unit in units)
        for first in range(0, most - 1, self._chunk):
            columns = min(self._chunk, most - 1 - first) + 1
            tokens, lengths = np.zeros((self.rows, columns), np.int32), np.zeros(self.rows, np.int32)
            for row, unit in enumerate(units):
                piece = unit.ids[first : first + columns]
                tokens[row, : len(piece)], lengths[row] = piece, len(piece)
            nll = stream.score(tokens, **searched) if self.rows == 1 else stream.score(tokens, lengths)
            for row in range(len(units)):
                totals[row] += float(nll[row, : max(int(lengths[row]) - 1, 0)].sum(dtype=np.float64))
            report(units, (columns - 1) / (most - 1))
        return totals


def _no_number(total: float) -> str:
    return (
        f"log-probabilities add up to {total}, expected a number; `txl-deploy verify` the bundle, and export fp16 "
        "again in fp32 or bf16"
    )


def on_threads(
    model: Model, work: Iterable[list[Unit]], jobs: int, told: Told, store: Store | None = None
) -> Generator[Scored]:
    """Yield batches with their scores when they are finished.

    `jobs` threads, each with a stream, score the batches; if `jobs` is 1, this thread does.
    """
    if jobs == 1:
        scorer = Scorer(model, store)
        for batch in work:
            yield batch, scorer.score(batch, told)
        return
    free, ended = SimpleQueue[Scorer](), threading.Event()
    for _ in range(jobs):
        free.put(Scorer(model, store))

    def going(units: Sequence[Unit], share: float) -> None:
        if ended.is_set():  # only the main thread receives an interrupt, so workers check here
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
            if len(running) > 2 * jobs:  # for each thread, one batch that runs and one that waits
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
        yield from (each.result() for each in as_completed(running))
    finally:
        ended.set()
        pool.shutdown(cancel_futures=True)
