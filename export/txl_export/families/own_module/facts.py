"""Facts about a bundle of a user's own module, without PyTorch: implements `families.registry.FamilyFacts`."""

from __future__ import annotations

from pathlib import Path

from txl_runtime.bundle.manifest import Manifest

from txl_export.families.own_module.adapted import Adapted
from txl_export.families.own_module.spec import StepSpec


def takes(source: object) -> bool:
    """Return whether a source is a specification, a package's model, or FILE.py:FUNCTION (not a file's name)."""
    if isinstance(source, str | Path) and not Path(source).exists():
        file, _, function = str(source).rpartition(":")
        return bool(function) and (file.endswith(".py") or Path(file).is_file())
    return isinstance(source, StepSpec | Adapted)


def facts(manifest: Manifest) -> dict[str, str]:
    """Return the exporter's notes on the module, e.g. {"module": "Policy", "captured by": "torch.export"}."""
    names = {"module": "module", "route": "captured by", "lockstep": "in lockstep because", "growth": "growth"}
    names |= {"fixed": "B is fixed because"}
    return {shown: str(manifest.family[name]) for name, shown in names.items() if manifest.family.get(name)}
