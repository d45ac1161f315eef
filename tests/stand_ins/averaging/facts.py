"""The lines that `inspect` shows of a decaying average."""

from __future__ import annotations

from txl_runtime.bundle.manifest import Manifest

from stand_ins.averaging import Average


def takes(source: object) -> bool:
    return isinstance(source, Average)


def facts(manifest: Manifest) -> dict[str, str]:
    """See `txl_export.families.registry.FamilyFacts`."""
    return {"decay": str(manifest.family["decay"])}
