"""Every program of a bundle → engines beside them, listed in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.bundle.tables import UPDATE_RULES, Program
from txl_runtime.device.engines.facts import MODULES, TARGETS, Facts, Target
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.device.engines.sidecar import (
    Identity,
    Sidecar,
    differences,
    engine_path,
    is_intact,
    read_sidecar,
    sidecar_path,
)
from txl_runtime.device.gpu import gpu_name, platform_name
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError
from txl_runtime.listener import Listener, Silent

from txl_engines.building import (
    Ask,
    build_graph,
    check_gpus,
    check_precision,
    ring_works,
)
from txl_engines.checking import Graph, read_graph
from txl_engines.composing import compose, whole_programs
from txl_engines.publishing import Staging, staging

__all__ = [
    "BundleBuild",
    "EngineResult",
    "build_bundle",
    "choose_update",
    "identity_of",
    "record_verification",
]


@dataclass(frozen=True)
class EngineResult:
    """One program's engine: its file in the bundle, its facts, and whether it was there already."""

    program: str
    file: str
    sidecar: Sidecar
    reused: bool


@dataclass(frozen=True)
class BundleBuild:
    """What a build made."""

    bundle: Path
    target: Target
    library: str
    update: str
    engines: tuple[EngineResult, ...]


def build_bundle(
    path: str | Path,
    target: str,
    gpus: Sequence[int] = (),
    update: str | None = None,
    force: bool = False,
    listener: Listener | None = None,
) -> BundleBuild:
    """Build the engines of a bundle that are not there yet.

    Args:
        path: the bundle.
        target: "rtx" or "tensorrt".
        gpus: compute capabilities, e.g. (86, 89, 120), for rtx; empty for its default list.
        update: "ring" or "rolled"; None for the better one that library and bundle have.
        force: build again what is there.
        listener: hears of progress and warnings.

    Raises:
        TxlError: it cannot be done; the bundle is as it was.
        KeyboardInterrupt: somebody asked to stop; the bundle is as it was.
    """
    known = _target(target)
    listener = listener or Silent()
    bundle = open_bundle(path)
    precision: str = bundle.manifest.precision
    if precision in ("int8", "int4"):
        raise _named(bundle, precision)
    library = load_library(known)
    check_precision(precision, library.facts, library.title)
    ask = Ask(library, precision, check_gpus(gpus, precision, library))
    rule = choose_update(bundle.manifest.updates, update, library.facts, library.title)
    with staging(bundle.path) as stage:
        engines = []
        for program in whole_programs(bundle.manifest, rule):
            graph = _graph(bundle, program, library)
            identity = identity_of(bundle, program, graph, ask)
            there = None if force else _reusable(bundle, program, identity, known, listener)
            if there is not None:
                _list_again(stage, bundle, program, known)
            sidecar = there or _build(stage, program, graph, identity, ask, listener)
            engines.append(EngineResult(program.name, engine_path(known, program.name), sidecar, there is not None))
        stage.publish()
    return BundleBuild(bundle.path, known, library.title, rule, tuple(engines))


def choose_update(held: Sequence[str], update: str | None, facts: Facts, title: str) -> str:
    """The update rule of all engines of a bundle, since they share memory: the better one that it and the library have.

    Args:
        held: the bundle's update rules.
        update: what was asked for, if anything.
        facts, title: the library's.

    Raises:
        UsageError: the rule that was asked for is unknown or not in the bundle.
        BackendError: the library does not have it.
    """
    if update is not None and update not in UPDATE_RULES:
        raise UsageError(f"--update is {update!r}, expected {' or '.join(UPDATE_RULES)}")
    if update == "ring" and not ring_works(facts):
        raise BackendError(
            f"--update is ring, which {title} cannot do in place, expected TensorRT 10.15 or TensorRT-RTX; "
            "use --update rolled"
        )
    if update is not None and update not in held:
        raise UsageError(
            f"--update is {update}, but the bundle's programs are {', '.join(held)}; leave --update out or export again"
        )
    usable = [rule for rule in UPDATE_RULES if rule in held and (rule == "rolled" or ring_works(facts))]
    if not usable:
        raise BackendError(
            f"the bundle's programs are {', '.join(held)}, expected an update rule that {title} has; "
            "export the model again"
        )
    return update or usable[0]


