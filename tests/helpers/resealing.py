"""Bundles that are changed in tests, and whose manifest then vouches for what is there."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from txl_runtime.bundle.encoding import file_sha256

BASES = Path(__file__).parents[2] / "conformance" / "bad_bundles" / "bases"
"""Two small verified bundles: `transformer_xl` and `step`."""


def copied(source: Path, target: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(source, target))


def reseal(path: Path, **fields: Any) -> Path:
    """Let the manifest list all files as they are, and change some of its fields."""
    manifest = json.loads((path / "manifest.json").read_bytes()) | fields
    manifest["files"] = {
        file.relative_to(path).as_posix(): {"size": file.stat().st_size, "sha256": file_sha256(file)}
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "manifest.json"
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def changed(document: Any, place: str, value: Any) -> Any:
    """A JSON document with another value at a place such as "gates.0.passed"."""
    whole = copy.deepcopy(document)
    *path, last = place.split(".")
    inner: Any = whole
    for step in path:
        inner = inner[int(step) if step.isdecimal() else step]
    inner[int(last) if last.isdecimal() else last] = value
    return whole
