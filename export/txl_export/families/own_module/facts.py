"""What `inspect` says of a model of the user's own beside what the tables of its bundle say."""

from __future__ import annotations

from txl_runtime.bundle.manifest import Manifest


def facts(manifest: Manifest) -> dict[str, str]:
    """See `families.registry.Facts`."""
    names = {"module": "module", "route": "captured by", "lockstep": "in lockstep because", "growth": "growth"}
    return {shown: str(manifest.family[name]) for name, shown in names.items() if manifest.family.get(name)}
