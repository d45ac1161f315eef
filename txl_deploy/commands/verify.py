"""`txl-deploy verify`: check that the bundle still computes the same function as PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Backend, Json, Module, Threads, like_export, parse_pairs
from txl_deploy.commands.own_modules import own_frames
from txl_deploy.console import Display, number, print_json, rows_table, stderr, stdout
from txl_deploy.extras import lean_heap, require_export
from txl_deploy.parity_tables import print_parity


def run(
    bundle: Annotated[
        Path,
        typer.Argument(
            metavar="BUNDLE", help="A bundle; with --module, an ONNX file made elsewhere.", show_default=False
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", help="What it came from, to repeat the import; or any FILE.onnx that it should equal."
        ),
    ] = None,
    module: Module = None,
    adapter: Annotated[str | None, like_export("adapter")] = None,
    config: Annotated[Path | None, like_export("config")] = None,
    weights: Annotated[Path | None, like_export("weights")] = None,
    vocabulary: Annotated[Path | None, typer.Option("--vocabulary", help="To compare the bundle's with.")] = None,
    text: Annotated[Path | None, like_export("text")] = None,
    tokens: Annotated[Path | None, like_export("tokens")] = None,
    segments: Annotated[int | None, typer.Option("--segments", help="Segments of the longest chain.")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", help="With an ONNX file: an .npz file of real inputs, and of the file's constants."),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", help="With an ONNX file: IN=OUT, an input of it and its next value; repeatable."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            help="With an ONNX file: A=B, what the file calls A is B in the module or the bundle; repeatable.",
        ),
    ] = None,
    backend: Backend = "auto",
    threads: Threads = None,
    bisect: Annotated[
        bool,
        typer.Option(
            "--bisect",
            help="Instead: which layer differs first? ONNX Runtime against PyTorch; with --backend rtx or tensorrt the "
            "engine against ONNX Runtime.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Compare a bundle or an ONNX file with PyTorch over chained segments; exit code 1 when a gate fails."""
    require_export("verify")
    lean_heap()
    import txl_export

    arguments: dict[str, Any] = {"module": module, "adapter": adapter, "config": config, "weights": weights}
    arguments |= {"vocabulary": vocabulary, "text": text, "tokens": tokens, "segments": segments}
    arguments["threads"] = threads
    if bisect:
        if names := [name for name, value in arguments.items() if value is not None]:
            raise UsageError(f"--{names[0]} is given with --bisect, which runs segments of its own; leave it out")
        _bisect(bundle, checkpoint, backend, json)
        return

    arguments["states"] = parse_pairs("--state", state, "IN=OUT, an input and an output of the file") or None
    arguments["rename"] = (
        parse_pairs("--rename", rename, "A=B, the file's name and the module's or the bundle's") or None
    )
    with Display() as display, own_frames():
        parity = txl_export.verify(
            bundle, checkpoint=checkpoint, inputs=inputs, backend=backend, listener=display, **arguments
        )
    verification = parity.verification()
    if json:
        print_json(verification)
    else:
        print_parity(verification)
    if not parity.passed:
        stderr.print(parity.gate_advice, soft_wrap=True)
        raise typer.Exit(1)


def _bisect(bundle: Path, checkpoint: Path | None, backend: str, json: bool) -> None:
    """Compare the bundle with its reference layer by layer, and print the result; exit code 1 if a layer differs."""
    from txl_export.verifying import bisect

    bisection = bisect(bundle, checkpoint, backend)
    if json:
        print_json(bisection.document())
    else:
        stdout.print(f"{bisection.found}, against {bisection.reference}; more than {bisection.limit:g} is no rounding")
        rows = [(place.name, number(place.difference), number(place.largest)) for place in bisection.places]
        stdout.print(rows_table(("after", "max abs, relative", "largest value"), rows))
        stdout.print("no layer differs" if bisection.first is None else f"the first that differs: {bisection.first}")
    if bisection.first is not None:
        raise typer.Exit(1)
