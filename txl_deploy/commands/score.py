"""`txl-deploy score`: compute perplexity and bits per byte of a text, or of every document of a corpus."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from txl_runtime.bundle.vocabulary import Vocabulary
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.model import Model
from txl_runtime.streaming.inputs import require_tokens

from txl_deploy.commands.options import Backend, Bundle, Json, Threads, takes_datastore
from txl_deploy.console import Display, facts_table, print_json, stdout
from txl_deploy.corpora.scoring import SEGMENTS_PER_CALL
from txl_deploy.loading import load_alone
from txl_deploy.places import refuse_inside
from txl_deploy.retrieval import Mixture

if TYPE_CHECKING:
    from txl_deploy.retrieval.store import Store


@takes_datastore
def run(
    bundle: Bundle,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Text, or token ids in an .npy file; or documents: a folder, or a .jsonl file.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="JSON lines of results, appended document by document."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with OUT, after whatever ended the run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.")] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="Threads that score documents, each on one core unless --threads.")
    ] = 1,
    named: Annotated[
        str | None, typer.Option("--field", help="Which field has the text or token ids. (default text, else tokens)")
    ] = None,
    recursive: Annotated[bool, typer.Option("--recursive", help="Documents in folders of the folder too.")] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count what cannot be scored, instead of stopping at the first.")
    ] = False,
    mixture: Mixture | None = None,
    backend: Backend = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Score a text, or the documents of a folder or a file: perplexity, bits per token and, of text, per byte.

    Each document begins with the bundle's boundary token, if it has one; a single text begins without it.
    """
    from txl_deploy.corpora.sources import Corpus, is_corpus
    from txl_deploy.retrieval.store import open_store

    def store_of(model: Model) -> Store | None:
        return open_store(model, mixture)

    if is_corpus(file):
        from txl_deploy.corpora.running import score_corpus

        if (resume or force) and output is None:
            raise UsageError(
                "--resume and --force are for a file of results, expected -o OUT; give it, or leave them out"
            )
        if resume and force:
            raise UsageError("--resume goes on and --force begins anew, expected one of them; leave one out")
        corpus = Corpus(file, named, recursive)
        if output is not None:
            refuse_inside(output, file, bundle)
        model = load_alone(bundle, backend, 1 if threads is None and jobs > 1 else threads)
        result = score_corpus(model, corpus, output, resume, force, skip_bad, jobs, store_of(model))
    else:
        for_documents = {"-o": output, "--resume": resume, "--force": force, "--field": named, "--recursive": recursive}
        for name, is_given in (for_documents | {"--skip-bad": skip_bad, "--jobs": jobs > 1}).items():
            if is_given:
                raise UsageError(f"{file}: {name} is for documents, and this is one text; leave it out")
        result = _as_one_stream(bundle, file, backend, threads, store_of)
    if json:
        print_json(result)
        return
    shown = {
        name.replace("_", " "): f"{value:.6f}" if isinstance(value, float) else value for name, value in result.items()
    }
    stdout.print(facts_table({name: value for name, value in shown.items() if value is not None}))
    stdout.print(_in_one_line(result), soft_wrap=True)


def _in_one_line(result: dict[str, Any]) -> str:
    """Summarise a result: "59,999 of 60,000 tokens scored: perplexity 8.281536, 3.049897 bits per byte"."""
    scored = f"{result['scored_tokens']:,} of {result['tokens']:,} tokens scored"
    measured = [("perplexity {:.6f}", result["perplexity"]), ("{:.6f} bits per byte", result["bits_per_byte"])]
    cells = ", ".join(form.format(value) for form, value in measured if value is not None)
    return f"{scored}: {cells}" if cells else scored


def _as_one_stream(
    bundle: Path, file: Path, backend: str, threads: int | None, store_of: Callable[[Model], Store | None]
) -> dict[str, Any]:
    """Score one text with one stream, from beginning to end; return the sums and means as plain data."""
    from txl_report.calibration import begins_with_fitted, fitted

    model = load_alone(bundle, backend=backend, threads=threads)
    require_tokens(model.manifest, "score")
    ids, text_bytes = _read(file, model.vocabulary)
    if len(ids) < 2:
        raise UsageError(f"{file}: holds {len(ids)} tokens, expected at least 2, because the first is only context")
    stream, longest, store = model.stream(1), model.segment_lengths[0], store_of(model)
    store = None if store is None else store.excluding(ids)
    searched: dict[str, Any] = {} if store is None else {"datastore": store}
    total, chunk = 0.0, longest * SEGMENTS_PER_CALL
    with Display() as display:
        if begins_with_fitted(model.manifest, ids):
            count = fitted(model.manifest)
            display.warn(f"int4 is fitted to the text's first {count:,} tokens; the figures flatter the bundle")
        if store is not None and store.hidden:
            display.warn(f"the store has read this text; its {store.hidden:,} rows are hidden")
        display.stage(f"score {file.name}", len(ids) - 1)
        for first in range(0, len(ids) - 1, chunk):
            nll = stream.score(ids[None, first : first + chunk + 1], **searched)
            total += float(nll.sum(dtype=np.float64))
            if math.isnan(total):
                raise BackendError(
                    f"{file}: log-probabilities of tokens {first + 1} … {first + nll.shape[1]} hold NaN, expected "
                    "numbers; `txl-deploy verify` the bundle, and export fp16 again in fp32 or bf16"
                )
            display.advance(nll.shape[1])
        if store is not None and store.searches.told:
            display.warn(store.searches.told)
    unknown_id = getattr(model.vocabulary, "unknown", None)  # a byte vocabulary has no unknown words
    unknown = 0 if unknown_id is None else int((ids == unknown_id).sum())
    mean = total / (len(ids) - 1)
    # If the vocabulary lacks words of the text, the ids do not hold the whole text, so bits per byte are undefined.
    known = None if text_bytes is None or unknown else text_bytes
    return {
        "tokens": len(ids),
        "scored_tokens": len(ids) - 1,
        "nll": mean,
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
        "bits_per_token": mean / math.log(2),
        "bits_per_byte": None if known is None else total / math.log(2) / known,
        "unknown_words": unknown,
    }


def _read(file: Path, vocabulary: Vocabulary | None) -> tuple[NDArray[Any], int | None]:
    """Return token ids [T], and the number of bytes of all tokens except the first, or None for an .npy file."""
    from txl_export.token_files import read_ids, regular

    if file.suffix == ".npy":
        ids = read_ids(file)
        if ids.ndim != 1:
            raise UsageError(f"{file}: holds no single row of token ids, expected shape [T]; save it with numpy.save")
        return ids, None
    try:
        data = regular(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}, expected a file to score") from None
    if vocabulary is None:
        raise UsageError(
            f"{file}: the bundle has no vocabulary to read text with; give token ids in an .npy file, or export with "
            "--vocabulary FILE"
        )
    ids = vocabulary.encode(data)
    return ids, len(data) - len(vocabulary.decode(ids[:1]))
