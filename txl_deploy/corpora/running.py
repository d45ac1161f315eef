"""The whole of it: a corpus, or one text in parts, from files to results."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from txl_report.numbers import prefixed
from txl_runtime.bundle.folder import undisturbed
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle, bundle_path, read_bundle
from txl_runtime.errors import BackendError, TxlError, UsageError
from txl_runtime.model import load
from txl_runtime.streaming.inputs import require_tokens
from txl_runtime.types import Ids

from txl_deploy.console import stderr
from txl_deploy.corpora.batching import batches, windows
from txl_deploy.corpora.documents import Bad, Unit, spelled
from txl_deploy.corpora.encoding import Encoder
from txl_deploy.corpora.parts import cut, warm_up
from txl_deploy.corpora.processes import Partly, Processes, Scored
from txl_deploy.corpora.progress import Advance
from txl_deploy.corpora.results import Header, Results
from txl_deploy.corpora.scoring import Scorer, rows_of
from txl_deploy.corpora.sources import Corpus
from txl_deploy.corpora.totals import Totals, left_out, scores_of
from txl_deploy.corpora.worker import Settings, identity
from txl_deploy.places import refuse_inside

MOST_WORKERS = 1024


@dataclass(frozen=True)
class Machine:
    """What computes: the bundle, the backend, threads per process, and how many processes; 1 is this one."""

    bundle: Path
    backend: str = "auto"
    threads: int | None = None
    workers: int = 1

    def read(self) -> Bundle:
        """The bundle, for its manifest and vocabulary.

        Raises:
            UsageError: too many processes or none; or the model cannot score.
        """
        if not 1 <= self.workers <= MOST_WORKERS:
            raise UsageError(f"--workers is {self.workers}, expected 1 … {MOST_WORKERS}; one per core at most")
        # In this process `load` looks at every hash.
        found = undisturbed(bundle_path(self.bundle), lambda folder: read_bundle(folder, self.workers > 1))
        require_tokens(found.manifest, "score")
        return found

    def score(self, manifest: Manifest, work: Iterator[list[Unit]], told: Partly) -> Generator[Scored]:
        """Batches with their outcomes; of several processes each has a thread; `told` hears how far each is."""
        if self.workers > 1:
            threads = 1 if self.threads is None else self.threads
            place = os.fsencode(self.bundle.absolute())
            settings = Settings(bundle=spelled(self.bundle), place=place, backend=self.backend, threads=threads)
            with Processes(settings, self.workers, identity(manifest), told) as processes:
                yield from processes.score(work)
            return
        model = load(self.bundle, self.backend, self.threads)
        if identity(model.manifest) != identity(manifest):
            raise BackendError(f"{self.bundle}: was replaced while it was read, expected one bundle; start again")
        scorer = Scorer(model)
        for batch in work:
            yield batch, scorer.score(batch, partial(told, batch))


@dataclass(frozen=True)
class Keeping:
    """What becomes of results.

    Attributes:
        out: the file that they are kept in, or None.
        resume, force: go on with a file that is there; replace it.
        skip_bad: leave out what cannot be scored, and count it; else the first one ends the run.
    """

    out: Path | None = None
    resume: bool = False
    force: bool = False
    skip_bad: bool = False


def score_corpus(machine: Machine, corpus: Corpus, keeping: Keeping) -> dict[str, Any]:
    """Score every document of a corpus that is not in the file of results yet.

    Returns:
        What all results add up to, those of earlier runs too.

    Raises:
        TxlError: something cannot be read, or a document cannot be scored; what was scored before it is kept.
    """
    bundle = machine.read()
    manifest = bundle.manifest
    if (keeping.resume or keeping.force) and keeping.out is None:
        raise UsageError("--resume and --force are for a file of results, expected -o OUT; give it, or leave them out")
    if keeping.resume and keeping.force:
        raise UsageError("--resume goes on and --force begins anew, expected one of them; leave one out")
    if corpus.left_out and not corpus.recursive:
        stderr.print(f"note: {corpus.left_out} folders in {corpus.path} are left out; --recursive takes them")
    totals, results = Totals(), None
    with ExitStack() as opened:
        if keeping.out is not None:
            refuse_inside(keeping.out, corpus.path, machine.bundle)
            header = Header(
                model_id=manifest.model_id,
                precision=manifest.precision,
                segment_length=manifest.segment_lengths[0],
                corpus=corpus.identity(),
                boundary_token=manifest.boundary_token,
                field=corpus.named,
                weights=identity(manifest)[1],
                vocabulary=manifest.files[manifest.vocabulary].sha256 if manifest.vocabulary else None,
            )
            results = opened.enter_context(Results(keeping.out, header, keeping.resume, keeping.force))
            totals = results.totals
        shown = opened.enter_context(Advance(f"score {corpus.path.name}", corpus.size()))
        sink = _Sink(results, totals, shown, keeping.skip_bad)
        units = _good(Encoder(manifest, bundle.vocabulary()).units(corpus.documents(sink.done)), sink)
        work = _in_batches(units, rows_of(manifest), machine.workers)
        for batch, outcomes in opened.enter_context(closing(machine.score(manifest, work, shown.partly))):
            sink.take(batch, outcomes)
        if results is not None and corpus.count is not None:
            results.check_count(corpus.count)
    return totals.document()


class _Sink:
    """Takes results and what has none: into the file, the totals and the display."""

    def __init__(self, results: Results | None, totals: Totals, shown: Advance, skip_bad: bool) -> None:
        self._results, self._totals, self._shown, self._skip_bad = results, totals, shown, skip_bad

    def done(self, index: int, weight: int) -> bool:
        """Whether a document's result is there already."""
        if self._results is None or index not in self._results.finished:
            return False
        self._shown.skip(weight)
        return True

    def take(self, batch: list[Unit], outcomes: list[Any]) -> None:
        """Keep the results of a batch; then stop at what has none."""
        self._shown.partly(batch, 0)
        pairs = list(zip(batch, outcomes, strict=True))
        self._keep([scores_of(unit, each.total) for unit, each in pairs if each.total is not None])
        good = [unit for unit, each in pairs if each.total is not None]
        self._shown.advance(sum(unit.weight for unit in good), len(good), sum(unit.scored for unit in good))
        for unit, each in pairs:
            if each.total is None:
                self.refuse(Bad(unit.index, unit.id, unit.weight, f"{unit.place}: {each.why}"), BackendError)

    def refuse(self, bad: Bad, kind: type[TxlError] = UsageError) -> None:
        """Count a document without a result, or stop there."""
        if not self._skip_bad:
            raise kind(f"{bad.why}; what was scored so far is kept" if self._results else bad.why)
        self._keep([left_out(bad)])
        self._shown.advance(bad.weight, 0, 0)
        stderr.print(f"note: {bad.why}", soft_wrap=True)

    def _keep(self, scores: list[Any]) -> None:
        if self._results is not None:
            self._results.add(scores)
        else:
            for each in scores:
                self._totals.add(each)


