"""`txl-deploy datastore`: build a store of what a model has read, and fit its gate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Backend, Json, Threads
from txl_deploy.console import facts_table, print_json, stdout
from txl_deploy.loading import load_alone


def run(
    action: Annotated[
        Literal["build", "fit"],
        typer.Argument(metavar="build|fit", help="Read texts, or fit a gate to a store.", show_default=False),
    ],
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            help="For build a BUNDLE, then texts, token ids in .npy files, folders of them, or .jsonl files; for fit "
            "the store's DIR, its BUNDLE, and a HELDOUT text.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="build: the folder of the store.")
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="build: add to a store; texts that it has are left out.")
    ] = False,
    named: Annotated[
        str | None,
        typer.Option("--field", help="build: which field has the text or token ids. (default text, else tokens)"),
    ] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive", help="build: documents in folders of the folders too.")
    ] = False,
    knn: Annotated[int | None, typer.Option("--knn", metavar="K", help="fit: neighbours. (default 32)")] = None,
    knn_temperature: Annotated[
        float | None,
        typer.Option("--knn-temperature", metavar="T", help="fit: their T. (default the best of 0.1 … 100)"),
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(
            "--bound", metavar="W", help="fit: least W to search for. (default one that keeps 98 % of the gain)"
        ),
    ] = None,
    backend: Backend = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Build a store of what a model has read, which score, generate and serve search at each prediction.

    If a build was ended, the same command continues it. fit trains a gate on a text that the store has not read: the
    gate says how much the neighbours are worth at each position, and at which positions no search is made.
    """
    for_build = {"-o": output, "--append": append, "--field": named, "--recursive": recursive}
    for_fit = {"--knn": knn, "--knn-temperature": knn_temperature, "--bound": bound}
    wrong, other = (for_fit, "fit") if action == "build" else (for_build, "build")
    for name, option in wrong.items():
        if option not in (None, False):
            raise UsageError(f"{name} is for datastore {other}, expected none for {action}; leave it out")
    if action == "build":
        result = _build(paths, output, append, named, recursive, backend, threads)
    else:
        from txl_deploy.retrieval.fitting import fit

        if len(paths) != 3:
            raise UsageError(f"datastore fit is given {len(paths)} paths, expected DIR BUNDLE HELDOUT; check them")
        folder, bundle, heldout = paths
        result = fit(load_alone(bundle, backend, threads), folder, heldout, knn, knn_temperature, bound)
    if json:
        print_json(result)
    else:
        bounds = result.pop("by_bound", {})
        for least, (bits, saved) in bounds.items():
            result[f"with bound {least}"] = f"{bits:.4f} bits, {saved:.1%} of the searches saved"
        stdout.print(facts_table({name.replace("_", " "): _shown(value) for name, value in result.items()}))


def _build(
    paths: list[Path],
    output: Path | None,
    append: bool,
    named: str | None,
    recursive: bool,
    backend: str,
    threads: int | None,
) -> dict[str, Any]:
    from txl_deploy.places import refuse_inside
    from txl_deploy.retrieval.building import build

    bundle, *texts = paths
    if output is None or not texts:
        raise UsageError("datastore build needs a BUNDLE, texts and -o DIR, expected all three; give them")
    for text in texts:
        refuse_inside(output, text, bundle)
    return build(load_alone(bundle, backend, threads), texts, output, append, named, recursive)


def _shown(value: object) -> object:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) else value
