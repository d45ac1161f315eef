"""`txl-deploy inspect`: what a bundle or a checkpoint is, without running or trusting it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from txl_export.families.registry import facts_of_bundle
from txl_export.options import Family
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import MANIFEST, Bundle, open_bundle
from txl_runtime.device.choosing import DEVICES, missing
from txl_runtime.device.engines.files import describe_engine, engine_facts, engine_names
from txl_runtime.device.engines.sidecar import ANYWHERE, read_sidecar, sidecar_path
from txl_runtime.errors import BundleError, UsageError

from txl_deploy.commands.options import Json, like_export, parse_aliases
from txl_deploy.console import facts_table, number, print_json, quantity, rows_table, stdout
from txl_deploy.extras import require_export

STREAMS = {
    "independent": "independent: each can be idle, reset and moved alone",
    "lockstep": "in lockstep: all of them run, or none",
}
LENGTHS = {
    "valid": "any number of positions of a segment may count",
    "exact": "exact: a segment is one of the lengths above",
}


def run(
    place: Annotated[
        str, typer.Argument(metavar="PATH", help="A bundle, an engine or a checkpoint.", show_default=False)
    ],
    family: Annotated[Family, like_export("family")] = "auto",
    config: Annotated[Path | None, like_export("config")] = None,
    alias: Annotated[list[str] | None, like_export("aliases")] = None,
    json: Json = False,
) -> None:
    """Show architecture, sizes, context and the parity reached; of a checkpoint, what it holds."""
    path, aliases = Path(place), parse_aliases(alias)
    if not place.strip():
        raise UsageError("the path is empty, expected a bundle or a checkpoint; name one")
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder, expected a bundle or a checkpoint; check the path")
    if (path / MANIFEST).exists():
        if family != "auto" or config is not None or aliases:
            raise UsageError(f"{path}: is a bundle, --family, --config and --alias are for checkpoints; leave them out")
        bundle = open_bundle(path)
        manifest, (engines, broken) = bundle.manifest, _engines(bundle)
        document = describe_bundle(manifest) | {"backends": {name: missing(name, bundle) for name in DEVICES}}
        if json:
            print_json(document | {"engines": engines, "broken_engines": broken, "manifest": manifest})
        else:
            _print_bundle(path, manifest, document)
            _print_engines(engines)
            for problem in broken:
                stdout.print(problem, soft_wrap=True)
        return
    if path.suffix in (".engine", ".onnx"):
        document = describe_engine(path)
        if json:
            print_json(document)
        else:
            _print_engine(document)
        return
    if path.is_dir() and not (path / "config.json").exists():
        raise UsageError(
            f"{path}: a folder without {MANIFEST} or config.json, expected a bundle or a Hugging Face model; name one, "
            "or a checkpoint file"
        )
    require_export("inspect of a checkpoint")
    from txl_export.checkpoints import read_config
    from txl_export.describing import describe_checkpoint

    values = None if config is None else read_config(config)
    document = describe_checkpoint(path, family, values, aliases)
    if json:
        print_json(document)
    else:
        _print_checkpoint(document)


def describe_bundle(manifest: Manifest) -> dict[str, Any]:
    """The facts about a bundle that people ask for first."""
    family = manifest.family.get("dialect", {}).get("family") or manifest.family_name
    return {
        "kind": "bundle",
        "model_id": manifest.model_id,
        "family": family,
        "parameters": manifest.parameters,
        "batch_size": manifest.batch_size,
        "segment_lengths": manifest.segment_lengths,
        "memory_length": manifest.memory_length if manifest.counters else None,
        "bytes_per_stream": manifest.state_bytes,
        "effective_context": manifest.reach,
        "streams": manifest.streams,
        "lengths": manifest.lengths,
        "commits": manifest.commits,
        "bytes": sum(record.size for record in manifest.files.values()),
        "precision": manifest.precision,
        "parity": manifest.parity,
    }


def _print_bundle(path: Path, manifest: Manifest, facts: dict[str, Any]) -> None:
    lengths = ", ".join(map(str, manifest.segment_lengths))
    memory = f", M {manifest.memory_length}" if manifest.counters else ""
    could_run = ["cpu", *(f"not {name}: {why}" if why else name for name, why in facts["backends"].items())]
    shown = {
        "bundle": f"{path}, {quantity(facts['bytes'])}, every file's hash checked",
        "model": f"{manifest.model_id[:12]}, {quantity(manifest.parameters, '')} parameters, {manifest.precision}",
        **facts_of_bundle(manifest),
        "shapes": f"B {manifest.batch_size}, L {lengths}{memory}",
        "state": f"{quantity(manifest.state_bytes)} per sequence",
        "sequences": STREAMS[manifest.streams],
        "lengths": LENGTHS[manifest.lengths],
        "backends": "\n".join(could_run),
    }
    if manifest.reach is not None:
        shown["effective context"] = f"{manifest.reach} tokens (layers × memory + segment)"
    shown["vocabulary"] = manifest.vocabulary or "none: token ids only" if manifest.vocab_size else "none: no tokens"
    source = manifest.provenance.get("source")
    if isinstance(source, dict):
        container = f" ({source['container']})" if source.get("container") else ""
        shown["made from"] = f"{source.get('name')}{container}"
    stdout.print(facts_table(shown), soft_wrap=True)
    _print_tables(manifest)
    programs = [(p.name, p.kind, p.segment_length, p.update, p.file) for p in manifest.programs]
    stdout.print(rows_table(("\nprogram", "\nkind", "\nL", "\nupdate", "\nfile"), programs))
    if manifest.parity:
        reached = [(name, number(value)) for name, value in manifest.parity.items()]
        stdout.print(rows_table(("\nparity reached at export", ""), reached))
    else:
        stdout.print("\nparity: NOT verified when it was exported; `txl-deploy verify` does it")


def _print_tables(manifest: Manifest) -> None:
    """What a step reads, returns and carries. Tensors of one form, such as those of all layers, share a row."""
    reads = [
        (entry.name, entry.dtype, _sizes(entry.shape), entry.role, f"+ {entry.lookahead}" if entry.lookahead else "")
        for entry in manifest.inputs
    ]
    returns = [(entry.name, entry.dtype, _sizes(entry.shape), entry.role) for entry in manifest.outputs]
    stdout.print(
        rows_table(
            ("\nreads", "\ndtype", "\nshape", "\nrole", "\nlook-ahead" if any(row[4] for row in reads) else ""), reads
        )
    )
    stdout.print(rows_table(("\nreturns", "\ndtype", "\nshape", "\nrole"), returns))
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for state in manifest.states:
        begins = "absent" if state.absent else "no rows" if state.rows else state.initial
        if isinstance(begins, str) and begins.startswith("initial."):
            begins = "a tensor"
        form = (state.dtype, _sizes(state.shape), state.update, "zeros" if begins in (None, 0.0) else str(begins))
        alike.setdefault(form, []).append(state.name)
    carries = [(_first_and_last(names), *form) for form, names in alike.items()]
    stdout.print(rows_table(("\ncarries", "\ndtype", "\nshape", "\nupdate", "\nstarts as"), carries))


def _first_and_last(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]} ({len(names)})"


def _sizes(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _engines(bundle: Bundle) -> tuple[list[dict[str, Any]], list[str]]:
    """Facts of the engines that can be described, and what is wrong with the others."""
    good, broken = [], []
    for name in engine_names(bundle):
        try:
            bundle.check(name)
            good.append({"file": name} | engine_facts(read_sidecar(bundle.file(sidecar_path(name)))))
        except BundleError as error:
            broken.append(str(error))
    return good, broken


def _print_engines(engines: list[dict[str, Any]]) -> None:
    rows = [
        (
            facts["file"],
            quantity(facts["bytes"]),
            f"{facts['flavour']} {facts['version']}",
            _built_for(facts),
            facts["kernels"] or "–",
            f"{facts['fused_attention']} of {facts['attention_layers']}",
        )
        for facts in engines
    ]
    if rows:
        stdout.print(rows_table(("\nengine", "\nsize", "\nbuilt by", "\nfor", "\nkernels", "\nfused"), rows))


def _print_engine(facts: dict[str, Any]) -> None:
    fused = ", ".join(facts["fused_kernels"]) or "none"
    shown = {
        "engine": f"{facts['file']}, {quantity(facts['bytes'])}, is the file that was built",
        "program": f"{facts['program']}, of kind {facts['program_kind']}, L {facts['segment_length']}",
        "memory": f"{facts['update']}, {facts['in_place']} updated in place, {facts['read_in_place']} read in place",
        "precision": facts["precision"],
        "built by": f"{facts['flavour']} {facts['version']} on {facts['platform']}, {facts['seconds']:.1f} s",
        "built for": _built_for(facts),
        "kernels": "not known" if facts["kernels"] is None else facts["kernels"],
        "attention": f"{facts['fused_attention']} of {facts['attention_layers']} layers in one kernel: {fused}",
        "checked": ", ".join(facts["verified_on"]),
    }
    stdout.print(facts_table(shown), soft_wrap=True)
    for side in ("inputs", "outputs"):
        rows = [(spec["name"], spec["dtype"], list(spec["shape"])) for spec in facts[side]]
        stdout.print(rows_table((f"\n{side}", "\ndtype", "\nshape"), rows))
    if facts["layers"]:
        stdout.print(rows_table(("\nlayers", "\nkind"), facts["layers"]))


def _built_for(facts: dict[str, Any]) -> str:
    """The GPUs that an engine fits."""
    if gpus := facts["compute_capabilities"]:
        return f"SM {', '.join(map(str, gpus))}"
    return facts["device"] or ("any GPU" if facts["platform"] == ANYWHERE else "the library's default GPUs")


def _print_checkpoint(document: dict[str, Any]) -> None:
    shown = {name: value for name, value in document.items() if not isinstance(value, list | dict)}
    stdout.print(facts_table(shown), soft_wrap=True)
    for name in ("config", "evaluation", "dialect"):
        if document.get(name):
            stdout.print(f"\n[bold]{name}[/bold]")
            stdout.print(facts_table(document[name]), soft_wrap=True)
    for name in ("globals", "notes"):
        if document.get(name):
            stdout.print(f"\n[bold]{name}[/bold]\n" + "\n".join(msgspec.to_builtins(document[name])), soft_wrap=True)
    tensors = [(entry["name"], entry["dtype"], entry["shape"]) for entry in document.get("tensors", [])]
    if tensors:
        stdout.print(rows_table(("\ntensor", "\ndtype", "\nshape"), tensors))
