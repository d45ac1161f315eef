"""What can be said of a bundle of a foreign file without PyTorch; functions as in `families.registry.FamilyFacts`."""

from __future__ import annotations

from pathlib import Path

from txl_runtime.bundle.manifest import Manifest


def takes(source: object) -> bool:
    """An ONNX file."""
    return isinstance(source, str | Path) and str(source).endswith(".onnx") and not Path(source).is_dir()


def facts(manifest: Manifest) -> dict[str, str]:
    """What the exporter noted of the file."""
    names = {"file": "file", "opened": "opened", "settled": "fixed", "lockstep": "in lockstep because"}
    names |= {"fixed": "B is fixed because"}
    return {shown: str(manifest.family[name]) for name, shown in names.items() if manifest.family.get(name)}
