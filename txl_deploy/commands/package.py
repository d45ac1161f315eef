"""`txl-deploy package`: write a bundle as Triton's package, or as plain C."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from txl_report.numbers import prefixed, whole
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Bundle, Json
from txl_deploy.console import Display, print_json, stdout
from txl_deploy.extras import require

OF_TARGETS = {
    "triton": ("sequences", "idle-seconds", "backend"),
    "c": ("segment-length", "batch-size", "name", "weights-file", "max-bytes", "unverified"),
}
"""Options that only one target has."""


def run(
    bundle: Bundle,
    target: Annotated[
        Literal["triton", "c"],
        typer.Option(
            "--target",
            help="Triton's Python backend, or plain C without any library.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The model repository or folder to write.", show_default=False)
    ],
    sequences: Annotated[
        int | None,
        typer.Option("--sequences", help="How many sequences may be at once. (default B of the bundle, at least 16)"),
    ] = None,
    idle_seconds: Annotated[
        float | None,
        typer.Option("--idle-seconds", help="After which the server forgets a sequence. (default 60)"),
    ] = None,
    backend: Annotated[
        Literal["cpu", "cuda", "tensorrt", "rtx"] | None,
        typer.Option("--backend", help="Which backend of the runtime runs inside. (default cpu)"),
    ] = None,
    segment_length: Annotated[
        int | None,
        typer.Option("--segment-length", help="L of a step. (default the bundle's longest)"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="B of a step, where the bundle leaves it open.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What the model is called in C. (default the bundle's name)")
    ] = None,
    weights_file: Annotated[
        bool, typer.Option("--weights-file", help="Weights in a file of their own, for flash or a mapped file.")
    ] = False,
    max_bytes: Annotated[
        int | None,
        typer.Option("--max-bytes", help="Refuse what takes more: weights, state, stack and code together."),
    ] = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Write the C without compiling it and comparing it with the bundle.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a package that this verb wrote.")] = False,
    json: Json = False,
) -> None:
    """Write a package: a model repository for Triton, or the model as plain C."""
    given = {
        "sequences": sequences,
        "idle-seconds": idle_seconds,
        "backend": backend,
        "segment-length": segment_length,
        "batch-size": batch_size,
        "name": name,
        "weights-file": weights_file or None,
        "max-bytes": max_bytes,
        "unverified": unverified or None,
    }
    (other,) = OF_TARGETS.keys() - {target}
    if odd := [option for option in OF_TARGETS[other] if given[option] is not None]:
        raise UsageError(f"--{odd[0]} is for --target {other}, not for {target}; leave it out")
    if target == "c":
        require("package --target c", "c", "emx_onnx_cgen", "onnx", "jinja2", "filelock")
        _run_c(json, bundle, output, force, name, segment_length, batch_size, weights_file, max_bytes, unverified)
        return
    require("package", "build", "filelock")
    from txl_deploy.triton.repository import package_python

    seconds = 60.0 if idle_seconds is None else idle_seconds
    made = package_python(bundle, output, force, sequences, seconds, backend or "cpu")
    if json:
        print_json(describe_package(made))
        return
    stdout.print(f"{made.folder}: {', '.join(made.models)} for triton", soft_wrap=True)
    stdout.print(f"at most {made.sequences} sequences at once, {prefixed(made.state_bytes)} of memory each")
    stdout.print(f"how to start and ask it: {made.folder / 'README.md'}", soft_wrap=True)


def _run_c(json: bool, *options: Any) -> None:
    from txl_deploy.plain_c.package import package_c

    with Display() as display:
        made = package_c(*options, listener=display)
    if json:
        print_json(describe_plain(made))
        return
    sizes = {
        "weights": made.weight_bytes,
        "state": made.state_bytes,
        "stack": made.stack_bytes,
        "code": made.code_bytes,
    }
    listed = ", ".join(f"{part} {prefixed(size)}" for part, size in sizes.items() if size is not None)
    stdout.print(f"{made.folder}: {made.name}.h and {made.name}.c", soft_wrap=True)
    stdout.print(made.verified or "NOT VERIFIED: neither compiled nor compared with the bundle", soft_wrap=True)
    products = "" if made.multiply_adds is None else f"; {whole(made.multiply_adds)} multiply-adds a step"
    stdout.print(f"{listed}{products}", soft_wrap=True)
    stdout.print(f"how to build and call it: {made.folder / 'README.md'}", soft_wrap=True)


def describe_plain(made: Any) -> dict[str, Any]:
    """Return the JSON document of a package in plain C; null for what was not measured."""
    found = dataclasses.asdict(made)
    return found | {
        "folder": str(made.folder),
        "target": "c",
        "verified": bool(made.verified),
        "comparison": made.verified,
    }


def describe_package(made: Any) -> dict[str, Any]:
    """Return the JSON document of a Triton package."""
    return {
        "folder": str(made.folder),
        "target": "triton",
        "models": list(made.models),
        "sequences": made.sequences,
        "state_bytes": made.state_bytes,
    }
