"""Builds the programs of a bundle into engines, which become files of the bundle, listed in the manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from txl_runtime.bundle.engines.files import engine_names
from txl_runtime.bundle.engines.sidecar import (
    FLAVOURS,
    Identity,
    Rounding,
    Sidecar,
    Target,
    differences,
    engine_path,
    held_weights,
    is_intact,
    read_sidecar,
    sidecar_path,
)
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.bundle.tables import UPDATE_RULES, Program
from txl_runtime.device.choosing import precision_problem
from txl_runtime.errors import BackendError, BundleError, UsageError
from txl_runtime.listener import Listener, Silent

from txl_engines.attention_operator import POSITIONS
from txl_engines.building import Maker, open_maker
from txl_engines.checking import Graph
from txl_engines.composing import SHORT_ROW, compose, whole_programs
from txl_engines.given_weights import LEAST_BYTES
from txl_engines.publishing import Staging, staging
from txl_engines.rounded_weights import LEAST, Judge, check_rounding, rounded_copy

EXPORT_AGAIN = "export it again with --precision fp16"
SMALLER = f"{EXPORT_AGAIN}, and give --precision int8 to this build"


@dataclass(frozen=True)
class EngineResult:
    """One program's engine: its file in the bundle, its facts, and whether an earlier build made it."""

    program: str
    file: str
    sidecar: Sidecar
    reused: bool


@dataclass(frozen=True)
class BundleBuild:
    """The engines of one build, and the library that made them.

    Attributes:
        weight_bytes: bytes of weights that all engines together hold on a device.
        shared_weight_bytes: bytes of these weights that all engines share.
    """

    bundle: Path
    target: Target
    library: str
    update: str
    engines: tuple[EngineResult, ...]
    weight_bytes: int
    shared_weight_bytes: int


def build_bundle(
    path: str | Path,
    target: str,
    gpus: Sequence[int] = (),
    update: str | None = None,
    force: bool = False,
    kinds: Sequence[str] | None = None,
    listener: Listener | None = None,
    weights: Literal["once", "each"] | None = None,
    rounding: tuple[Rounding, Judge] | None = None,
) -> BundleBuild:
    """Build the missing or outdated engines of a bundle.

    Args:
        path: the bundle.
        target: "rtx", "tensorrt" or "cuda".
        gpus: compute capabilities, e.g. (86, 89, 120), for rtx; empty for its default list.
        update: "ring" or "rolled"; None for the better rule that both target and bundle support (a step's "replace" is
            its only rule).
        force: build existing engines again.
        kinds: kinds of programs, e.g. ("logprobs",); None for all. The runtime falls back to log-probabilities for
            missing kinds. Engines of the same target and rule but a different kind are removed.
        listener: receives progress and warnings.
        weights: "once": the engines read large weights from one copy on the device. "each": every engine holds its own
            copy. None: "once" if the target can share and there are several programs.
        rounding: the precision to which matrices are rounded, and the function that judges a copy of the bundle with
            these matrices; it is called unless all engines exist already. None for the bundle's own precision. A
            target's engines have one precision.

    Raises:
        TxlError: the build is impossible; the bundle is unchanged.
        KeyboardInterrupt: the user pressed Ctrl-C; the bundle is unchanged.
    """
    listener = listener or Silent()
    bundle = open_bundle(path)
    precision = bundle.manifest.precision
    if problem := precision_problem(precision):
        raise UsageError(f"{bundle.path}: {problem}; {SMALLER if target == 'rtx' else EXPORT_AGAIN}")
    to = rounding[0] if rounding else None
    if to:
        check_rounding(bundle.manifest, to, target, str(bundle.path))
    positions = min(bundle.manifest.stepwise or 1, POSITIONS)  # drafts run only segments that equal single steps
    maker = open_maker(target, precision, gpus, to, positions)
    rule = choose_update(bundle.manifest.updates, update, maker.ring, maker.title)
    hashes = {name: record.sha256 for name, record in bundle.manifest.files.items()}
    programs = choose_programs(whole_programs(bundle.manifest, rule), kinds)
    shared = bundle.manifest.weights if choose_weights(weights, maker, rule, len(programs)) == "once" else ""
    with staging(bundle.path) as stage:
        engines, facts = list[EngineResult](), dict[str, Any]()
        graphs = [maker.read(compose(bundle, program), program, bundle.path, hashes, shared) for program in programs]
        identities = [_identity(*pair, precision, maker) for pair in zip(programs, graphs, strict=True)]
        names = [engine_path(maker.target, program.name) for program in programs]
        pairs = zip(names, identities, strict=True)
        existing = [None if force else _reusable(bundle, *pair, listener) for pair in pairs]
        if rounding and None in existing:
            facts = _judged(bundle, graphs, *rounding)
        for program, graph, identity, name, there in zip(programs, graphs, identities, names, existing, strict=True):
            if there is not None:
                _list_again(stage, bundle, name)
            sidecar = there or _make(stage, name, program, graph, identity, maker, listener, facts)
            engines.append(EngineResult(program.name, name, sidecar, there is not None))
        for name in _others(bundle, target, rule, [engine.file for engine in engines], to or ""):
            listener.warn(f"{name} is not among the programs of this build; removed (--programs all builds all)")
            stage.drop(name)
            stage.drop(sidecar_path(name))
        stage.publish()
    held = held_weights([engine.sidecar for engine in engines], bundle.manifest.weight_bytes)
    if weights == "once" and not held[1]:
        listener.warn(f"no weight is of {LEAST_BYTES} bytes and read in a way that is shared, so each engine holds all")
    return BundleBuild(bundle.path, maker.target, maker.title, rule, tuple(engines), *held)


