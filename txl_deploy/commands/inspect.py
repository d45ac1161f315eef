"""`txl-deploy inspect`: show a bundle or a checkpoint, even a stranger's; with --check, try to run a bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text
from txl_export.families.registry import facts_of_bundle
from txl_export.options import CodeBase
from txl_export.tensorflow import refuse_tensorflow
from txl_report.facts.engines import built_for, engines_of, weights_held
from txl_report.facts.model import LENGTHS, STREAMS, Context, context_of, describe_bundle, steps_of
from txl_report.facts.source import Source, source_of
from txl_report.facts.tables import tables_of
from txl_report.numbers import counted, prefixed
from txl_runtime.bundle.engines.files import describe_engine, engine_facts
from txl_runtime.bundle.engines.sidecar import Sidecar, held_weights, read_sidecar, sidecar_path
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import ENGINES, MANIFEST, Bundle, open_bundle
from txl_runtime.device.choosing import DEVICES, missing
from txl_runtime.errors import BackendError, BundleError, UsageError
from txl_runtime.host.trial import default_bounds
from txl_runtime.native import opening

from txl_deploy.commands.options import Json, like_export, parse_aliases
from txl_deploy.console import Display, facts_table, number, plain, print_json, rows_table, stdout
from txl_deploy.extras import require, require_export
from txl_deploy.loading import absent_backends
from txl_deploy.trying import TriedProgram, try_bundle

RECORDED = {
    "loop": "with the copies around it, so that a step is one launch",
    "engine": "by itself: it was built in an older way; build it again",
    None: "by nobody",
}
"""Words that `inspect` shows for the value of `recorded_by`: the part that recorded an engine's CUDA graph, or None."""


