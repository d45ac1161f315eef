"""Functions that list a bundle's engines for devices, and the facts about each engine, without loading a library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from txl_runtime.bundle.engines.sidecar import (
    FLAVOURS,
    Identity,
    Sidecar,
    Target,
    decode_sidecar,
    is_intact,
    read_sidecar,
    sidecar_path,
)
from txl_runtime.bundle.reading import ENGINES, NATIVE, Bundle
from txl_runtime.bundle.tables import UPDATE_RULES, Program
from txl_runtime.errors import BackendError, BundleError


class EngineFile(NamedTuple):
    """An engine in a bundle: the name of its file, its facts, and its program."""

    name: str
    sidecar: Sidecar
    program: Program


def find_engines(
    bundle: Bundle, target: Target, update: str | None = None, usable: Sequence[str] = UPDATE_RULES
) -> list[EngineFile]:
    """Return the engines of a target and of one update rule.

    Args:
        update: the update rule; None for the first of `usable` that the bundle has engines of.
        usable: the rules that the target's library can run here, the best first.

    Raises:
        BackendError: the bundle has no such engines.
    """
    engines = [
        EngineFile(name, sidecar, sidecar.identity.as_program())
        for name, sidecar in bundle_engines(bundle)
        if name.startswith(f"engines/{target}/")
    ]
    rules = {engine.program.update for engine in engines}
    rule = update or next((rule for rule in usable if rule in rules), usable[0])
    chosen = [engine for engine in engines if engine.program.update == rule]
    if not chosen:
        memory = ", ".join(sorted(rules))
        has = f"has {target} engines of {memory} memory alone" if rules else f"has no {target} engines"
        more = f" --update {rule}" if rules or update else ""
        raise BackendError(
            f"{bundle.path}: {has}, expected them for --backend {target}; "
            f"txl-deploy build {bundle.path} --target {target}{more}"
        )
    return chosen


def describe_engine(path: str | Path) -> dict[str, Any]:
    """Return the facts of an engine file, from the sidecar beside it.

    Raises:
        BundleError: the file is missing, has no sidecar, or is not the file that the sidecar describes.
    """
    engine = Path(path)
    if not engine.is_file():
        raise BundleError(f"{engine}: no such file, expected an engine; build one with `txl-deploy build`")
    sidecar = read_sidecar(engine.parent / sidecar_path(engine.name))
    if not is_intact(engine, sidecar):
        raise BundleError(
            f"{engine}: {engine.stat().st_size} bytes that are not the {sidecar.bytes} its sidecar describes; copy it "
            "again or build it again with `txl-deploy build`"
        )
    return {"kind": "engine", "file": str(engine), **engine_facts(sidecar)}


def engine_facts(sidecar: Sidecar) -> dict[str, Any]:
    """Return a sidecar as one flat table, the most wanted facts first."""
    identity = sidecar.identity
    return {
        "program": identity.program,
        "program_kind": identity.kind,
        "segment_length": identity.segment_length,
        "update": identity.update,
        "precision": identity.precision,
        "rounding": identity.rounding or None,
        "flavour": identity.flavour,
        "version": identity.version,
        "compute_capabilities": identity.compute_capabilities,
        "device": identity.device,
        "platform": identity.platform,
        "bytes": sidecar.bytes,
        "seconds": sidecar.seconds,
        "recorded_by": _recorder(identity),
        "given_weights": len(identity.given),
        "weight_bytes": sidecar.weight_bytes,
        "kernels": sidecar.kernels,
        "attention_layers": sidecar.attention_layers,
        "fused_attention": sidecar.fused_attention,
        "fused_kernels": sidecar.fused_kernels,
        "in_place": sidecar.in_place,
        "read_in_place": sidecar.read_in_place,
        "copying": sidecar.copying,
        "verified_on": sidecar.verified_on,
        "reached": sidecar.reached,
        "judged": sidecar.judged,
        "layers": sidecar.layers,
        "inputs": msgspec.to_builtins(identity.inputs),
        "outputs": msgspec.to_builtins(identity.outputs),
        "onnx_sha256": identity.onnx,
        "sha256": sidecar.sha256,
    }


def _recorder(identity: Identity) -> str | None:
    """Return who records an engine's work as a CUDA graph: "loop", "engine" (itself), or None for nobody."""
    if identity.flavour == FLAVOURS["rtx"]:
        return "loop" if identity.given_memory else "engine"
    return "loop" if identity.flavour == FLAVOURS["tensorrt"] else None


def engine_names(bundle: Bundle) -> list[str]:
    """Return all engine files for devices that a bundle's manifest lists; other files beside them are sidecars."""
    engines = (name for name in bundle.manifest.files if name.startswith(ENGINES) and not name.startswith(NATIVE))
    return sorted(name for name in engines if not name.endswith(".json"))


def bundle_engines(bundle: Bundle) -> list[tuple[str, Sidecar]]:
    """Return (file, facts) of every engine that a bundle's manifest lists.

    Raises:
        BundleError: an engine's sidecar is missing, unreadable, or not the sidecar in the manifest.
    """
    places = ((name, sidecar_path(name)) for name in engine_names(bundle))
    return [(name, decode_sidecar(bundle.read(facts), str(bundle.file(facts)))) for name, facts in places]
