"""Mark a folder as a package, and name its model; the packages of all targets share these functions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from txl_export.bundle.placing import Kind
from txl_runtime.bundle.manifest import Manifest

from txl_deploy.extras import version_of

REPOSITORY = Kind("package", "txl-package.json", "models")
"""The kind of folder that a package is: its name in messages, the file that marks it, and an example of its path."""


def seal(folder: Path, target: str, models: Sequence[str], manifest: Manifest) -> None:
    """Write the file that marks a folder as one of this project's packages."""
    document = {
        "format": "txl-deploy.package",
        "target": target,
        "model_id": manifest.model_id,
        "models": models,
        "txl_deploy": version_of("txl-deploy"),
    }
    (folder / REPOSITORY.marker).write_text(json.dumps(document, indent=2) + "\n")


def model_name(bundle: Path) -> str:
    """Return a name for the bundle's model with only characters that need no quoting in an address."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", bundle.absolute().stem).strip("-.") or "model"
