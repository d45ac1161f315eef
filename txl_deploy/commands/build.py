"""`txl-deploy build`: make the engines of a bundle for NVIDIA GPUs, or compile its step for this processor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
import typer
from txl_engines.bundles import BundleBuild, EngineResult, build_bundle, default_kinds
from txl_engines.composing import whole_programs
from txl_engines.native import NativeBuild, build_native
from txl_engines.rounded_weights import Judged
from txl_report.facts.engines import weights_held
from txl_report.numbers import prefixed
from txl_runtime.bundle.engines.sidecar import Rounding
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import UsageError
from txl_runtime.native.opening import STEP

from txl_deploy.commands.options import Bundle, Json, like_export
from txl_deploy.console import Display, print_json, rows_table, stdout
from txl_deploy.extras import require_export
from txl_deploy.parity_tables import print_parity

if TYPE_CHECKING:
    from txl_export.proof.parity import Parity

ROUNDINGS = get_args(Rounding)
_DIGITS = re.compile("[0-9]{1,4}")
HEADINGS = ("program", "size", "seconds", "kernels", "attention", "fused", "")
"""Headings of the table of engines."""


def run(
    bundle: Bundle,
    target: Annotated[
        Literal["rtx", "tensorrt", "cuda", "native"],
        typer.Option(
            "--target",
            help="TensorRT-RTX (RTX PCs; built anywhere), TensorRT (for the GPU at hand), ONNX Runtime's CUDA "
            "(graphs for any GPU) or native (C for this processor, with a C compiler; Transformer-XL only).",
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
    cache: Annotated[
        Literal["fp32", "fp16", "int8"] | None,
        typer.Option("--cache", help="Precision of keys and values; native only. (default fp32)"),
    ] = None,
    precision: Annotated[
        Literal["bf16", "int8", "int4", "fp8"] | None,
        typer.Option(
            "--precision",
            help="Round weights: int8, int4 or fp8, rtx only, the matrices of an fp16 or bf16 bundle, which PyTorch "
            "judges on the CPU first; bf16, native only, those of an fp32 bundle. (default the bundle's)",
        ),
    ] = None,
    text: Annotated[Path | None, like_export("text")] = None,
    tokens: Annotated[Path | None, like_export("tokens")] = None,
    platform: Annotated[
        Literal["linux-x86_64", "linux-aarch64"] | None,
        typer.Option("--platform", help="The machine to compile for; native only. (default this one)"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build again what is there already.")] = False,
    json: Json = False,
) -> None:
    """Build the engines of a bundle, or compile its step, and put them into it."""
    if target == "native":
        options = {"--sm": sm, "--update": update, "--programs": programs, "--weights": weights}
        _check_native(options | {"--text": text, "--tokens": tokens})
        if precision in ROUNDINGS:
            raise UsageError(f"--precision is {precision}, which is for --target rtx, expected bf16 or none for native")
        with Display() as display:
            step = build_native(bundle, cache or "fp32", listener=display, bf16=precision == "bf16", platform=platform)
        _show_native(step, json)
        return
    native = {"--cache": cache, "--precision bf16": precision == "bf16" or None, "--platform": platform}
    for name, value in native.items():
        if value is not None:
            raise UsageError(f"{name} is for --target native, and the target is {target}; leave one of both out")
    if precision is None and (text is not None or tokens is not None):
        raise UsageError("--text and --tokens judge rounded matrices, and --precision is not given; leave them out")
    gpus = _compute_capabilities(sm)
    kinds = None if programs == "all" else tuple(kind.strip() for kind in (programs or "").split(","))
    manifest = open_bundle(bundle, verify_files=False).manifest
    if programs is None:
        kinds = default_kinds(manifest)
    parities: list[Parity] = []
    with Display() as display:

        def judge(copy: Path) -> Judged:
            require_export(f"build --precision {precision}")
            from txl_export.verifying import verify_rounded

            parity, reached = verify_rounded(open_bundle(bundle), copy, str(precision), text, tokens, display)
            parities.append(parity)
            return Judged(reached, {gate.name: None if gate.passed is None else gate.value for gate in parity.gates})

        rounding = None if precision is None or precision == "bf16" else (precision, judge)
        built = build_bundle(bundle, target, gpus, update, force, kinds, display, weights, rounding)
        if not parities and (text is not None or tokens is not None):
            display.warn(
                f"the text was not read: all engines of {precision} are there and judged; --force judges again"
            )
    if json:
        print_json(describe_build(built))
        return
    for parity in parities:
        print_parity(parity.verification())
        stdout.print()
    stdout.print(rows_table(HEADINGS, [_row(engine) for engine in built.engines]))
    folder = built.bundle / "engines" / built.target
    stdout.print(f"{folder}: {len(built.engines)} engines, {built.library}, {built.update} memory", soft_wrap=True)
    stdout.print(weights_held(len(built.engines), built.weight_bytes, built.shared_weight_bytes), soft_wrap=True)
    every = dict.fromkeys(program.kind for program in whole_programs(manifest, built.update))
    if programs is None and (left := [kind for kind in every if kind not in (kinds or every)]):
        why = "which only spare the fetching of short rows; --programs all builds them"
        stdout.print(f"not built: {', '.join(left)}, {why}", soft_wrap=True)
    checks = sorted({check for engine in built.engines for check in engine.sidecar.verified_on})
    ran = all(any(check.startswith("self-test") for check in engine.sidecar.verified_on) for engine in built.engines)
    rest = "" if ran else "; not yet run on a GPU: `txl-deploy selftest` does"
    stdout.print(f"checked: {', '.join(checks)}{rest}", soft_wrap=True)


def _check_native(options: Mapping[str, object]) -> None:
    if wrong := [name for name, value in options.items() if value is not None]:
        raise UsageError(f"{wrong[0]} is for engines of GPUs, and the target is native; leave it out")


def _show_native(built: NativeBuild, json: bool) -> None:
    facts = msgspec.to_builtins(built.sidecar)
    if json:
        print_json({"bundle": str(built.bundle), "target": "native", "file": STEP, "segments": built.segments} | facts)
        return
    step, compared = built.sidecar, built.sidecar.compared
    stdout.print(
        f"{built.bundle / STEP}: {step.instructions} for {step.platform}, weights in {step.precision}, keys and "
        f"values in {step.cache}, "
        f"{prefixed(step.bytes)}, compiled in {step.seconds:.1f} s by {step.compiler}",
        soft_wrap=True,
    )
    differs = f"log-probabilities within {compared['logprobs']:.1e}"
    differs += f", KL {compared['kl']:.1e}" if "kl" in compared else ""
    stdout.print(f"checked: {built.segments} segments beside ONNX Runtime, {differs}; self-test", soft_wrap=True)
    if step.verified_on:
        todo = f"run `txl-deploy selftest {built.bundle} --backend native` there"
        stdout.print(
            f"not verified on its platform, but by the same sources on {step.verified_on}; {todo}", soft_wrap=True
        )


def describe_build(made: BundleBuild) -> dict[str, Any]:
    """Return the JSON document of a build: facts about the bundle, and the engine of each program."""
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
                "rounding": engine.sidecar.identity.rounding or None,
                "reached": engine.sidecar.reached,
                "judged": engine.sidecar.judged,
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
    """Parse the value of --sm: "86,89,120", or "8.6,8.9,12.0" in NVIDIA's notation, becomes (86, 89, 120)."""
    if text is None:
        return ()
    parts = [part.strip().lower().removeprefix("sm") for part in text.split(",")]
    plain = [part.replace(".", "", 1) for part in parts]
    if wrong := [part for part, digits in zip(parts, plain, strict=True) if not _DIGITS.fullmatch(digits)]:
        raise UsageError(f"--sm holds {wrong[0]!r}, expected compute capabilities such as 86,89,120; check it")
    return tuple(int(digits) for digits in plain)
