"""`txl-deploy build`: make the engines of a bundle for NVIDIA GPUs, by default for the programs that pay."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import typer
from txl_engines.bundles import BundleBuild, EngineResult, build_bundle, default_kinds
from txl_engines.composing import whole_programs
from txl_report.facts.engines import weights_held
from txl_report.numbers import prefixed
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Bundle, Json
from txl_deploy.console import Display, print_json, rows_table, stdout

_DIGITS = re.compile("[0-9]{1,4}")
HEADINGS = ("program", "size", "seconds", "kernels", "attention", "fused", "")


def run(
    bundle: Bundle,
    target: Annotated[
        Literal["rtx", "tensorrt", "cuda"],
        typer.Option(
            "--target",
            help="TensorRT-RTX (RTX PCs; built anywhere), TensorRT (for the GPU at hand) or ONNX Runtime's CUDA "
            "(graphs for any GPU).",
        ),
    ],
    sm: Annotated[
        str | None,
        typer.Option("--sm", help="GPUs by compute capability, e.g. 86,89,120; rtx only. (default Ampere and newer)"),
    ] = None,
    update: Annotated[
        Literal["ring", "rolled"] | None,
        typer.Option("--update", help="How memory is updated. (default ring where bundle and target have it)"),
    ] = None,
    programs: Annotated[
        str | None,
        typer.Option(
            "--programs",
            help="Kinds of programs to build, e.g. logprobs,score, or all; logprobs does what there is no other for. "
            "(default logprobs up to 1,024 words, all beyond)",
        ),
    ] = None,
    weights: Annotated[
        Literal["once", "each"] | None,
        typer.Option(
            "--weights",
            help="Whether engines read large weights in one place on the device, or each holds all of them. (default "
            "once for several engines of rtx, but not with rolled memory)",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build again what is there already.")] = False,
    json: Json = False,
) -> None:
    """Build the engines of a bundle and put them into it."""
    gpus = _compute_capabilities(sm)
    kinds = None if programs == "all" else tuple(kind.strip() for kind in (programs or "").split(","))
    manifest = open_bundle(bundle, verify_files=False).manifest
    if programs is None:
        kinds = default_kinds(manifest)
    with Display() as display:
        made = build_bundle(bundle, target, gpus, update, force, kinds, listener=display, weights=weights)
    if json:
        print_json(describe_build(made))
        return
    stdout.print(rows_table(HEADINGS, [_row(engine) for engine in made.engines]))
    folder = made.bundle / "engines" / made.target
    stdout.print(f"{folder}: {len(made.engines)} engines, {made.library}, {made.update} memory", soft_wrap=True)
    stdout.print(weights_held(len(made.engines), made.weight_bytes, made.shared_weight_bytes), soft_wrap=True)
    every = dict.fromkeys(program.kind for program in whole_programs(manifest, made.update))
    if programs is None and (left := [kind for kind in every if kind not in (kinds or every)]):
        why = "which only spare the fetching of short rows; --programs all builds them"
        stdout.print(f"not built: {', '.join(left)}, {why}", soft_wrap=True)
    checks = sorted({check for engine in made.engines for check in engine.sidecar.verified_on})
    ran = all(any(check.startswith("self-test") for check in engine.sidecar.verified_on) for engine in made.engines)
    rest = "" if ran else "; not yet run on a GPU: `txl-deploy selftest` does"
    stdout.print(f"checked: {', '.join(checks)}{rest}", soft_wrap=True)


def describe_build(made: BundleBuild) -> dict[str, Any]:
    """Return the JSON document: the engine of each program."""
    return {
        "bundle": str(made.bundle),
        "target": made.target,
        "library": made.library,
        "update": made.update,
        "weight_bytes": made.weight_bytes,
        "shared_weight_bytes": made.shared_weight_bytes,
        "programs": [
            {
                "program": engine.program,
                "file": engine.file,
                "bytes": engine.sidecar.bytes,
                "seconds": engine.sidecar.seconds,
                "kernels": engine.sidecar.kernels,
                "attention_layers": engine.sidecar.attention_layers,
                "fused_attention": engine.sidecar.fused_attention,
                "in_place": engine.sidecar.in_place,
                "read_in_place": engine.sidecar.read_in_place,
                "copying": engine.sidecar.copying,
                "layers": engine.sidecar.layers,
                "reused": engine.reused,
                "verified_on": engine.sidecar.verified_on,
            }
            for engine in made.engines
        ],
    }


def _row(engine: EngineResult) -> tuple[object, ...]:
    sidecar = engine.sidecar
    return (
        engine.program,
        prefixed(sidecar.bytes),
        f"{sidecar.seconds:.1f}",
        "–" if sidecar.kernels is None and not sidecar.fused_attention else sidecar.kernels,
        sidecar.attention_layers,
        "–" if sidecar.kernels is None and not sidecar.fused_attention else sidecar.fused_attention,
        "was there" if engine.reused else "built",
    )


def _compute_capabilities(text: str | None) -> tuple[int, ...]:
    """Parse --sm: "86,89,120", or "8.6,8.9,12.0" as NVIDIA writes it, as (86, 89, 120)."""
    if text is None:
        return ()
    parts = [part.strip().lower().removeprefix("sm") for part in text.split(",")]
    plain = [part.replace(".", "", 1) for part in parts]
    if wrong := [part for part, digits in zip(parts, plain, strict=True) if not _DIGITS.fullmatch(digits)]:
        raise UsageError(f"--sm holds {wrong[0]!r}, expected compute capabilities such as 86,89,120; check it")
    return tuple(int(digits) for digits in plain)
