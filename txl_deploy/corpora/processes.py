"""Batches, scored by several processes. One that dies is replaced, and what it was at is repeated."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec
from txl_runtime.errors import BackendError
from txl_runtime.starting import apart, signal_of

from txl_deploy.corpora.documents import Outcome, Unit
from txl_deploy.corpora.worker import Ready, Settings, work

REPEATS = 2
"""How often a batch is repeated whose process died; the last time document by document, so that one can be named."""
SECONDS_TO_END = 5.0

Scored = tuple[list[Unit], list[Outcome]]
Partly = Callable[[list[Unit], float], None]


@dataclass(eq=False)
class _Job:
    """A batch, and how many processes died of it."""

    units: list[Unit]
    deaths: int = 0


@dataclass(eq=False)
class _Worker:
    """A process, its end of the pipe, and what it is at: a batch once it has loaded the bundle."""

    process: Any
    connection: Connection
    loaded: bool = False
    job: _Job | None = None


class Processes:
    """Processes that score; use it in a `with`, which ends them.

    Args:
        settings: what each loads.
        many: how many processes.
        model: the `identity` of the one that they have to load.
        told: hears of each batch which share of it is done, now and then.
    """

    def __init__(self, settings: Settings, many: int, model: tuple[str, str], told: Partly = lambda *_: None) -> None:
        self._settings, self._many, self._model = settings, many, model
        self._context = get_context("spawn")
        self._told = told
        self._workers: list[_Worker] = []
        self._repeats: list[_Job] = []
        self._failed_starts = 0

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(SECONDS_TO_END)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()

    def score(self, batches: Iterator[list[Unit]]) -> Iterator[Scored]:
        """Every batch with its outcomes, in the order in which they are finished.

        Where the batches end with an error, what was begun is finished first.

        Raises:
            BackendError: the bundle cannot be loaded there, or processes die without having been given anything.
        """
        failed: Exception | None = None
        more = True
        while True:
            while more and len(self._workers) < self._many:
                self._start()
            for worker in self._workers:
                if worker.loaded and worker.job is None and (more or self._repeats):
                    try:
                        job = self._repeats.pop() if self._repeats else _Job(next(batches))
                    except StopIteration:
                        more = False
                    except Exception as error:
                        failed, more = error, False
                    else:
                        self._give(worker, job)
            if not more and not self._repeats and not any(worker.job for worker in self._workers):
                break
            if not self._workers:
                self._start()
            for connection in wait([worker.connection for worker in self._workers]):
                yield from self._hear(next(each for each in self._workers if each.connection is connection))
        if failed is not None:
            raise failed

    def _start(self) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=work, args=(there, msgspec.msgpack.encode(self._settings)), daemon=True, name="txl-deploy score"
        )
        with apart(), _no_interrupt():  # the latter until the process ignores it itself
            process.start()
        there.close()
        self._workers.append(_Worker(process, here))

    def _give(self, worker: _Worker, job: _Job) -> None:
        worker.job = job
        with contextlib.suppress(OSError):  # it has died: heard of when its end is read
            worker.connection.send_bytes(msgspec.msgpack.encode(job.units))

    def _hear(self, worker: _Worker) -> Iterator[Scored]:
        try:
            said = worker.connection.recv_bytes()
        except (EOFError, OSError):
            yield from self._buried(worker)
            return
        if not worker.loaded:
            ready = msgspec.msgpack.decode(said, type=Ready)
            if ready.error is not None:
                raise BackendError(ready.error)
            if ready.model != self._model:
                raise BackendError(f"{self._settings.bundle}: was replaced while it was read; start again")
            worker.loaded, self._failed_starts = True, 0
        elif worker.job is not None:
            found = msgspec.msgpack.decode(said, type=list[Outcome] | float)
            if isinstance(found, float):
                self._told(worker.job.units, found)
            else:
                job, worker.job = worker.job, None
                yield job.units, found

    def _buried(self, worker: _Worker) -> Iterator[Scored]:
        """A process that has died leaves; what it was at is repeated, or named."""
        worker.process.join(SECONDS_TO_END)
        self._workers.remove(worker)
        worker.connection.close()
        how = signal_of(worker.process.exitcode) or f"code {worker.process.exitcode}"
        if not worker.loaded:
            self._failed_starts += 1
            if self._failed_starts > REPEATS:
                raise BackendError(
                    f"{self._failed_starts} processes ended with {how} while they loaded {self._settings.bundle}, "
                    "expected them to run; give fewer --workers, or look for what ends them (memory?)"
                )
        job = worker.job
        if job is None:
            return
        job.deaths += 1
        if job.deaths > REPEATS:
            why = f"its process ended with {how}, {job.deaths} times in all, expected a result; is there enough memory?"
            yield job.units, [Outcome(None, why) for _ in job.units]
        elif job.deaths == REPEATS:
            self._repeats += [_Job([unit], job.deaths) for unit in job.units]
        else:
            self._repeats.append(job)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Keep Ctrl-C waiting; what starts inside keeps it waiting for good. Nothing happens on Windows."""
    mask = getattr(signal, "pthread_sigmask", None)
    if mask is None:
        yield
        return
    before = mask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        mask(signal.SIG_SETMASK, before)
