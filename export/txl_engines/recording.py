"""Records in the sidecars of a bundle's engines which checks they passed, and on which device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from txl_runtime.bundle.engines.sidecar import TARGETS, Target, engine_path, read_sidecar, sidecar_path
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.errors import TxlError
from txl_runtime.model import Model

from txl_engines.publishing import staging


def record_pass(model: Model) -> tuple[str, ...]:
    """Record that a model's engines passed the self-test on its device.

    Returns:
        The names of the engines' programs; () if the model runs on the CPU.

    Raises:
        TxlError: the bundle cannot be written to.
    """
    backend = model.backend
    if not isinstance(backend, DeviceBackend):
        return ()
    programs = tuple(backend.executables)  # engines of every B, because the self-test runs all
    target = next(target for target in TARGETS if target == backend.name)
    record_verification(model.bundle.path, target, programs, f"self-test on {backend.device.title}")
    return programs


def record_verification(path: str | Path, target: Target, programs: Sequence[str], where: str) -> None:
    """Record in the sidecars of engines that they passed a check; an existing note is not repeated.

    `target` is the backend that ran the engines; `where` is the check and the device: "self-test on Orin, SM 87".

    Raises:
        TxlError: an engine is missing, or the bundle cannot be written to.
    """
    bundle = open_bundle(path, verify_files=False)
    notes = {}
    for program in programs:
        name = sidecar_path(engine_path(target, program))
        if name not in bundle.manifest.files:
            raise TxlError(
                f"{bundle.path}: has no engine of {program!r} for {target}, expected one; check the name, or build it"
            )
        sidecar = read_sidecar(bundle.file(name))
        if where not in sidecar.verified_on:
            notes[name] = msgspec.structs.replace(sidecar, verified_on=(*sidecar.verified_on, where))
    if notes:
        with staging(bundle.path) as stage:
            for name, sidecar in notes.items():
                stage.place(name, msgspec.json.format(msgspec.json.encode(sidecar)))
            stage.publish()