def identity_of(bundle: Bundle, program: Program, graph: Graph, ask: Ask) -> Identity:
    """What the engine of a program is made from, here and now."""
    library = ask.library
    return Identity(
        flavour=MODULES[library.target],
        version=library.version,
        compute_capabilities=ask.gpus,
        device=None if library.facts.portable else gpu_name(),
        platform=platform_name(),
        program=program.name,
        kind=program.kind,
        segment_length=program.segment_length,
        update=program.update,
        precision=ask.precision,
        inputs=program.inputs,
        outputs=program.outputs,
        onnx=graph.sha256,
        weights=graph.weights,
    )


def _target(name: str) -> Target:
    for known in TARGETS:
        if name == known:
            return known
    raise UsageError(f"--target is {name!r}, expected {' or '.join(TARGETS)}")


def _named(bundle: Bundle, precision: str) -> UsageError:
    return UsageError(
        f"{bundle.path}: its precision is {precision}, which is for the CPU, expected fp32, fp16 or bf16; "
        "export it again with --precision fp16"
    )


def _graph(bundle: Bundle, program: Program, library: Library) -> Graph:
    hashes = {name: record.sha256 for name, record in bundle.manifest.files.items()}
    return read_graph(compose(bundle, program), program, library.facts, folder=bundle.path, hashes=hashes)


def _reusable(
    bundle: Bundle, program: Program, identity: Identity, target: Target, listener: Listener
) -> Sidecar | None:
    """The facts of an engine that is there and is the one wanted; else why it is not is told."""
    name = engine_path(target, program.name)
    path = bundle.file(name)
    if not path.exists():
        return None
    try:
        sidecar = read_sidecar(bundle.file(sidecar_path(name)))
    except BundleError as error:
        listener.warn(f"{error}; built again")
        return None
    reasons = differences(sidecar.identity, identity)
    if not reasons and not is_intact(path, sidecar):
        reasons = ["is not the file its sidecar describes"]
    for reason in reasons:
        listener.warn(f"{name} {reason}; built again")
    return None if reasons else sidecar


def _list_again(stage: Staging, bundle: Bundle, program: Program, target: Target) -> None:
    """An engine that a killed build left unlisted is good; the manifest only has to hear of it."""
    name = engine_path(target, program.name)
    for file in (name, sidecar_path(name)):
        if file not in bundle.manifest.files:
            stage.place(file, bundle.file(file).read_bytes())


def _build(stage: Staging, program: Program, graph: Graph, identity: Identity, ask: Ask, listener: Listener) -> Sidecar:
    """Build an engine on its way into the bundle, and write its facts beside it."""
    name = engine_path(ask.library.target, program.name)
    made = build_graph(graph, program, ask, stage.reserve(name), listener)
    sidecar = Sidecar(
        key=identity.key,
        identity=identity,
        sha256=made.sha256,
        bytes=made.bytes,
        seconds=made.seconds,
        kernels=made.layers.kernels,
        layers=made.layers.rows,
        attention_layers=graph.attention_layers,
        fused_attention=made.layers.fused_attention,
        fused_kernels=made.layers.fused,
        in_place=made.in_place,
        verified_on=made.verified,
    )
    stage.place(sidecar_path(name), msgspec.json.format(msgspec.json.encode(sidecar)))
    return sidecar


def record_verification(path: str | Path, target: Target, program: str, where: str) -> None:
    """Note in an engine's sidecar that it was verified somewhere; told twice, noted once.

    Raises:
        TxlError: there is no such engine, or the bundle cannot be written.
    """
    bundle = open_bundle(path, verify_files=False)
    name = sidecar_path(engine_path(target, program))
    if name not in bundle.manifest.files:
        raise TxlError(
            f"{bundle.path}: has no engine of {program!r} for {target}, expected one; check the name, or build it"
        )
    sidecar = read_sidecar(bundle.file(name))
    if where in sidecar.verified_on:
        return
    noted = msgspec.structs.replace(sidecar, verified_on=(*sidecar.verified_on, where))
    with staging(bundle.path) as stage:
        stage.place(name, msgspec.json.format(msgspec.json.encode(noted)))
        stage.publish()
