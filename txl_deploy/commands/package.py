"""`txl-deploy package`: a bundle as another server's package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from txl_report.numbers import prefixed
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Bundle, Json
from txl_deploy.console import print_json, stdout
from txl_deploy.extras import require_packaging


def run(
    bundle: Bundle,
    target: Annotated[
        Literal["triton", "triton-onnx"],
        typer.Option(
            "--target",
            help="Triton's Python backend, or its ONNX Runtime backend with state that the server keeps (one sequence "
            "per instance; not run on that backend).",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The model repository to write.", show_default=False)],
    sequences: Annotated[
        int | None,
        typer.Option("--sequences", help="How many sequences may be at once. (default B of the bundle, at least 16)"),
    ] = None,
    idle_seconds: Annotated[
        float, typer.Option("--idle-seconds", help="After which the server forgets a sequence.")
    ] = 60.0,
    backend: Annotated[
        Literal["cpu", "cuda", "tensorrt", "rtx"] | None,
        typer.Option("--backend", help="Which backend of the runtime runs inside; triton only. (default cpu)"),
    ] = None,
    segment_length: Annotated[
        int | None,
        typer.Option("--segment-length", help="L of a request; triton-onnx only. (default the bundle's longest)"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model repository that this verb wrote.")] = False,
    json: Json = False,
) -> None:
    """Write a model repository for Triton: the bundle, the runtime and the configuration."""
    require_packaging("package", *(["onnx"] if target == "triton-onnx" else []))
    if target == "triton" and segment_length is not None:
        raise UsageError("--segment-length is for --target triton-onnx: --target triton takes requests of any length")
    if target == "triton-onnx" and backend is not None:
        raise UsageError("--backend is for --target triton: with triton-onnx the server's own backend runs the graph")
    if target == "triton":
        from txl_deploy.triton.repository import package_python

        made = package_python(bundle, output, force, sequences, idle_seconds, backend or "cpu")
    else:
        from txl_deploy.triton.implicit import package_onnx

        made = package_onnx(bundle, output, force, sequences, idle_seconds, segment_length)
    if json:
        print_json(describe_package(made))
        return
    stdout.print(f"{made.folder}: {', '.join(made.models)} for {made.target}", soft_wrap=True)
    stdout.print(f"at most {made.sequences} sequences at once, {prefixed(made.state_bytes)} of memory each")
    stdout.print(f"how to start and ask it: {made.folder / 'README.md'}", soft_wrap=True)


def describe_package(made: Any) -> dict[str, Any]:
    """The JSON document: what was written."""
    return {
        "folder": str(made.folder),
        "target": made.target,
        "models": list(made.models),
        "sequences": made.sequences,
        "state_bytes": made.state_bytes,
    }
