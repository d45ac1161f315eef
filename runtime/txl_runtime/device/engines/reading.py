"""Which engines a bundle has, read without any library: for `inspect`, and for a runtime that looks for one to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from txl_runtime.bundle.reading import ENGINES, Bundle
from txl_runtime.device.engines.sidecar import Sidecar, is_intact, read_sidecar, sidecar_path
from txl_runtime.errors import BundleError


def describe_engine(path: str | Path) -> dict[str, Any]:
    """The facts of an engine file, from the sidecar beside it.

    Raises:
        BundleError: it is missing, has no sidecar, or is not the file that was built.
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
    """A sidecar as one flat table, in the order people ask."""
    identity = sidecar.identity
    return {
        "program": identity.program,
        "program_kind": identity.kind,
        "segment_length": identity.segment_length,
        "update": identity.update,
        "precision": identity.precision,
        "flavour": identity.flavour,
        "version": identity.version,
        "compute_capabilities": identity.compute_capabilities,
        "device": identity.device,
        "platform": identity.platform,
        "bytes": sidecar.bytes,
        "seconds": sidecar.seconds,
        "kernels": sidecar.kernels,
        "attention_layers": sidecar.attention_layers,
        "fused_attention": sidecar.fused_attention,
        "fused_kernels": sidecar.fused_kernels,
        "in_place": sidecar.in_place,
        "verified_on": sidecar.verified_on,
        "layers": sidecar.layers,
        "inputs": msgspec.to_builtins(identity.inputs),
        "outputs": msgspec.to_builtins(identity.outputs),
        "onnx_sha256": identity.onnx,
        "sha256": sidecar.sha256,
    }


def engine_names(bundle: Bundle) -> list[str]:
    """Every engine file that a bundle's manifest lists; beside engines their folder holds sidecars alone."""
    return sorted(name for name in bundle.manifest.files if name.startswith(ENGINES) and not name.endswith(".json"))


def bundle_engines(bundle: Bundle) -> list[tuple[str, Sidecar]]:
    """Every engine that a bundle's manifest lists: its file, and its facts.

    Raises:
        BundleError: a listed engine has no readable sidecar.
    """
    return [(name, read_sidecar(bundle.file(sidecar_path(name)))) for name in engine_names(bundle)]
