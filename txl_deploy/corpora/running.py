"""Score a whole corpus, from its files to the results."""

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
from txl_deploy.retrieval.store import Store


def score_corpus(
    model: Model,
    corpus: Corpus,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    skip_bad: bool = False,
    jobs: int = 1,
    store: Store | None = None,
) -> dict[str, Any]:
    """Score every document of a corpus that has no result in the file of results yet.

    Args:
        model: the model that scores.
        corpus: the documents.
        out: the file of results; None to keep only the sums.
        resume, force: True to continue `out`, or to replace it.
        skip_bad: True to count documents that cannot be scored; False to stop at the first of these documents.
        jobs: number of threads that score.
        store: a datastore to search at each position, without the rows of the document itself.

    Returns:
        The sums of all results, including the results of earlier runs.

    Raises:
        TxlError: a file cannot be read, or a document cannot be scored; results that were written before are kept.
    """
    manifest, totals, results, known = model.manifest, Totals(), None, 0
    require_tokens(manifest, "score")
    with ExitStack() as opened:
        if out is not None:
            results = opened.enter_context(Results(out, header_of(manifest, corpus, store), resume, force))
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
                more = "what was written is kept, for --resume --skip-bad" if results else "--skip-bad leaves it out"
                raise kind(f"{bad.why}; {more}")
            display.warn(bad.why)
            keep([left_out(bad)])

        def good() -> Iterator[Unit]:
            nonlocal known
            encoder = Encoder(manifest, model.vocabulary)
            for document in corpus.documents(is_done):
                if isinstance(unit := encoder.unit(document), Bad):
                    refuse(unit)
                else:
                    known += store is not None and store.excluding(unit.own).hidden > 0
                    yield unit

        work = batches(good(), 1 if store else rows_of(manifest), jobs)
        for batch, found in opened.enter_context(closing(on_threads(model, work, jobs, told, store))):
            pairs = list(zip(batch, found, strict=True))
            keep([scores_of(unit, total) for unit, total in pairs if isinstance(total, float)])
            for unit, why in pairs:
                if isinstance(why, str):
                    refuse(Bad(unit.index, unit.id, f"{unit.place}: {why}"), BackendError)
        if known:
            display.warn(f"the store has read {known:,} of these documents; each is scored without its own rows")
        if store is not None and store.searches.told:
            display.warn(store.searches.told)
    return totals.document()
