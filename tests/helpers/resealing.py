"""Bundles that are changed in tests, and whose manifest then vouches for what is there."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.device.gpu import platform_name

BASES = Path(__file__).parents[2] / "conformance" / "bad_bundles" / "bases"
"""Two small verified bundles: `transformer_xl`, which has an engine of ONNX Runtime's, and `step`."""


def copied(source: Path, target: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(source, target))


def without_engines(target: Path) -> Path:
    """A copy of `transformer_xl` whose engines are gone."""
    shutil.rmtree(copied(BASES / "transformer_xl", target) / "engines")
    return reseal(target)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


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


def with_identity(path: Path, **fields: Any) -> Path:
    """Let every engine of a bundle say of itself that it was built otherwise."""
    for sidecar in (path / "engines").rglob("*.json"):
        document = json.loads(sidecar.read_bytes())
        document["identity"] |= fields
        sidecar.write_text(json.dumps(document))
    return reseal(path)


def as_tensorrt(source: Path, target: Path, version: str, device: str) -> Path:
    """A copy of a bundle, with its engines of RTX passed off as TensorRT's of a version."""
    path = copied(source, target)
    (path / "engines" / "rtx").rename(path / "engines" / "tensorrt")
    own = {"flavour": "tensorrt", "version": version, "device": device}
    return with_identity(path, **own, compute_capabilities=[], platform=platform_name())


def changed(document: Any, place: str, value: Any) -> Any:
    """A JSON document with another value at a place such as "gates.0.passed"."""
    whole = copy.deepcopy(document)
    *path, last = place.split(".")
    inner: Any = whole
    for step in path:
        inner = inner[int(step) if step.isdecimal() else step]
    inner[int(last) if last.isdecimal() else last] = value
    return whole
