"""`txl-deploy package`: write a bundle as a package for Triton, as plain C, or as a folder to serve to browsers."""

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
    "web": ("onnxruntime-web", "single"),
}
"""Options that only one target has, by target."""


def run(
    bundle: Bundle,
    target: Annotated[
        Literal["triton", "c", "web"],
        typer.Option(
            "--target",
            help="Triton's Python backend, plain C without any library, or a page that runs the model in a browser.",
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
        list[int] | None,
        typer.Option(
            "--segment-length",
            help="L of a step (default the bundle's longest); several, 1 among them, for blocks of any size.",
        ),
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
        typer.Option("--max-bytes", help="Refuse what takes more: weights, start, state, stack and code together."),
    ] = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Write the C without compiling it and comparing it with the bundle.")
    ] = False,
    onnxruntime_web: Annotated[
        Path | None,
        typer.Option(
            "--onnxruntime-web",
            help="The npm package that runs graphs in a page. (default node_modules/onnxruntime-web)",
        ),
    ] = None,
    single: Annotated[
        bool, typer.Option("--single", help="One HTML file, -o FILE.html, that needs no server and no network.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a package that this verb wrote.")] = False,
    json: Json = False,
) -> None:
    """Write a package: a model repository for Triton, the model as plain C, or a folder for browsers."""
    options = {
        "sequences": sequences,
        "idle-seconds": idle_seconds,
        "backend": backend,
        "segment-length": segment_length or None,
        "batch-size": batch_size,
        "name": name,
        "weights-file": weights_file or None,
        "max-bytes": max_bytes,
        "unverified": unverified or None,
        "onnxruntime-web": onnxruntime_web,
        "single": single or None,
    }
    for other in OF_TARGETS.keys() - {target}:
        if odd := [option for option in OF_TARGETS[other] if options[option] is not None]:
            raise UsageError(f"--{odd[0]} is for --target {other}, not for {target}; leave it out")
    if target == "c":
        require("package --target c", "c", "emx_onnx_cgen", "onnx", "jinja2", "filelock")
        lengths = tuple(segment_length or ())
        _run_c(json, bundle, output, force, name, lengths, batch_size, weights_file, max_bytes, unverified)
        return
    require("package", "build", "filelock")
    if target == "web":
        _run_web(json, single, bundle, output, force, onnxruntime_web)
        return
    from txl_deploy.triton.repository import package_python

    seconds = 60.0 if idle_seconds is None else idle_seconds
    package = package_python(bundle, output, force, sequences, seconds, backend or "cpu")
    if json:
        print_json(describe_package(package))
        return
    stdout.print(f"{package.folder}: {', '.join(package.models)} for triton", soft_wrap=True)
    stdout.print(f"at most {package.sequences} sequences at once, {prefixed(package.state_bytes)} of memory each")
    stdout.print(f"how to start and ask it: {package.folder / 'README.md'}", soft_wrap=True)


def _run_c(json: bool, *options: Any) -> None:
    from txl_deploy.plain_c.package import package_c

    with Display() as display:
        package = package_c(*options, listener=display)
    if json:
        print_json(describe_plain(package))
        return
    sizes = {
        "weights": package.weight_bytes,
        "start": package.start_bytes or None,
        "state": package.state_bytes,
        "stack": package.stack_bytes,
        "code": package.code_bytes,
    }
    listed = ", ".join(f"{part} {prefixed(size)}" for part, size in sizes.items() if size is not None)
    stdout.print(f"{package.folder}: {package.name}.h and {package.name}.c", soft_wrap=True)
    stdout.print(package.verified or "NOT VERIFIED: neither compiled nor compared with the bundle", soft_wrap=True)
    stdout.print(listed, soft_wrap=True)
    known = {length: whole(number) for length, number in package.blocks.items() if number is not None}
    costs = ", ".join(f"{number} for {length}" for length, number in known.items())
    products = f"multiply-adds of a block: {costs}; " if costs else ""
    stdout.print(f"{products}latency {package.latency} position{'s' * (package.latency != 1)}", soft_wrap=True)
    stdout.print(f"how to build and call it: {package.folder / 'README.md'}", soft_wrap=True)


def _run_web(json: bool, single: bool, *options: Any) -> None:
    from txl_deploy.web.package import package_web
    from txl_deploy.web.single import package_single

    package = (package_single if single else package_web)(*options)
    if json:
        print_json(dataclasses.asdict(package) | {"folder": str(package.folder), "target": "web"})
        return
    parts = {"bundle": package.bundle_bytes, "engine": package.engine_bytes, "page": package.page_bytes}
    sizes = ", ".join(f"{part} {prefixed(size)}" for part, size in parts.items())
    form = f"one file of {prefixed(package.folder.stat().st_size)}" if single else "a folder to serve"
    stdout.print(f"{package.folder}: {package.name} for browsers, as {form}", soft_wrap=True)
    stdout.print(f"it holds {sizes}" if single else f"a page downloads {sizes}")
    if single:
        return
    stdout.print(f"try it: python -m http.server --bind 127.0.0.1 --directory {package.folder}", soft_wrap=True)


def describe_plain(made: Any) -> dict[str, Any]:
    """Return the JSON document of a package in plain C; a value that was not measured is null."""
    facts = dataclasses.asdict(made)
    return facts | {
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
