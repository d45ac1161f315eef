"""`txl-deploy score`: perplexity and bits per byte of a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import txl_runtime
import typer
from numpy.typing import NDArray
from txl_runtime.bundle.vocabulary import Vocabulary
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.streaming.inputs import require_tokens

from txl_deploy.commands.options import Backend, Bundle, Json, Threads
from txl_deploy.console import Display, facts_table, print_json, stdout

SEGMENTS_PER_CALL = 16


def run(
    bundle: Bundle,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Text, or token ids in an .npy file.", show_default=False)
    ],
    backend: Backend = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Score a file as one stream: perplexity, bits per token, and bits per byte of text."""
    model = txl_runtime.load(bundle, backend=backend, threads=threads)
    require_tokens(model.manifest, "score")
    ids, scored_bytes = _read(file, model.vocabulary)
    if len(ids) < 2:
        raise UsageError(f"{file}: holds {len(ids)} tokens, expected at least 2, because the first is only context")
    stream, longest = model.stream(1), model.segment_lengths[0]
    total, chunk = 0.0, longest * SEGMENTS_PER_CALL
    with Display() as display:
        display.stage(f"score {file.name}", len(ids) - 1)
        for first in range(0, len(ids) - 1, chunk):
            nll = stream.score(ids[None, first : first + chunk + 1])
            total += float(nll.sum(dtype=np.float64))
            if math.isnan(total):
                raise BackendError(
                    f"{file}: log-probabilities of tokens {first + 1} … {first + nll.shape[1]} hold NaN, expected "
                    "numbers; `txl-deploy verify` the bundle, and export fp16 again in fp32 or bf16"
                )
            display.advance(nll.shape[1])
    mean = total / (len(ids) - 1)
    unknown_id = getattr(model.vocabulary, "unknown", None)
    unknown = 0 if unknown_id is None else int((ids == unknown_id).sum())  # a vocabulary of bytes knows every word
    result: dict[str, Any] = {
        "tokens": len(ids),
        "nll": mean,
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
        "bits_per_token": mean / math.log(2),
        # Where the vocabulary lacks words, the ids no longer hold the text: there is nothing to say of its bytes.
        "bits_per_byte": None if scored_bytes is None or unknown else total / math.log(2) / scored_bytes,
        "unknown_words": unknown,
    }
    if json:
        print_json(result)
        return
    shown = {
        name.replace("_", " "): f"{value:.6f}" if isinstance(value, float) else value for name, value in result.items()
    }
    stdout.print(facts_table({name: value for name, value in shown.items() if value is not None}))


def _read(file: Path, vocabulary: Vocabulary | None) -> tuple[NDArray[Any], int | None]:
    """Token ids [T], and the number of bytes that all tokens but the first stand for; None where the ids are given."""
    if file.suffix == ".npy":
        from txl_export.token_files import read_ids

        ids = read_ids(file)
        if ids.ndim != 1:
            raise UsageError(f"{file}: holds no single row of token ids, expected shape [T]; save it with numpy.save")
        return ids, None
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}, expected a file to score") from None
    if vocabulary is None:
        raise UsageError(
            f"{file}: the bundle has no vocabulary to read text with; give token ids in an .npy file, or export with "
            "--vocabulary FILE"
        )
    ids = vocabulary.encode(data)
    return ids, len(data) - len(vocabulary.decode(ids[:1]))
