"""`txl-deploy report`: make a page that describes a bundle for people."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from txl_report.numbers import prefixed
from txl_runtime.errors import UsageError
from txl_runtime.model import Model
from txl_runtime.types import Ids

from txl_deploy.commands.options import Backend, Bundle, Json, like_export, takes_datastore
from txl_deploy.console import Display, facts_table, print_json, stdout
from txl_deploy.retrieval import Mixture

if TYPE_CHECKING:
    from txl_report.measuring import Searched


@takes_datastore
def run(
    bundle: Bundle,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where the page goes, never into a bundle.")
    ] = Path("report.html"),
    text: Annotated[Path | None, like_export("text")] = None,
    tokens: Annotated[Path | None, like_export("tokens")] = None,
    bench: Annotated[
        Path | None, typer.Option("--bench", metavar="FILE.json", help="What `bench --json` wrote: speed.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option("--verify", metavar="FILE.json", help="What `verify --json` wrote: a later proof.")
    ] = None,
    context: Annotated[
        bool, typer.Option("--context", help="Measure on the text how far back more context helps; takes longest.")
    ] = False,
    mixture: Mixture | None = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    backend: Backend = "auto",
    json: Json = False,
) -> None:
    """Make a page that shows what a bundle is and what proves it: one file that loads nothing."""
    from txl_export.families.registry import facts_of_bundle
    from txl_report.writing import write_report

    with Display() as display:
        written = write_report(
            bundle,
            output,
            text=text,
            ids=None if tokens is None else _ids(bundle, tokens),
            source="" if tokens is None else tokens.name,
            bench=bench,
            verify=verify,
            context=context,
            datastore=None if mixture is None else partial(_opened, mixture),
            force=force,
            describe=facts_of_bundle,
            backend=backend,
            listener=display,
        )
    if json:
        print_json(written)
        return
    absent = [section.name for section in written.sections if not section.present]
    shown = {"page": f"{written.path}, {prefixed(written.bytes)}"}
    if absent:
        shown["nothing yet in"] = f"{', '.join(absent)}; the page has the commands that add them"
    stdout.print(facts_table(shown), soft_wrap=True)


def _opened(mixture: Mixture, model: Model, ids: Ids) -> Searched | None:
    """Open a datastore to measure with, and hide the rows of the text `ids` in it; None if its weight W is 0."""
    from txl_report.measuring import Searched

    from txl_deploy.retrieval.store import open_store

    store = open_store(model, mixture)
    if store is None:
        return None
    others = store.excluding(ids)
    return Searched(mixture.folder.name, others, others.seen(model.manifest.vocab_size))


def _ids(bundle: Path, tokens: Path) -> Ids | None:
    """Read the token ids for the measurements, int32 [T]."""
    from txl_export.token_files import read_tokens
    from txl_runtime.bundle.reading import open_bundle

    manifest = open_bundle(bundle).manifest
    if not manifest.vocab_size:
        raise UsageError(f"{bundle}: reads no token ids, so a text means nothing to it; leave --tokens out")
    return read_tokens(None, tokens, None, manifest.vocab_size)
