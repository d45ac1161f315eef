"""Facts of a bundle of a foreign file, read without PyTorch; functions as in `families.registry.FamilyFacts`."""

from __future__ import annotations

from pathlib import Path

from txl_runtime.bundle.manifest import Manifest


def takes(source: object) -> bool:
    """An ONNX file, or a folder that LEAPP wrote."""
    if not isinstance(source, str | Path):
        return False
    from txl_export.families.graph.take.leapp import (
        is_leapp,  # which imports PyTorch, and bundles are described without
    )

    path = Path(source)
    return (path.suffix == ".onnx" and not path.is_dir()) or is_leapp(path)


def facts(manifest: Manifest) -> dict[str, str]:
    """Notes that the export made of the file, by the words that `inspect` shows."""
    names = {"file": "file", "rate": "steps a second", "opened": "opened", "settled": "fixed"}
    names |= {"lockstep": "in lockstep because", "fixed": "B is fixed because"}
    return {shown: str(manifest.family[name]) for name, shown in names.items() if manifest.family.get(name)}
