"""A foreign ONNX file as a family: from the file to a bundle, and a bundle against the file itself.

The functions are those of `families.registry.Family`. What stands for the file is a module (`stepping.FileModule`), so
that plan, proof and writing are those of a model of the user's own.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from txl_runtime.bundle.tables import Precision
from txl_runtime.errors import BackendError, UsageError, some
from txl_runtime.listener import Listener
from txl_runtime.model import load as load_bundle

from txl_export.families.graph.capturing import capturing
from txl_export.families.graph.chaining import check_opened, divisible
from txl_export.families.graph.fixing import fix, lengthen, load, save
from txl_export.families.graph.hidden import Hidden, open_hidden
from txl_export.families.graph.leapp import is_leapp, read_leapp
from txl_export.families.graph.reading import Foreign, read_foreign
from txl_export.families.graph.running import EndedError, RunError, Runner
from txl_export.families.graph.stepping import (
    NONE,
    Call,
    Choices,
    FileModule,
    FileStep,
    caller,
    find_step,
    segment_axes,
)
from txl_export.families.own_module.family import FOR_CHECKPOINTS, PreparedStep, with_data
from txl_export.families.own_module.plan import Plan, make_plan
from txl_export.families.own_module.spec import StepSpec
from txl_export.families.own_module.verifying import check_same_module, replay_vectors, verify_step
from txl_export.families.registry import VerifyRequest
from txl_export.graphs.emulation import EMULATED, runnable
from txl_export.graphs.quantising import QUANTISED
from txl_export.graphs.shared_weights import read_weight_file
from txl_export.options import ExportOptions
from txl_export.proof.input_source import read_samples
from txl_export.proof.parity import Parity
from txl_export.proof.threads import engine_threads

SECONDS = 3600.0
"""That all runs of the file and all folding of its graph may take."""
SOURCE = "the file itself"


@dataclass
class Taken:
    """A file that was taken over as a step.

    Attributes:
        foreign: the file.
        path: of its graph with settings fixed, constants folded and hidden states open.
        step: what that takes and returns.
        module: that stands for it.
        runner: folds graphs.
        whole: runs the file itself; of one with hidden states, over any number of positions.
        opened: the states that were hidden.
    """

    foreign: Foreign
    path: Path
    step: FileStep
    module: FileModule
    runner: Runner
    whole: Call
    opened: tuple[str, ...]

    @property
    def spec(self) -> StepSpec:
        """The step's specification."""
        return self.step.spec(self.module)


def prepare(source: str | Path, options: ExportOptions, heard: Listener) -> PreparedStep:
    """See `Family`."""
    options.refuse((*FOR_CHECKPOINTS, "config", "weights", "growth"), "a model in PyTorch, and this is an ONNX file")
    if options.precision in QUANTISED:
        raise UsageError(
            f"precision is {options.precision}, which is for a Transformer-XL's matrices, expected fp32, fp16 or bf16 "
            "for an ONNX file; check --precision"
        )
    leapp = read_leapp(Path(source)) if is_leapp(Path(source)) else None
    initial = read_samples(Path(options.initial)) if isinstance(options.initial, str | Path) else options.initial
    states = {**(leapp.states if leapp else {}), **(options.states or {})}
    initial = {**(leapp.initial if leapp else {}), **(initial or {})}
    choices = Choices(states, options.fix or {}, options.open, initial, options.batch_axes or {})
    taken = take(leapp.path if leapp else Path(source), choices, heard)
    asked = options.batch_sizes if options.batch_size != () else (taken.step.sequences or 1,)
    spec, vocabulary = with_data(taken.spec, options)
    plan = planned(taken, spec, asked, options.segment_lengths, heard)
    family = {
        "name": "graph",
        "file": taken.foreign.path.name,
        "sha256": hashlib.sha256(taken.foreign.path.read_bytes()).hexdigest(),
        "states": {name: output for name, output in states.items() if not output}
        | {side.port: output for side, output in taken.step.states if side.port in taken.step.shown},
        "fix": {name: np.asarray(value).tolist() for name, value in choices.fix.items()},
        "rate": leapp and leapp.rate,
        "open": choices.open,
        "initial": {
            side.port: f"initial.{side.spec.name}" for side, _ in taken.step.states if side.port in choices.initial
        },
        "batch_axes": dict(choices.batch_axes),
        "opened": some([*taken.opened]) if taken.opened else "",
        "settled": some([f"{name} = {value}" for name, value in choices.fix.items()]) if choices.fix else "",
    }
    return PreparedStep(
        plan,
        cast(Precision, options.precision),
        "stages",
        family,
        vocabulary,
        {"source": {"name": taken.foreign.path.name, "weights": None}},
        SOURCE,
        capturing(taken.path, taken.step, plan, taken.runner),
    )


