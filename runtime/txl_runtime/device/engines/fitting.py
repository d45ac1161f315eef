"""The check that a bundle's engines can run on this machine, without loading a library."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from txl_runtime.bundle.engines.files import EngineFile, find_engines
from txl_runtime.bundle.engines.sidecar import ANYWHERE, FLAVOURS, Target, differences
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import UPDATE_RULES
from txl_runtime.device.gpu import gpu_model, gpu_name, platform_name
from txl_runtime.errors import BackendError, BundleError

DEFAULT_GPUS = 80
"""Oldest GPU, as ten times its compute capability, of RTX engines that were built without a list of GPUs: 8.0."""


def checked_engines(
    bundle: Bundle, target: Target, version: str, update: str | None = None, usable: Sequence[str] = UPDATE_RULES
) -> list[EngineFile]:
    """Return the engines of `find_engines` after checking that each was made for this bundle, library and machine.

    `version` is the version of the library that will run the engines; the other arguments are those of `find_engines`.

    Raises:
        BackendError: there are no engines, or an engine was made for a different bundle, library or machine.
        BundleError: a file is missing or altered.
    """
    engines = find_engines(bundle, target, update, usable)
    for engine in engines:
        check_identity(bundle, engine, version, target)
        bundle.check(engine.name)
        if bundle.manifest.files[engine.name].sha256 != engine.sidecar.sha256:
            advice = f"txl-deploy build {bundle.path} --target {target} --force"
            raise BundleError(f"{bundle.file(engine.name)}: is not the file that its sidecar describes; {advice}")
    return engines


def check_identity(bundle: Bundle, engine: EngineFile, version: str, target: Target) -> None:
    """Compare an engine with this bundle, the installed library, this platform and this GPU.

    NVIDIA says that TensorRT-RTX's engines run on any operating system; the library itself checks an engine's header.

    Raises:
        BackendError: the engine differs; the message names every difference.
    """
    identity, files = engine.sidecar.identity, bundle.manifest.files
    whole = {program.name: program.file for program in bundle.manifest.programs if not program.open_batch}
    graph = files.get(whole.get(identity.program, ""))  # None if the engine was built from a composed graph
    wanted = msgspec.structs.replace(
        identity,
        flavour=FLAVOURS[target],
        version=version,
        platform=platform_name() if target == "tensorrt" else ANYWHERE,
        precision=bundle.manifest.precision,
        device=identity.device if identity.device is None else gpu_model(),
        onnx=identity.onnx if graph is None else graph.sha256,
        weights={name: files[name].sha256 for name in identity.weights if name in files},
    )
    reasons = differences(identity, wanted)
    if target != "cuda" and identity.device is None:
        reasons += _unfit_for(identity.compute_capabilities)
    if reasons:
        raise BackendError(
            f"{bundle.path / engine.name}: {'; '.join(reasons)}; "
            f"txl-deploy build {bundle.path} --target {target} builds it again"
        )


def _unfit_for(built_for: Sequence[int]) -> list[str]:
    match = re.search(r"SM (\d+)$", gpu_name() or "")
    here = int(match[1]) if match else None
    if here is None or (here in built_for if built_for else here >= DEFAULT_GPUS):
        return []
    listed = f"SM {', '.join(map(str, built_for))}" if built_for else f"SM {DEFAULT_GPUS} and newer"
    return [f"was built for {listed}, the GPU here is SM {here}"]