def run(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A bundle, an engine, a checkpoint, an ONNX file, LEAPP's folder.", show_default=False
        ),
    ],
    family: Annotated[CodeBase, like_export("family")] = "auto",
    config: Annotated[Path | None, like_export("config")] = None,
    alias: Annotated[list[str] | None, like_export("aliases")] = None,
    skeleton: Annotated[
        bool, typer.Option("--skeleton", help="Print a Python file to complete: the module of a TorchScript archive.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Try a bundle in a bounded process: each length, B sequences and one.")
    ] = False,
    memory: Annotated[
        int | None,
        typer.Option(help="Bytes that a trial may take; 512 MiB + 64 x weights without.", show_default=False),
    ] = None,
    processor_seconds: Annotated[
        int | None, typer.Option(help="Seconds for each run of --check; 30 without.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show architecture, sizes, context and parity; what a checkpoint holds, or what an ONNX file remembers."""
    path, aliases = Path(place), parse_aliases(alias)
    if not check and (memory is not None or processor_seconds is not None):
        raise UsageError(
            "--memory and --processor-seconds are given without --check, whose bounds they are; give --check too"
        )
    if not place.strip():
        raise UsageError("the path is empty, expected a bundle or a checkpoint; name one")
    refuse_tensorflow(path)
    if not path.exists():
        raise UsageError(
            f"{path}: no such file or folder, expected a bundle, a checkpoint or an ONNX file; check the path"
        )
    if (path / MANIFEST).exists():
        if family != "auto" or config is not None or aliases or skeleton:
            raise UsageError(
                f"{path}: is a bundle, --family, --config, --alias and --skeleton are for checkpoints; leave them out"
            )
        bundle = open_bundle(path)
        rows = _tried(path, bundle.manifest, memory, processor_seconds) if check else []
        manifest, (found, broken) = bundle.manifest, engines_of(bundle)
        engines = [{"file": name} | engine_facts(sidecar) for name, sidecar in found]
        document = describe_bundle(manifest) | {"backends": {name: missing(name, bundle) for name in DEVICES}}
        step = document["native"] = _step_of(bundle, broken)
        if step:
            document["backends"]["native"] = step["not_here"] or step["not_auto"]
        document["words"] = None if (words := bundle.vocabulary()) is None else len(words)
        if json:
            tried = {"tried": rows} if check else {}
            print_json(document | tried | {"engines": engines, "broken_engines": broken, "manifest": manifest})
        else:
            _print_bundle(path, manifest, document)
            _print_engines(engines)
            _print_weights([sidecar for _, sidecar in found], manifest.weight_bytes)
            if step:
                _print_step(step)
            for problem in broken:
                stdout.print(problem, soft_wrap=True)
            if check:
                _print_tried(rows)
        return
    if check:
        raise UsageError(f"{path}: is no bundle, --check is for bundles; leave it out")
    settings = dict[str, str]()
    if path.suffix not in (".engine", ".onnx") and find_spec("torch") is not None:
        from txl_export.families.graph.take.leapp import is_leapp, read_leapp

        if is_leapp(path):
            leapp = read_leapp(path)
            path, settings = leapp.path, leapp.states
    if path.suffix == ".onnx" and not _is_engine(path):
        if family != "auto" or config is not None or aliases or skeleton:
            raise UsageError(
                f"{path}: is an ONNX file, --family, --config, --alias and --skeleton are for checkpoints; "
                "leave them out"
            )
        _describe_graph(path, json, place, settings)
        return
    if path.suffix in (".engine", ".onnx"):
        document = describe_engine(path)
        if skeleton:
            print_skeleton(path, {})
        elif json:
            print_json(document)
        else:
            _print_engine(document)
        return
    if path.is_dir() and not (path / "config.json").exists():
        raise UsageError(
            f"{path}: a folder without {MANIFEST} or config.json, expected a bundle or a Hugging Face model; name one, "
            "or a checkpoint file; a trainer's run is read by txl-deploy export"
        )
    require_export("inspect of a checkpoint")
    from txl_export.checkpoints import read_config
    from txl_export.describing import describe_checkpoint

    values = None if config is None else read_config(config)
    document = describe_checkpoint(path, family, values, aliases)
    if skeleton:
        print_skeleton(path, document)
    elif json:
        print_json(document)
    else:
        _print_checkpoint(document)


def _step_of(bundle: Bundle, broken: list[str]) -> dict[str, Any] | None:
    """Describe a bundle's compiled step without loading it; a fault of the step is added to `broken`.

    Returns:
        The sidecar's facts, with two reasons: "not_here" why the step does not run on this machine, and "not_auto" why
        backend "auto" does not use it; "" if it does. None if there is no step, or a faulty step.
    """
    if opening.STEP not in bundle.manifest.files:
        return None
    try:
        bundle.check(opening.STEP)
        sidecar = opening.read_sidecar(bundle)
    except (BackendError, BundleError) as error:
        broken.append(str(error))
        return None
    lacking = ""
    try:
        opening.check_processor(sidecar, opening.STEP)
    except BackendError as error:
        lacking = str(error)
    facts: dict[str, Any] = msgspec.to_builtins(sidecar)
    unasked = lacking or opening.missing(bundle, None, lean=False)
    return {"file": opening.STEP, "not_here": lacking, "not_auto": unasked} | facts


def _tried(path: Path, manifest: Manifest, memory: int | None, seconds: int | None) -> list[TriedProgram]:
    require("inspect --check", "cpu", "onnxruntime")
    bounds = default_bounds(manifest)
    changes = {"memory": memory, "processor_seconds": seconds}
    changed = {name: value for name, value in changes.items() if value is not None}
    with Display() as display:
        return try_bundle(path, manifest, msgspec.structs.replace(bounds, **changed), display)


def _print_tried(rows: list[TriedProgram]) -> None:
    """Print a row for each program that was tried; the peak memory is a dash if the system does not report it."""
    shown = [
        (
            row.program,
            row.update,
            row.combinations,
            f"{row.seconds * 1000:.1f}",
            prefixed(row.memory) if row.memory else "–",
        )
        for row in rows
    ]
    columns = ("\ntried", "\nupdate", "\ncombinations", "processor\nms", "peak\nmemory")
    stdout.print(rows_table(columns, shown))


def print_skeleton(path: Path, document: dict[str, Any]) -> None:
    """Print the Python module for a TorchScript archive, which the user completes; `document` describes the archive.

    Raises:
        UsageError: there is no such module for the file.
    """
    if not document.get("skeleton"):
        why = document.get("refused", "expected a TorchScript archive of no known family")
        raise UsageError(f"{path}: there is no module to write for it, {why}; leave out --skeleton")
    stdout.print(document["skeleton"], soft_wrap=True, end="")


def _is_engine(path: Path) -> bool:
    """Return True if a graph is an engine: it lies in a folder of engines, or a readable sidecar lies beside it.

    JSON that is no sidecar proves nothing.
    """
    facts = path.parent / sidecar_path(path.name)
    with contextlib.suppress(BundleError):
        return f"{path.absolute().parent.parent.name}/" == ENGINES or (facts.exists() and bool(read_sidecar(facts)))
    return False


def _describe_graph(path: Path, json: bool, asked: str, states: Mapping[str, str]) -> None:
    require("inspect of an ONNX file", "export", "onnx", "onnx_ir", "onnxruntime")
    from txl_export.families.graph.describing import describe_graph

    from txl_deploy.graph_tables import print_graph

    with Display() as display:
        facts = describe_graph(path, display, asked=asked, said=states)
    if json:
        print_json(facts)
    else:
        print_graph(facts)


def _print_bundle(path: Path, manifest: Manifest, facts: dict[str, Any]) -> None:
    lengths = ", ".join(map(str, manifest.segment_lengths))
    memory = f", M {manifest.memory_length}" if manifest.counters else ""
    absent = absent_backends(facts["backends"], manifest)
    could_run = ["cpu", *(name for name, why in facts["backends"].items() if not why)]
    could_run += [f"{what}: {why}" for what, why in absent.items()]
    shown = {
        "bundle": f"{path}, {prefixed(facts['bytes'])}, every file's hash checked",
        "model": f"{manifest.model_id[:12]}, {prefixed(manifest.parameters, '')} parameters, {manifest.precision}",
        **facts_of_bundle(manifest),
        "shapes": f"B {', '.join(map(str, (manifest.batch_size, *manifest.batch_sizes)))}, L {lengths}{memory}",
        "state": f"{prefixed(manifest.state_bytes)} per sequence",
        "sequences": STREAMS[manifest.streams],
        "lengths": LENGTHS[manifest.lengths],
        **({"segments": steps_of(manifest)} if manifest.vocab_size or manifest.stepwise else {}),
        "backends": Text("\n".join(map(plain, could_run))),
    }
    context = context_of(manifest)
    if isinstance(context, Context):
        formula = context.formula.partition(":")[0]
        shown["effective context"] = f"{counted(context.tokens, 'token')} ({formula})"
    shown["vocabulary"] = "none: token ids only" if manifest.vocab_size else "none: no tokens"
    if manifest.vocabulary:
        shown["vocabulary"] = f"{manifest.vocabulary}, {facts['words']} words of {manifest.vocab_size} tokens"
    if manifest.vocab_size:
        shown["boundary token"] = "none" if manifest.boundary_token is None else str(manifest.boundary_token)
    source = source_of(manifest)
    if isinstance(source, Source):
        container = "".join(f" ({text})" for name, text in source.said if name == "container")
        shown["made from"] = f"{source.name}{container}"
    stdout.print(facts_table(shown), soft_wrap=True)
    _print_tables(manifest)
    if manifest.parity:
        reached = [(name, number(value)) for name, value in manifest.parity.items()]
        stdout.print(rows_table(("\nparity reached at export", ""), reached))
    else:
        stdout.print("\nparity: NOT verified when it was exported; `txl-deploy verify` does it")


def _print_tables(manifest: Manifest) -> None:
    """Print the tables of a step's inputs, outputs and states, and its programs."""
    tables = tables_of(manifest)
    ahead = "\nlook-ahead" if any(row.lookahead for row in tables.reads) else ""
    reads = [(*row[:4], f"+ {row.lookahead}" if row.lookahead else "") for row in tables.reads]
    stdout.print(rows_table(("\nreads", "\ndtype", "\nshape", "\nrole", ahead), reads))
    returns = [row[:4] for row in tables.returns]
    stdout.print(rows_table(("\nreturns", "\ndtype", "\nshape", "\nrole"), returns))
    stdout.print(rows_table(("\ncarries", "\ndtype", "\nshape", "\nupdate", "\nstarts as"), tables.carries))
    stdout.print(rows_table(("\nprogram", "\nkind", "\nL", "\nupdate", "\nfile"), tables.programs))


def _print_engines(engines: list[dict[str, Any]]) -> None:
    rows = [
        (
            facts["file"],
            prefixed(facts["bytes"]),
            f"{facts['flavour']} {facts['version']}" + (f", {facts['rounding']}" if facts["rounding"] else ""),
            built_for(facts["compute_capabilities"], facts["device"], facts["platform"]),
            facts["kernels"] or "–",
            "–"
            if facts["kernels"] is None and not facts["fused_attention"]
            else f"{facts['fused_attention']} of {facts['attention_layers']}",
        )
        for facts in engines
    ]
    if rows:
        stdout.print(rows_table(("\nengine", "\nsize", "\nbuilt by", "\nfor", "\nkernels", "\nfused"), rows))


def _print_step(step: dict[str, Any]) -> None:
    here = f"no: {step['not_here']}" if step["not_here"] else "yes, and backend auto takes it"
    if not step["not_here"] and step["not_auto"]:
        here = f"yes, where backend native is named; not by auto: {step['not_auto']}"
    compared = ", ".join(f"{name} {number(value)}" for name, value in step["compared"].items())
    reached = " and ".join(map(number, step["reached"]))
    of_others = f"; of the same sources on {step['verified_on']}" if step["verified_on"] else ""
    shown = {
        "compiled step": f"{step['file']}, {prefixed(step['bytes'])}",
        "precision": f"weights in {step['precision']}, keys and values in {step['cache']}",
        "for": f"{step['platform']} with {step['instructions']}",
        "compiled by": f"{step['compiler']}, in {step['seconds']:.1f} s",
        "beside ONNX Runtime": f"{compared}; self-test {reached} of log-probabilities and memory{of_others}",
        "runs here": here,
    }
    stdout.print()
    stdout.print(facts_table(shown), soft_wrap=True)


def _print_weights(engines: list[Sidecar], weight_bytes: int) -> None:
    kinds: dict[tuple[str, str], list[Sidecar]] = {}
    for engine in engines:
        kinds.setdefault((engine.identity.flavour, engine.identity.update), []).append(engine)
    for (flavour, update), alike in kinds.items():
        text = weights_held(len(alike), *held_weights(alike, weight_bytes))
        stdout.print(f"{flavour}, {update}: {text}", soft_wrap=True)


def _weights_of(facts: dict[str, Any]) -> list[str]:
    """Return where an engine's weights are: in the engine, or in one place for all engines of the bundle."""
    held, given_bytes = facts["weight_bytes"], facts["given_weights"]
    parts = ["all held by the engine" if held is None else f"{prefixed(held)} held by the engine"]
    return parts + ([f"{given_bytes} read where all engines of the bundle read them"] if given_bytes else [])


def _print_engine(facts: dict[str, Any]) -> None:
    fused = ", ".join(facts["fused_kernels"]) or "none"
    united = f"{facts['fused_attention']} of {facts['attention_layers']} layers in one kernel: {fused}"
    shown = {
        "engine": f"{facts['file']}, {prefixed(facts['bytes'])}, is the file that was built",
        "program": f"{facts['program']}, of kind {facts['program_kind']}, L {facts['segment_length']}",
        "memory": f"{facts['update']}, {facts['in_place']} updated in place, {facts['read_in_place']} read in place",
        "precision": facts["precision"] + (f", matrices in {facts['rounding']}" if facts["rounding"] else ""),
        "built by": f"{facts['flavour']} {facts['version']} on {facts['platform']}, {facts['seconds']:.1f} s",
        "built for": built_for(facts["compute_capabilities"], facts["device"], facts["platform"]),
        "recorded": RECORDED[facts["recorded_by"]],
        "weights": ", ".join(_weights_of(facts)),
        "kernels": "not known" if facts["kernels"] is None else facts["kernels"],
        "attention": "not known" if facts["kernels"] is None and not facts["fused_attention"] else united,
        "checked": ", ".join(facts["verified_on"]),
    }
    if facts["judged"]:
        judged = facts["judged"].items()
        cells = (f"{name} {'not judged' if value is None else number(value)}" for name, value in judged)
        shown["judged on the CPU"] = "; ".join(cells)
    stdout.print(facts_table(shown), soft_wrap=True)
    for side in ("inputs", "outputs"):
        rows = [(spec["name"], spec["dtype"], list(spec["shape"])) for spec in facts[side]]
        stdout.print(rows_table((f"\n{side}", "\ndtype", "\nshape"), rows))
    if facts["layers"]:
        stdout.print(rows_table(("\nlayers", "\nkind"), facts["layers"]))


def _print_checkpoint(document: dict[str, Any]) -> None:
    shown = {
        name: value for name, value in document.items() if not isinstance(value, list | dict) and name != "skeleton"
    }
    stdout.print(facts_table(shown), soft_wrap=True)
    for name in ("config", "evaluation", "dialect"):
        if document.get(name):
            stdout.print(f"\n{name}", style="bold")
            stdout.print(facts_table(document[name]), soft_wrap=True)
    for name in ("globals", "notes"):
        if document.get(name):
            stdout.print(f"\n{name}", style="bold")
            stdout.print("\n".join(map(plain, msgspec.to_builtins(document[name]))), soft_wrap=True)
    if document.get("layers"):
        layers = [(entry["name"], entry["layer"]) for entry in document["layers"]]
        stdout.print(rows_table(("\nplace", "\nlayer, as names and shapes tell"), layers))
    tensors = [(entry["name"], entry["dtype"], entry["shape"]) for entry in document.get("tensors", [])]
    if tensors:
        stdout.print(rows_table(("\ntensor", "\ndtype", "\nshape"), tensors))
