"""Which engines of a bundle can run here, said before any library is touched; and what RTX compiled at first use.

TensorRT-RTX compiles kernels for the GPU when an engine is first run. What came of it is kept beside the bundle, in
BUNDLE.rtx-cache, one file per engine; a cache that does not fit is ignored by the library.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

import msgspec

from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.device.engines.facts import MODULES, Target
from txl_runtime.device.engines.reading import bundle_engines
from txl_runtime.device.engines.sidecar import Identity, Sidecar, differences
from txl_runtime.device.gpu import gpu_name, platform_name
from txl_runtime.errors import BackendError

__all__ = ["EngineFile", "cache_file", "check_identity", "find_engines", "read_cache", "write_cache"]

DEFAULT_GPUS = 80
"""Without a list, RTX engines are for compute capability 8.0 and newer."""


class EngineFile(msgspec.Struct, frozen=True):
    """An engine in a bundle: its name there, its facts, and its program."""

    name: str
    sidecar: Sidecar
    program: Program


def find_engines(bundle: Bundle, target: Target, update: str | None = None) -> list[EngineFile]:
    """The engines of a target, of one update rule: the one asked for, or the ring where there are both.

    Raises:
        BackendError: there are none.
    """
    found = [
        EngineFile(name, sidecar, program_of(sidecar.identity))
        for name, sidecar in bundle_engines(bundle)
        if name.startswith(f"engines/{target}/")
    ]
    rules = {engine.program.update for engine in found}
    rule = update or ("ring" if "ring" in rules else "rolled")
    chosen = [engine for engine in found if engine.program.update == rule]
    if not chosen:
        has = (
            f"has {target} engines of {', '.join(sorted(rules))} memory alone" if rules else f"has no {target} engines"
        )
        more = f" --update {update}" if update else ""
        raise BackendError(
            f"{bundle.path}: {has}, expected them for --backend {target}; "
            f"txl-deploy build {bundle.path} --target {target}{more}"
        )
    return chosen


def program_of(identity: Identity) -> Program:
    """The program an engine was built of."""
    return Program(
        name=identity.program,
        kind=identity.kind,
        segment_length=identity.segment_length,
        update=identity.update,
        file="",
        inputs=identity.inputs,
        outputs=identity.outputs,
    )


def check_identity(bundle: Bundle, engine: EngineFile, version: str, target: Target) -> None:
    """An engine has to be of this bundle, this library, this platform and this GPU.

    Raises:
        BackendError: it is not; every difference is named.
    """
    found, files = engine.sidecar.identity, bundle.manifest.files
    graph = files.get(f"{found.program}.onnx")
    wanted = msgspec.structs.replace(
        found,
        flavour=MODULES[target],
        version=version,
        platform=platform_name(),
        precision=bundle.manifest.precision,
        device=found.device if found.device is None else gpu_name(),
        onnx=found.onnx if graph is None else graph.sha256,
        weights={name: files[name].sha256 for name in found.weights if name in files},
    )
    reasons = differences(found, wanted)
    here = compute_capability(gpu_name())
    built_for = found.compute_capabilities
    if found.device is None and here is not None and not (here in built_for if built_for else here >= DEFAULT_GPUS):
        listed = f"SM {', '.join(map(str, built_for))}" if built_for else f"SM {DEFAULT_GPUS} and newer"
        reasons.append(f"was built for {listed}, the GPU here is SM {here}")
    if reasons:
        raise BackendError(
            f"{bundle.path / engine.name}: {'; '.join(reasons)}; "
            f"txl-deploy build {bundle.path} --target {target} builds it again"
        )


def compute_capability(gpu: str | None) -> int | None:
    """86 of "…, SM 86"."""
    found = re.search(r"SM (\d+)$", gpu or "")
    return int(found[1]) if found else None


def cache_file(bundle: Bundle, engine: EngineFile) -> Path:
    """Where what RTX compiled for an engine is kept: its key is in the name, so that another one's is not read."""
    folder = bundle.path.with_name(f"{bundle.path.name}.rtx-cache")
    return folder / f"{engine.program.name}-{engine.sidecar.key[:16]}.cache"


def read_cache(path: Path) -> bytes | None:
    """The cache, if there is one."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def write_cache(path: Path, data: bytes) -> bool:
    """Write a cache in one step; whether it could be: a read-only place only makes the next start slower."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return True