def default_kinds(manifest: Manifest) -> tuple[str, ...] | None:
    """Return the kinds of programs that `txl-deploy build` makes by default; None for all.

    Each engine takes time to build and load, and on most targets holds a copy of the weights. If a row of
    log-probabilities is short, engines that only save fetching the row are left out.
    """
    steps = any(program.kind == "step" for program in manifest.programs)
    return None if steps or manifest.vocab_size > SHORT_ROW else ("logprobs",)


def choose_programs(programs: Sequence[Program], kinds: Sequence[str] | None) -> tuple[Program, ...]:
    """Return the programs of some kinds; all of them if `kinds` is None.

    Raises:
        UsageError: the bundle lacks a kind, or `kinds` lacks the kind that the runtime falls back to.
    """
    if kinds is None:
        return tuple(programs)
    held, needed = dict.fromkeys(program.kind for program in programs), programs[0].kind
    if unknown := [kind for kind in kinds if kind not in held]:
        raise UsageError(f"--programs holds {', '.join(unknown)}, the bundle has {', '.join(held)}; name some of these")
    if needed not in kinds:
        raise UsageError(
            f"--programs is {', '.join(kinds)}, expected {needed} among them, which does what other engines are not "
            f"there for; add {needed}"
        )
    return tuple(program for program in programs if program.kind in kinds)


def choose_update(held: Sequence[str], update: str | None, ring: bool, title: str) -> str:
    """Choose the update rule of all engines of a bundle, which share one memory.

    Args:
        held: the rules of the bundle's programs.
        update: the user's choice; None for the best that bundle and engines support.
        ring: whether the engines can update a ring in place.
        title: the engines' maker, for messages.

    Raises:
        UsageError: `update` is unknown or not in the bundle.
        BackendError: the engines do not support the rule.
    """
    if update is not None and update not in UPDATE_RULES:
        raise UsageError(f"--update is {update!r}, expected ring or rolled")
    if update is not None and "replace" in held and update not in held:
        raise UsageError(
            f"--update is {update}, but the steps of this bundle return their whole state (replace); leave --update out"
        )
    if update == "ring" and not ring:
        raise BackendError(
            f"--update is ring, which {title} cannot do in place, expected TensorRT 10.15 or TensorRT-RTX; "
            "use --update rolled"
        )
    if update is not None and update not in held:
        raise UsageError(
            f"--update is {update}, but the bundle's programs are {', '.join(held)}; leave --update out or export again"
        )
    usable = [rule for rule in UPDATE_RULES if rule in held and (rule != "ring" or ring)]
    if not usable:
        raise BackendError(
            f"the bundle's programs are {', '.join(held)}, expected an update rule that {title} has; "
            "export the model again"
        )
    return update or usable[0]