def verify(request: VerifyRequest, heard: Listener) -> Parity:
    """See `Family`: with the file it is compared with the file; without, its stored vectors are replayed."""
    bundle, manifest, backend = request.bundle, request.bundle.manifest, request.backend
    if request.module is not None or request.weights is not None:
        raise UsageError(
            f"{bundle.path}: was made of an ONNX file, --module is for PyTorch's; give --checkpoint FILE.onnx"
        )
    emulated = manifest.precision == EMULATED and backend in ("auto", "cpu")
    with runnable(bundle.path, manifest, "cpu" if emulated else backend) as folder:
        opener = partial(load_bundle, folder, "cpu" if emulated else backend, engine_threads(manifest, request.threads))
        if request.checkpoint is None:
            heard.warn("the bundle's own vectors are replayed; --checkpoint FILE.onnx compares it with the file")
            return replay_vectors(opener, heard)
        told, first = manifest.family, read_weight_file(bundle.file(manifest.weights))
        starts = {port: first[name].numpy() for port, name in told["initial"].items()}
        choices = Choices(told["states"], told["fix"], told["open"], starts, told["batch_axes"])
        path = read_leapp(request.checkpoint).path if is_leapp(request.checkpoint) else request.checkpoint
        taken = take(path, choices, heard)
        check_same_module(taken.spec, request.checkpoint.name, bundle, heard)
        plan = planned(taken, taken.spec, (manifest.batch_size,), manifest.segment_lengths, heard)
        return verify_step(opener, plan, SOURCE, request.segments, heard, EMULATED if emulated else None)


def take(path: Path, choices: Choices, heard: Listener) -> Taken:
    """Take a file over: settings fixed, hidden states open where that is asked for, its states found.

    Args:
        path: of the file.
        choices: what the user says of it.
        heard: hears of the stages.

    Raises:
        TxlError: it cannot be read, run, or made a step.
    """
    foreign = read_foreign(path)
    place = Path(tempfile.mkdtemp(prefix="txl-deploy-file-"))
    try:
        model, constants = fix(foreign, choices.fix)
        heard.stage("open the file in a helper process")
        runner = Runner(foreign, SECONDS).__enter__()
        graph, hidden = runner.fold(save(model, place / "fixed.onnx"), place), list[Hidden]()
        whole = caller(runner, path, constants)
        if choices.open:
            with Runner(read_foreign(graph), SECONDS) as folded:
                segment = segment_axes(graph, folded)
            hidden = open_hidden(opened := load(graph), segment or None)
            if not hidden:
                raise UsageError(f"{path}: --open is given, and no state is hidden in the graph; leave it out")
            graph = save(opened, place / "opened.onnx")
            if lengthen(model, segment):
                longer = save(model, place / "longer.onnx")
                whole = caller(Runner(read_foreign(longer), SECONDS).__enter__(), path, {})
        inner = Runner(read_foreign(graph), SECONDS).__enter__()
        initial = {one.input: one.initial for one in hidden if one.initial is not None}
        pairs = {one.input: one.output for one in hidden}
        step = find_step(graph, replace(choices, initial={**initial, **choices.initial}), pairs, inner, heard)
    except RunError as error:
        raise UsageError(f"{path}: ONNX Runtime does not run it: {error}; export it again") from None
    except EndedError as error:
        raise BackendError(f"{path}: {error}") from None
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    call = caller(inner, path, NONE) if hidden else whole
    number = int(hashlib.sha256(graph.read_bytes()).hexdigest()[:12], 16)
    module = FileModule(step, call, load(graph).graph, number)
    weakref.finalize(module, shutil.rmtree, place, ignore_errors=True)
    return Taken(foreign, graph, step, module, runner, whole, tuple(one.name for one in hidden))


def planned(taken: Taken, spec: StepSpec, batches: Sequence[int], lengths: Sequence[int], heard: Listener) -> Plan:
    """The plan of a bundle, whose segments are shown to be what the file computes of all their positions at once."""
    fixed, (batch, *more) = taken.step.sequences, batches
    if more or (fixed is not None and batch != fixed):
        told = ", ".join(map(str, batches))
        raise UsageError(f"--batch-size is {told}, expected {fixed or 'one'}: the file takes {fixed or 'any number'}")
    plan = make_plan(spec, batch, lengths, heard)
    longest = plan.segment_lengths[0]
    if 1 in plan.segment_lengths[1:] and not divisible(plan.spec, batch, longest):
        if len(lengths) > 1:
            raise UsageError(
                f"segments of 1 are asked for beside {longest}, and {longest} of them do not give what a segment of "
                f"{longest} gives; give one --segment-length"
            )
        heard.warn(f"positions one by one do not give what a segment of {longest} gives, so that segments run whole")
        plan = make_plan(spec, batch, (longest,), heard)
    if taken.opened:
        heard.stage("compare chains of segments with the file's run over all positions")
        check_opened(plan.spec, taken.step, batch, plan.segment_lengths, taken.whole, some([*taken.opened]))
    return plan
