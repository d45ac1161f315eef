"""Write a model repository: the folder with which Triton is started, with everything that is needed to serve a bundle.

    DIR/txl-package.json, README.md
    DIR/NAME/config.pbtxt                the model that is stepped
    DIR/NAME/probe.json                  a request by which to check that the model answers
    DIR/NAME/1/model.py, bundle/, packages/
    DIR/NAME-generate/…                  the same files for the model that generates; hard links of the bundle's files

The server copies nothing and reads no other folder, so each model's folder has everything that the model needs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import txl_runtime
from txl_export.bundle.placing import check_destination, publishing
from txl_runtime.bundle.folder import Folder
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import MANIFEST, bundle_path, open_bundle
from txl_runtime.errors import UsageError

from txl_deploy.packages import REPOSITORY, model_name, seal
from txl_deploy.places import refuse_inside
from txl_deploy.triton import inside, readme
from txl_deploy.triton.config import generation_config, stepping_config, to_text

VERSION = "1"
"""The server's name for the folder of a model's only version."""
SEQUENCES = 16
"""Default number of sequences at once; if the bundle's batch size is larger, the default is the batch size."""


@dataclass(frozen=True)
class Package:
    """Facts about a package that was written.

    Attributes:
        folder: the package's folder.
        models: the names of the models in it.
        sequences: maximum number of sequences at once.
        state_bytes: size of one sequence's state in bytes.
    """

    folder: Path
    models: tuple[str, ...]
    sequences: int
    state_bytes: int


def package_python(
    bundle: Path,
    out: Path,
    force: bool = False,
    sequences: int | None = None,
    idle_seconds: float = 60.0,
    backend: str = "cpu",
) -> Package:
    """Write a model repository for Triton's Python backend.

    Args:
        bundle: the bundle's folder.
        out: the repository's folder; it must not exist unless `force` is given.
        force: True to replace a repository that this function wrote.
        sequences: maximum number of sequences at once; None for the bundle's batch size or 16, whichever is larger.
        idle_seconds: seconds after which the server forgets an idle sequence.
        backend: the runtime's backend inside the server.

    Raises:
        UsageError: the folder cannot be written, or the model cannot be served by Triton.
        BundleError: the bundle cannot be read.
    """
    check_destination(out, force, REPOSITORY)
    refuse_inside(out, bundle)
    manifest = open_bundle(bundle, verify_files=False).manifest
    count = _checked(manifest, sequences, idle_seconds)
    configs = {model_name(bundle): stepping_config(manifest, count, idle_seconds, backend)}
    if manifest.can.score and manifest.can.run_single:
        configs[f"{model_name(bundle)}-generate"] = generation_config(backend, idle_seconds)
    package = Package(out, tuple(configs), count, manifest.state_bytes)
    with publishing(out, force, REPOSITORY) as folder:
        first = None
        for name, config in configs.items():
            place = folder / name / VERSION
            place.mkdir(parents=True)
            (folder / name / "config.pbtxt").write_text(to_text(config) + "\n")
            if copy_bundle(bundle, place / "bundle") != manifest:
                raise UsageError(f"{bundle}: was replaced while it was packaged, expected it to stay; package it again")
            first = first or place
            if place != first:
                _share(first / "bundle", place / "bundle")
            _copy_packages(place)
        (folder / package.models[0] / "probe.json").write_text(json.dumps(probe(manifest)) + "\n")
        seal(folder, "triton", package.models, manifest)
        (folder / "README.md").write_text(readme.page(package.models, manifest, count, idle_seconds))
    return package


def _checked(manifest: Manifest, sequences: int | None, idle_seconds: float) -> int:
    """Return the number of sequences at once.

    Raises UsageError if the model, or one of the numbers, cannot be served.
    """
    if not manifest.can.run_fewer and manifest.batch_size > 1:
        raise UsageError(
            f"this model's {manifest.batch_size} sequences influence one another, expected a model whose sequences "
            "can be served to different clients; export it with --batch-size 1"
        )
    odd = [entry.name for entry in manifest.interface if entry.dtype in ("float16", "bfloat16")]
    if odd:
        raise UsageError(f"{odd[0]} is of half precision, expected float32, int32 or bool; export the model in fp32")
    if sequences is not None and not 1 <= sequences <= 1 << 16:
        raise UsageError(f"--sequences is {sequences}, expected 1 … {1 << 16}; choose how many may be at once")
    if not 0.001 <= idle_seconds <= 1e6:
        raise UsageError(f"--idle-seconds is {idle_seconds}, expected 0.001 … 1000000; choose another time")
    return max(manifest.batch_size, SEQUENCES) if sequences is None else sequences


def copy_bundle(bundle: Path, place: Path) -> Manifest:
    """Copy the files that a bundle's manifest lists, and compare the copies with the manifest.

    Raises:
        BundleError: a copy differs, or the bundle cannot be read.
    """
    source = Folder(bundle_path(bundle))
    for name in (*open_bundle(bundle, verify_files=False).manifest.files, MANIFEST):
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open(name) as (file, _), target.open("wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
    return open_bundle(place).manifest


def probe(manifest: Manifest) -> dict[str, object]:
    """Return a request that every server of this model answers: zeros for the shortest segment of a new sequence."""
    length = manifest.segment_lengths[-1]
    inputs = []
    for entry in manifest.given:
        sizes = entry.axes.alone.sizes(1, length)
        shape, kind = [1, *(sizes or [1])], {"float32": "FP32", "int32": "INT32", "bool": "BOOL"}[entry.dtype]
        zeros: list[object] = [False if kind == "BOOL" else 0] * math.prod(shape)
        inputs.append({"name": entry.name, "datatype": kind, "shape": shape, "data": zeros})
    flags = {"sequence_id": 2**32 - 1, "sequence_start": True, "sequence_end": True}
    return {"parameters": flags, "inputs": inputs}


def _share(first: Path, second: Path) -> None:
    """Replace files in `second` by hard links to the same files in `first`, if links can be made."""
    for path in first.rglob("*"):
        other = second / path.relative_to(first)
        if path.is_file():
            with contextlib.suppress(OSError):
                partial = other.with_name(f".{other.name}")
                os.link(path, partial)
                partial.replace(other)


def _copy_packages(place: Path) -> None:
    """Copy the runtime, and the modules that run inside the server, into a folder beside `model.py`."""
    home = Path(inside.__file__).parent
    shutil.copyfile(home / "model.py", place / "model.py")
    for path, name in _sources(home):
        target = place / "packages" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _sources(home: Path) -> Iterator[tuple[Path, Path]]:
    """Yield pairs: a file to copy, and its path below the folder `packages`."""
    runtime = Path(txl_runtime.__file__).parent
    for path in sorted(runtime.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path, path.relative_to(runtime.parent)
    root = home.parents[2]
    for folder in (home.parents[1], home.parent):
        yield folder / "__init__.py", (folder / "__init__.py").relative_to(root)
    for path in sorted(home.glob("*.py")):
        if path.name != "model.py":
            yield path, path.relative_to(root)
