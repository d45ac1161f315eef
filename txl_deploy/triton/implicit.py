"""A model repository for Triton's ONNX Runtime backend, where the server itself keeps the state of each sequence.

    DIR/txl-package.json, README.md
    DIR/NAME/config.pbtxt
    DIR/NAME/initial_state/…             what a sequence starts with, where that is not zeros
    DIR/NAME/1/model.onnx and the bundle's weight file

The graph is simulated on ONNX Runtime in this project's tests; on that backend it was not run.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_engines.implicit import ImplicitStep, KeptState, implicit_step
from txl_export.bundle.placing import check_destination, publishing
from txl_runtime.bundle.folder import Folder, undisturbed
from txl_runtime.bundle.reading import Bundle, bundle_path, open_bundle, read_bundle
from txl_runtime.errors import BundleError

from txl_deploy.packages import REPOSITORY, model_name, seal
from txl_deploy.places import refuse_inside
from txl_deploy.triton import readme
from txl_deploy.triton.config import CPU, TYPES, Config, sequence_batching, to_text
from txl_deploy.triton.packages import VERSION, Package, checked


def package_onnx(
    bundle: Path,
    out: Path,
    force: bool = False,
    sequences: int | None = None,
    idle_seconds: float = 60.0,
    length: int | None = None,
) -> Package:
    """Write a model repository for Triton's ONNX Runtime backend.

    Args:
        bundle: the bundle's folder; its B is 1, or its programs leave B open.
        out, force, sequences, idle_seconds: as of `package_python`.
        length: L of the segments that it takes; the longest without it.

    Raises:
        UsageError: nothing can be written there, or this model's state cannot be kept by the server.
        BundleError: the bundle cannot be read.
    """
    check_destination(out, force, REPOSITORY)
    refuse_inside(out, bundle)
    manifest = open_bundle(bundle, verify_files=False).manifest
    name, count = model_name(bundle), checked(manifest, sequences, idle_seconds)
    made = Package(out, "triton-onnx", (name,), count, manifest.state_bytes)
    with publishing(out, force, REPOSITORY) as folder:
        step = undisturbed(bundle_path(bundle), lambda found: _write_model(found, folder / name, length))
        (folder / name / "config.pbtxt").write_text(to_text(onnx_config(step, count, idle_seconds)) + "\n")
        seal(folder, made.target, made.models, manifest)
        (folder / "README.md").write_text(readme.of_onnx(made, step, manifest))
    return made


def onnx_config(step: ImplicitStep, sequences: int, idle_seconds: float) -> Config:
    """What the server is told: the tensors that clients see, and the states that it keeps."""
    kept = {name for state in step.states for name in (state.input, state.output)}
    sides = {
        side: [
            {"name": spec.name, "data_type": TYPES[spec.dtype], "dims": list(spec.fixed)}
            for spec in specs
            if spec.name not in kept
        ]
        for side, specs in (("input", step.program.inputs), ("output", step.program.outputs))
    }
    states = [_state(state) for state in step.states]
    return {
        "platform": "onnxruntime_onnx",
        "max_batch_size": 0,
        **sides,
        "sequence_batching": sequence_batching(sequences, idle_seconds) | ({"state": states} if states else {}),
        "instance_group": [{"kind": CPU, "count": 1}],
    }


def _state(state: KeptState) -> Mapping[str, Any]:
    kind = {"data_type": TYPES[state.dtype], "dims": list(state.shape)}
    start = {"zero_data": True} if state.initial is None else {"data_file": state.input}
    return {
        "input_name": state.input,
        "output_name": state.output,
        **kind,
        "initial_state": [{"name": state.input, **kind, **start}],
    }


def _write_model(found: Folder, folder: Path, length: int | None) -> ImplicitStep:
    """Write the graph, its weights and the initial values of its states."""
    shutil.rmtree(folder, ignore_errors=True)
    bundle = read_bundle(found)
    step, version = implicit_step(bundle, length), folder / VERSION
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(step.data)
    _copy_weights(bundle, version / bundle.manifest.weights)
    for state in step.states:
        if state.initial is not None:
            (folder / "initial_state").mkdir(exist_ok=True)
            (folder / "initial_state" / state.input).write_bytes(state.initial)
    return step


def _copy_weights(bundle: Bundle, place: Path) -> None:
    """Copy the weight file, and hold the copy against the manifest."""
    name, digest = bundle.manifest.weights, hashlib.sha256()
    with bundle.folder.open(name) as (file, _), place.open("wb") as copy:
        while piece := file.read(1 << 20):
            digest.update(piece)
            copy.write(piece)
    if digest.hexdigest() != bundle.manifest.files[name].sha256:
        raise BundleError(
            f"{bundle.file(name)}: was altered while it was copied, expected it to stay; package it again"
        )
