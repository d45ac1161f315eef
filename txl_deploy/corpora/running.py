"""Score a whole corpus, from files to results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from txl_runtime.errors import BackendError, TxlError, UsageError
from txl_runtime.model import Model
from txl_runtime.streaming.inputs import require_tokens

from txl_deploy.console import Display
from txl_deploy.corpora.documents import Bad, Unit
from txl_deploy.corpora.encoding import Encoder
from txl_deploy.corpora.results import Results, header_of
from txl_deploy.corpora.scoring import batches, on_threads, rows_of
from txl_deploy.corpora.sources import Corpus
from txl_deploy.corpora.totals import Scores, Totals, left_out, scores_of


def score_corpus(
    model: Model,
    corpus: Corpus,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    skip_bad: bool = False,
    jobs: int = 1,
) -> dict[str, Any]:
    """Score every document of a corpus that the file of results does not hold yet.

    Args:
        skip_bad: leave out documents that cannot be scored, and count them; else the first one ends the run.
        jobs: number of threads that score.

    Returns:
        The sums of all results, those of earlier runs included.

    Raises:
        TxlError: a file cannot be read, or a document cannot be scored; results written before it are kept.
    """
    manifest, totals, results = model.manifest, Totals(), None
    require_tokens(manifest, "score")
    with ExitStack() as opened:
        if out is not None:
            results = opened.enter_context(Results(out, header_of(manifest, corpus), resume, force))
            totals = results.totals
        display = opened.enter_context(Display(of_bytes=True))
        display.stage(f"score {corpus.path.name}", corpus.size())
        if corpus.left_out and not corpus.recursive:
            display.warn(f"{corpus.left_out} folders in {corpus.path} are left out; --recursive takes them")

        def is_done(index: int, weight: int) -> bool:
            there = results is not None and index in results.finished
            if there:
                display.advance(weight)
            return there

        def told(batch: Sequence[Unit], share: float) -> None:
            display.advance(share * sum(unit.weight for unit in batch))

        def keep(scores: list[Scores]) -> None:
            if results is not None:
                results.add(scores)
            else:
                for each in scores:
                    totals.add(each)

        def refuse(bad: Bad, kind: type[TxlError] = UsageError) -> None:
            if not skip_bad:
                raise kind(f"{bad.why}; what was written is kept, for --resume --skip-bad" if results else bad.why)
            display.warn(bad.why)
            keep([left_out(bad)])

        def good() -> Iterator[Unit]:
            encoder = Encoder(manifest, model.vocabulary)
            for document in corpus.documents(is_done):
                if isinstance(unit := encoder.unit(document), Bad):
                    refuse(unit)
                else:
                    yield unit

        work = batches(good(), rows_of(manifest), jobs)
        for batch, found in opened.enter_context(closing(on_threads(model, work, jobs, told))):
            pairs = list(zip(batch, found, strict=True))
            keep([scores_of(unit, total) for unit, total in pairs if isinstance(total, float)])
            for unit, why in pairs:
                if isinstance(why, str):
                    refuse(Bad(unit.index, unit.id, f"{unit.place}: {why}"), BackendError)
    return totals.document()