def choose_weights(
    weights: Literal["once", "each"] | None, maker: Maker, rule: str, programs: int
) -> Literal["once", "each"]:
    """Decide whether engines share weights: "once" if sharing saves memory, unless `weights` is "each".

    With the rolled update rule it saves no memory: each step copies every matrix that is not in the engine.

    Raises:
        UsageError: `weights` is "once", and the engines cannot share.
    """
    able = maker.shares and rule != "rolled"
    if weights == "once" and not able:
        raise UsageError(
            f"--weights is once, but engines of {rule} memory by {maker.title} hold their own, expected --target rtx "
            "and another memory than rolled; leave --weights out"
        )
    return weights or ("once" if able and programs > 1 else "each")


def _identity(program: Program, graph: Graph, precision: str, maker: Maker) -> Identity:
    """Return everything that determines a program's engine on this machine."""
    return Identity(
        flavour=FLAVOURS[maker.target],
        version=maker.version,
        compute_capabilities=maker.gpus,
        device=maker.device,
        platform=maker.platform,
        program=program.name,
        kind=program.kind,
        segment_length=program.segment_length,
        update=program.update,
        precision=precision,
        inputs=program.inputs,
        outputs=program.outputs,
        onnx=graph.sha256,
        weights=graph.weights,
        recipe=maker.recipe,
        given=graph.given,
        rounding=maker.rounding or "",
    )


def _reusable(bundle: Bundle, name: str, identity: Identity, listener: Listener) -> Sidecar | None:
    """Return the facts of an existing engine if it is up to date; else warn why it is not, and return None."""
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


def _judged(bundle: Bundle, graphs: Sequence[Graph], rounding: Rounding, judge: Judge) -> dict[str, Any]:
    """Make a copy of the bundle with rounded matrices and have it judged; return the findings, fields of `Sidecar`.

    Raises:
        UsageError: no matrix is rounded.
        CheckError: the copy is further from the bundle than the ladder allows.
    """
    places = dict.fromkeys(place for graph in graphs for place in graph.rounded)
    if not places:
        raise UsageError(
            f"{bundle.path}: has no matrix of {LEAST} bytes that products alone read, expected one for --precision "
            f"{rounding}; leave it out"
        )
    with rounded_copy(bundle, places, rounding) as copy:
        return judge(copy)._asdict()


def _others(bundle: Bundle, target: str, rule: str, built: Collection[str], rounding: str) -> list[str]:
    """Return the target's engines that become outdated: all that this build did not make, except engines of a different
    update rule in the same precision.
    """
    engines = []
    for name in engine_names(bundle):
        if name.startswith(f"engines/{target}/") and name not in built:
            with contextlib.suppress(BundleError):
                identity = read_sidecar(bundle.file(sidecar_path(name))).identity
                if identity.update != rule and identity.rounding == rounding:
                    continue
            engines.append(name)
    return engines


def _list_again(stage: Staging, bundle: Bundle, name: str) -> None:
    """List in the manifest a good engine that a killed build left unlisted."""
    for file in (name, sidecar_path(name)):
        if file not in bundle.manifest.files:
            stage.place(file, bundle.file(file).read_bytes())


def _make(
    stage: Staging,
    name: str,
    program: Program,
    graph: Graph,
    identity: Identity,
    maker: Maker,
    listener: Listener,
    facts: Mapping[str, Any],
) -> Sidecar:
    """Make an engine in the staging folder, and write its sidecar with the given facts."""
    built = maker.make(graph, program, stage.reserve(name), listener)
    sidecar = Sidecar(
        key=identity.key,
        identity=identity,
        sha256=built.sha256,
        bytes=built.bytes,
        seconds=built.seconds,
        weight_bytes=graph.weight_bytes,
        saved_bytes=graph.saved_bytes,
        kernels=built.layers.kernels,
        layers=built.layers.rows,
        attention_layers=graph.attention_layers,
        fused_attention=built.layers.fused_attention,
        fused_kernels=built.layers.fused,
        in_place=built.in_place,
        read_in_place=built.layers.read_in_place,
        copying=built.layers.copying,
        verified_on=built.verified,
        **facts,
    )
    stage.place(sidecar_path(name), msgspec.json.format(msgspec.json.encode(sidecar)))
    return sidecar
