"""What can be said of a model of the user's own without PyTorch; functions as in `families.registry.FamilyFacts`."""

from __future__ import annotations

from pathlib import Path

from txl_runtime.bundle.manifest import Manifest

from txl_export.families.own_module.sources import Adapted
from txl_export.families.own_module.spec import StepSpec


def takes(source: object) -> bool:
    """A specification, a package's model, or FILE.py:FUNCTION, unless there is a file of that name."""
    if isinstance(source, str | Path) and not Path(source).exists():
        file, _, function = str(source).rpartition(":")
        return bool(function) and (file.endswith(".py") or Path(file).is_file())
    return isinstance(source, StepSpec | Adapted)


def facts(manifest: Manifest) -> dict[str, str]:
    """What the exporter noted of the module."""
    names = {"module": "module", "route": "captured by", "lockstep": "in lockstep because", "growth": "growth"}
    names |= {"fixed": "B is fixed because"}
    return {shown: str(manifest.family[name]) for name, shown in names.items() if manifest.family.get(name)}
