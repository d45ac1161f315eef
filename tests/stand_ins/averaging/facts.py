"""What `inspect` says of a decaying average."""

from __future__ import annotations

from txl_runtime.bundle.manifest import Manifest


def facts(manifest: Manifest) -> dict[str, str]:
    """See `txl_export.families.registry.Facts`."""
    return {"decay": str(manifest.family["decay"])}
