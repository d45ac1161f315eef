"""`txl-deploy generate`: continue a prompt, and print the text while it is generated."""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from txl_runtime.bundle.vocabulary import Vocabulary
from txl_runtime.errors import UsageError
from txl_runtime.streaming.inputs import require_tokens

from txl_deploy.commands.options import Backend, Bundle, Json, Threads, takes_datastore
from txl_deploy.console import print_json, stderr, text_writer
from txl_deploy.loading import load_alone
from txl_deploy.retrieval import Mixture


@takes_datastore
def run(
    bundle: Bundle,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option("--prompt-tokens", help="Token ids to continue: 1,2,3.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="How many tokens to draw.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 1.0,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Draw from the k most probable tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Draw from the most probable tokens that together reach p."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes the draws reproducible.")] = None,
    stop_tokens: Annotated[str | None, typer.Option("--stop-tokens", help="Token ids that end the text: 0,3.")] = None,
    forbid: Annotated[str | None, typer.Option("--forbid", help="Token ids that are never drawn: 0,3.")] = None,
    allow: Annotated[str | None, typer.Option("--allow", help="The only token ids that are drawn: 4,5,6.")] = None,
    lookup: Annotated[int, typer.Option("--lookup", help="Most tokens of a draft from the text; 0 is off.")] = 0,
    mixture: Mixture | None = None,
    backend: Backend = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Continue a prompt; text where the bundle has a vocabulary, token ids otherwise."""
    from txl_deploy.retrieval.store import open_store

    model = load_alone(bundle, backend=backend, threads=threads)
    require_tokens(model.manifest, "generate")
    vocabulary = model.vocabulary
    ids = _prompt(prompt, prompt_tokens, vocabulary)
    stops = [] if stop_tokens is None else _ids(stop_tokens, "--stop-tokens").tolist()
    never = [] if forbid is None else _ids(forbid, "--forbid").tolist()
    only = None if allow is None else _ids(allow, "--allow").tolist()
    stream, store = model.stream(1), open_store(model, mixture)
    drawn = stream.generate(
        *(ids, max_new_tokens, temperature, top_k, top_p, seed, stops),
        allow=only,
        forbid=never,
        lookup=lookup,
        datastore=store,
    )
    write, started, tokens = text_writer(), time.monotonic(), list[int]()
    for token in drawn:
        tokens.append(int(token[0]))
        if not json:
            write(vocabulary.decode(token) if vocabulary else f"{token[0]} ".encode())
    seconds = time.monotonic() - started
    if json:
        text = vocabulary.decode(np.array(tokens, np.int32)).decode(errors="replace") if vocabulary else None
        counts = {"drafted": stream.draws.drafted, "kept": stream.draws.kept}
        print_json({"tokens": tokens, "text": text, "seconds": seconds, **counts})
    else:
        write(b"\n")
    if tokens:
        drafts = f"; {stream.draws.kept} of {stream.draws.drafted} drafted tokens came true" if lookup else ""
        saved = f"; {store.searches.told}" if store is not None and store.searches.told else ""
        stderr.print(f"{len(tokens)} tokens in {seconds:.2f} s, {len(tokens) / seconds:.0f} per second{drafts}{saved}")


def _prompt(text: str | None, tokens: str | None, vocabulary: Vocabulary | None) -> NDArray[np.int32]:
    if (text is None) == (tokens is None):
        raise UsageError("the prompt is given twice or not at all, expected one; give --prompt or --prompt-tokens")
    if text is None:
        assert tokens is not None
        return _ids(tokens, "--prompt-tokens")
    if vocabulary is None:
        raise UsageError(
            "the bundle has no vocabulary to read a text with; give --prompt-tokens 1,2,3, or export with "
            "--vocabulary FILE"
        )
    if not text:
        raise UsageError("--prompt is empty, expected at least one character to start from")
    return vocabulary.encode(text.encode(errors="surrogateescape"))


def _ids(listed: str, flag: str) -> NDArray[np.int32]:
    try:
        return np.array([int(part) for part in listed.split(",")], np.int32)
    except (ValueError, OverflowError):
        raise UsageError(f"{flag} is {listed!r}, expected token ids such as 1,2,3") from None