def _in_batches(units: Iterator[Unit], rows: int, workers: int) -> Iterator[list[Unit]]:
    return itertools.chain.from_iterable(batches(window, rows) for window in windows(units, rows * workers))


def _good(units: Iterator[Unit | Bad], sink: _Sink) -> Iterator[Unit]:
    for unit in units:
        if isinstance(unit, Bad):
            sink.refuse(unit)
        else:
            yield unit


def score_parts(machine: Machine, ids: Ids, parts: int, name: str) -> tuple[float, dict[str, int]]:
    """Score one text in parts that run beside each other.

    Returns:
        The sum of all negative log-likelihoods in nats, and what the parts were.

    Raises:
        UsageError: too few parts; or the model's predictions depend on all that was before.
    """
    if parts < 1:
        raise UsageError(f"--parallel is {parts}, expected at least 1; as many as there are rows times workers")
    bundle = machine.read()
    manifest = bundle.manifest
    longest, warm, rows = manifest.segment_lengths[0], warm_up(manifest), rows_of(manifest)
    plan = cut(len(ids) - 1, parts, longest, warm)
    stderr.print(
        f"note: {plan.count} parts of {plan.length} tokens, each after {plan.warm_up} that fill its memory: "
        f"{prefixed(plan.extra, 'tokens')} more to compute, {plan.extra / plan.total:.1%}",
        soft_wrap=True,
    )
    if rows * machine.workers == 1 and plan.count > 1:
        stderr.print("note: the bundle has one row, so parts run one after the other; --workers gives them processes")
    total, work = 0.0, _in_batches(plan.units(ids), rows, machine.workers)
    with Advance(f"score {name}", plan.total) as shown, closing(machine.score(manifest, work, shown.partly)) as scored:
        for batch, outcomes in scored:
            shown.partly(batch, 0)
            for unit, outcome in zip(batch, outcomes, strict=True):
                if outcome.total is None:
                    raise BackendError(f"{name}, {unit.place}: {outcome.why}")
                total += outcome.total
                shown.advance(unit.weight, 0, unit.scored)
    return total, {"parts": plan.count, "warm_up": plan.warm_up, "extra_tokens": plan.extra}
