"""Which engines of a bundle can run on this machine, found out before any library is touched."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import UPDATE_RULES, Program
from txl_runtime.device.engines.reading import bundle_engines
from txl_runtime.device.engines.sidecar import (
    ANYWHERE,
    FLAVOURS,
    Identity,
    Sidecar,
    Target,
    differences,
    sidecar_path,
)
from txl_runtime.device.gpu import gpu_name, platform_name
from txl_runtime.errors import BackendError, BundleError

DEFAULT_GPUS = 80
"""RTX engines that were built without a list of GPUs are for compute capability 8.0 and newer."""


class EngineFile(msgspec.Struct, frozen=True):
    """An engine in a bundle: the name of its file there, its facts, and its program."""

    name: str
    sidecar: Sidecar
    program: Program


def checked_engines(
    bundle: Bundle,
    target: Target,
    version: str,
    update: str | None = None,
    usable: Sequence[str] = UPDATE_RULES,
) -> list[EngineFile]:
    """The engines that `find_engines` finds, each of them checked: it was made for this bundle, library and machine.

    Args:
        bundle: whose engines.
        target: the backend that asks.
        version: of the library that will run them.
        update, usable: see `find_engines`.

    Raises:
        BackendError: there are none, or one is for something else.
        BundleError: a file is missing or altered.
    """
    found = find_engines(bundle, target, update, usable)
    for engine in found:
        check_identity(bundle, engine, version, target)
        bundle.check(engine.name)
        bundle.check(sidecar_path(engine.name))
        if bundle.manifest.files[engine.name].sha256 != engine.sidecar.sha256:
            advice = f"txl-deploy build {bundle.path} --target {target} --force"
            raise BundleError(f"{bundle.file(engine.name)}: is not the file that its sidecar describes; {advice}")
    return found


def find_engines(
    bundle: Bundle, target: Target, update: str | None = None, usable: Sequence[str] = UPDATE_RULES
) -> list[EngineFile]:
    """The engines of a target and of one update rule.

    Args:
        bundle: whose engines.
        target: the backend that asks.
        update: the rule that is wanted; None for the first of `usable` that there are engines of.
        usable: the rules that the target's library can run here, the best first.

    Raises:
        BackendError: there are none.
    """
    found = [
        EngineFile(name, sidecar, program_of(sidecar.identity))
        for name, sidecar in bundle_engines(bundle)
        if name.startswith(f"engines/{target}/")
    ]
    rules = {engine.program.update for engine in found}
    rule = update or next((rule for rule in usable if rule in rules), usable[0])
    chosen = [engine for engine in found if engine.program.update == rule]
    if not chosen:
        has = (
            f"has {target} engines of {', '.join(sorted(rules))} memory alone" if rules else f"has no {target} engines"
        )
        more = f" --update {rule}" if rules or update else ""
        raise BackendError(
            f"{bundle.path}: {has}, expected them for --backend {target}; "
            f"txl-deploy build {bundle.path} --target {target}{more}"
        )
    return chosen


def program_of(identity: Identity) -> Program:
    """The program that an engine was built of."""
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
    """Hold an engine against this bundle, the library that is installed, this platform and this GPU.

    Raises:
        BackendError: it was made for something else; every difference is named.
    """
    found, files = engine.sidecar.identity, bundle.manifest.files
    graph = files.get(f"{found.program}.onnx")
    wanted = msgspec.structs.replace(
        found,
        flavour=FLAVOURS[target],
        version=version,
        platform=ANYWHERE if target == "cuda" else platform_name(),
        precision=bundle.manifest.precision,
        device=found.device if found.device is None else gpu_name(),
        onnx=found.onnx if graph is None else graph.sha256,
        weights={name: files[name].sha256 for name in found.weights if name in files},
    )
    reasons = differences(found, wanted)
    if target != "cuda" and found.device is None:
        reasons += _unfit_for(compute_capability(gpu_name()), found.compute_capabilities)
    if reasons:
        raise BackendError(
            f"{bundle.path / engine.name}: {'; '.join(reasons)}; "
            f"txl-deploy build {bundle.path} --target {target} builds it again"
        )


def _unfit_for(here: int | None, built_for: Sequence[int]) -> list[str]:
    if here is None or (here in built_for if built_for else here >= DEFAULT_GPUS):
        return []
    listed = f"SM {', '.join(map(str, built_for))}" if built_for else f"SM {DEFAULT_GPUS} and newer"
    return [f"was built for {listed}, the GPU here is SM {here}"]


def compute_capability(gpu: str | None) -> int | None:
    """86 of "…, SM 86"."""
    found = re.search(r"SM (\d+)$", gpu or "")
    return int(found[1]) if found else None
