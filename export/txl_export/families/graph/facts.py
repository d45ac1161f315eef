"""Facts about a bundle of an ONNX file, without PyTorch: implements `families.registry.FamilyFacts`."""

from __future__ import annotations

from pathlib import Path

from txl_runtime.bundle.manifest import Manifest


def takes(source: object) -> bool:
    """Return whether a source is an ONNX file or a folder that LEAPP wrote."""
    if not isinstance(source, str | Path):
        return False
    from txl_export.families.graph.take.leapp import (
        is_leapp,  # imported here because it imports PyTorch, which describing a bundle must not need
    )

    path = Path(source)
    return (path.suffix == ".onnx" and not path.is_dir()) or is_leapp(path)


def facts(manifest: Manifest) -> dict[str, str]:
    """Return the export's notes on the file, by the labels that `inspect` shows."""
    names = {"file": "file", "rate": "steps a second", "opened": "opened", "settled": "fixed"}
    names |= {"lockstep": "in lockstep because", "fixed": "B is fixed because"}
    return {shown: str(manifest.family[name]) for name, shown in names.items() if manifest.family.get(name)}
