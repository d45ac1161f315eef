"""Exports an ONNX file, and verifies a bundle against the file that it was made of.

Implements `families.registry.Family`. A module that calls the file (`take.file_module.FileModule`) stands for a user's
module, so planning, proof and writing are the same for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import onnx_ir as ir
from txl_runtime.bundle.tables import Precision
from txl_runtime.errors import BackendError, UsageError, some
from txl_runtime.listener import Listener
from txl_runtime.model import load as load_bundle
from txl_runtime.sandbox.process import EndedError

from txl_export.families.graph.find.stepping import Choices, find_step, keep_outputs, segment_axes
from txl_export.families.graph.open.caches import by_hand, window_caches
from txl_export.families.graph.open.chaining import OpenedGraph, check_opened, divisible
from txl_export.families.graph.open.hidden import open_hidden
from txl_export.families.graph.take.capturing import capturing
from txl_export.families.graph.take.file_module import Call, FileModule, FileStep, caller
from txl_export.families.graph.take.fixing import drop_unread, fix, lengthen
from txl_export.families.graph.take.leapp import Leapp, is_leapp, read_leapp
from txl_export.families.graph.take.reading import Foreign, packed, read_foreign
from txl_export.families.graph.take.running import Helper, RunError
from txl_export.families.own_module.by_position import by_position, lifting
from txl_export.families.own_module.capture import Capture
from txl_export.families.own_module.family import FOR_CHECKPOINTS, PreparedStep, with_data
from txl_export.families.own_module.plan import Plan, make_plan
from txl_export.families.own_module.spec import StepSpec
from txl_export.families.own_module.verifying import check_same_module, replay_vectors, verify_step
from txl_export.families.registry import VerifyRequest
from txl_export.graphs.emulation import EMULATED, runnable
from txl_export.graphs.half import computes_in_half
from txl_export.graphs.quantising import QUANTISED
from txl_export.graphs.shared_weights import read_weight_file
from txl_export.options import ExportOptions
from txl_export.proof.input_source import read_samples
from txl_export.proof.parity import Parity
from txl_export.proof.threads import engine_threads

SECONDS = 3600.0
"""Seconds of processor time for all runs of the file and for folding its graphs."""
SOURCE = "the file itself"


@dataclass
class ForeignStep:
    """A step that was made of an ONNX file.

    Attributes:
        foreign: the file.
        graph: its graph with settings fixed, constants folded and hidden states made explicit.
        step: the tables of `graph`.
        module: a module that computes `graph`.
        helper: the process that runs graphs.
        whole: calls the file itself; if states are hidden, the call takes any number of positions.
        opened: the states that were hidden; None without --open.
    """

    foreign: Foreign
    graph: ir.Model
    step: FileStep
    module: FileModule
    helper: Helper
    whole: Call
    opened: OpenedGraph | None

    @property
    def spec(self) -> StepSpec:
        """The step's specification."""
        return self.step.spec(self.module)


def prepare(source: str | Path, options: ExportOptions, listener: Listener) -> PreparedStep:
    """Find the file's states and plan its bundle (see `Family.prepare`)."""
    options.refuse((*FOR_CHECKPOINTS, "config", "weights", "growth"), "a model in PyTorch, and this is an ONNX file")
    if options.precision in QUANTISED:
        raise UsageError(
            f"precision is {options.precision}, which is for a Transformer-XL's matrices, expected fp32, fp16 or bf16 "
            "for an ONNX file; check --precision"
        )
    leapp = read_leapp(Path(source)) if is_leapp(Path(source)) else Leapp(Path(source))
    initial = read_samples(Path(options.initial)) if isinstance(options.initial, str | Path) else options.initial
    choices = Choices(
        {**leapp.states, **(options.states or {})},
        options.fix or {},
        options.open,
        {**leapp.initial, **(initial or {})},
        options.batch_axes or {},
        options.position_axes or {},
        tuple(options.outputs),
        options.windows or {},
    )
    opened = take(read_foreign(leapp.path), choices, listener)
    asked = options.batch_sizes if options.batch_size != () else (opened.step.sequences or 1,)
    spec, vocabulary = with_data(by_position(opened.spec, options.segment_lengths), options)
    plan = planned(opened, spec, asked, options.segment_lengths, listener)
    half = options.precision is None and computes_in_half(opened.foreign.model.graph)
    if half:
        listener.warn("the file computes in float16, so fp16's limits judge it; --precision fp32 asks for more")
    family = {
        "name": "graph",
        "file": opened.foreign.path.name,
        "sha256": opened.foreign.sha256,
        "states": {
            **{name: output for name, output in choices.states.items() if not output},
            **{side.port: output for side, output in opened.step.states if side.port in opened.step.shown},
        },
        "fix": {name: np.asarray(value).tolist() for name, value in choices.fix.items()},
        "rate": leapp.rate,
        **leapp.facts,
        "open": choices.open,
        "initial": {
            side.port: f"initial.{side.spec.name}" for side, _ in opened.step.states if side.port in choices.initial
        },
        "batch_axes": dict(choices.batch_axes),
        "position_axes": dict(choices.position_axes),
        "outputs": [*choices.outputs],
        "windows": dict(choices.windows),
        "opened": str(opened.opened or ""),
        "settled": some([f"{name} = {value}" for name, value in choices.fix.items()]) if choices.fix else "",
    }

    def make(of: Plan) -> Capture:
        return capturing(opened.graph, opened.step, of, opened.helper)

    return PreparedStep(
        plan,
        cast(Precision, "fp16" if half else options.precision or "fp32"),
        "stages",
        family,
        vocabulary,
        {"source": {"name": opened.foreign.path.name, "weights": None}},
        SOURCE,
        make(plan) if spec.has_length is opened.spec.has_length else lifting(plan, make),
        rounds=half,
    )


def verify(request: VerifyRequest, listener: Listener) -> tuple[Parity, None]:
    """Compare a bundle with its file, or without --checkpoint replay its stored vectors (see `Family.verify`)."""
    bundle, manifest, backend = request.bundle, request.bundle.manifest, request.backend
    if request.module is not None or request.weights is not None:
        raise UsageError(
            f"{bundle.path}: was made of an ONNX file, --module is for PyTorch's; give --checkpoint FILE.onnx"
        )
    emulated = manifest.precision == EMULATED and backend in ("auto", "cpu")
    with runnable(bundle.path, manifest, "cpu" if emulated else backend) as folder:
        opener = partial(load_bundle, folder, "cpu" if emulated else backend, engine_threads(manifest, request.threads))
        if request.checkpoint is None:
            listener.warn("the bundle's own vectors are replayed; --checkpoint FILE.onnx compares it with the file")
            return replay_vectors(opener, manifest.precision, listener), None
        kind, first = manifest.family, read_weight_file(bundle.file(manifest.weights))
        starts = {port: first[name].numpy() for port, name in kind["initial"].items()}
        axes = kind["batch_axes"], kind["position_axes"]
        choices = Choices(
            kind["states"], kind["fix"], kind["open"], starts, *axes, tuple(kind["outputs"]), kind["windows"]
        )
        path = read_leapp(request.checkpoint).path if is_leapp(request.checkpoint) else request.checkpoint
        opened = take(read_foreign(path), choices, listener)
        spec = by_position(opened.spec, manifest.segment_lengths)
        check_same_module(spec, request.checkpoint.name, bundle, listener)
        plan = planned(opened, spec, (manifest.batch_size,), manifest.segment_lengths, listener)
        return verify_step(opener, plan, SOURCE, request.segments, listener, EMULATED if emulated else None), None


def take(foreign: Foreign, choices: Choices, listener: Listener, seconds: float = SECONDS) -> ForeignStep:
    """Make a step of a file: fix settings, make hidden states explicit if asked for, and find the states.

    Args:
        foreign, choices: the file, and the options of its export.
        listener: receives progress.
        seconds: processor time that all runs together may take.

    Raises:
        TxlError: the file does not run, or no step can be made of it.
    """
    path = foreign.path
    listener.stage("open the file in a helper process")
    helper = Helper(foreign, seconds)
    try:
        return _step_of(foreign, choices, helper, listener)
    except BaseException as error:
        helper.close()
        if isinstance(error, RunError):
            constants = ", ".join(f"{name} = {value}" for name, value in choices.fix.items())
            todo = (
                f"it was fixed to {constants}: try other values, or see the file's own sizes"
                if constants
                else "export it again"
            )
            raise UsageError(f"{path}: ONNX Runtime does not run it: {error}; {todo}") from None
        if isinstance(error, EndedError):
            raise BackendError(f"{path}: {error}") from None
        raise


def begin(foreign: Foreign, choices: Choices, listener: Listener, seconds: float) -> ForeignStep:
    """Do the first steps of an export, within `seconds` of processor time, and write nothing.

    Raises:
        TxlError: an export would be refused.
    """
    opened = take(foreign, choices, listener, seconds)
    try:
        planned(opened, opened.spec, (opened.step.sequences or 1,), (), listener)
    finally:
        opened.helper.close()
    return opened


def _step_of(foreign: Foreign, choices: Choices, helper: Helper, listener: Listener) -> ForeignStep:
    path, opened, segment = foreign.path, None, dict[str, int]()
    runner = helper.open(foreign.data)
    fixed, constants = fix(foreign, choices.fix)
    graph = helper.fold(fixed)
    if choices.outputs:
        keep_outputs(foreign.of(graph), choices)
    if unread := drop_unread(graph, choices.states):
        listener.warn(f"nothing reads {some([*unread])}, so that the bundle does not take it")
    whole = caller(runner, path, constants | unread)
    if cuts := window_caches(graph, choices.windows, choices.states, helper.fold):
        whole = by_hand(whole, cuts)
    if choices.open:
        with helper.open(graph) as runner:
            segment = segment_axes(foreign.of(graph), choices.position_axes, runner)
        opened = OpenedGraph(
            graph, open_hidden(graph, segment, helper.fold), lambda made: caller(helper.open(made), path, {})
        )
        if not opened.hidden:
            raise UsageError(f"{path}: --open is given, and no state is hidden in the graph; leave it out")
        if lengthen(fixed, segment):
            whole = caller(helper.open(fixed), path, {})
    inner, hidden = helper.open(graph), opened.hidden if opened else ()
    initial = {one.input: one.initial for one in hidden if one.initial is not None}
    pairs = {one.input: one.output for one in hidden}
    states = {**choices.states, **{cut.input: cut.output for cut in cuts}}
    known = replace(choices, initial={**initial, **choices.initial}, states=states)
    step = find_step(foreign.of(graph), known, pairs, segment, inner, listener)
    call = caller(inner, path, {}) if hidden else whole
    number = int(hashlib.sha256(packed(graph)).hexdigest()[:12], 16)
    module = FileModule(step, call, graph.graph, number)
    return ForeignStep(foreign, graph, step, module, helper, whole, opened)


def planned(
    taken: ForeignStep, spec: StepSpec, batches: Sequence[int], lengths: Sequence[int], listener: Listener
) -> Plan:
    """Plan the bundle, and check that its segments compute what the file computes for all their positions at once."""
    fixed, (batch, *more) = taken.step.sequences, batches
    if more or (fixed is not None and batch != fixed):
        sizes = ", ".join(map(str, batches))
        raise UsageError(f"--batch-size is {sizes}, expected {fixed or 'one'}: the file takes {fixed or 'any number'}")
    lifted = spec.has_length is not taken.spec.has_length
    if lifted and (fixed is not None or taken.opened):
        fault = f"takes {fixed} sequence{'s' * (fixed > 1)}" if fixed is not None else "hides states"
        raise UsageError(
            f"a call of the file is one position, and it {fault}: segments of several positions need a file that "
            "leaves the number of sequences open and hides no state; leave out --segment-length"
        )
    positions = None if lifted else taken.step.positions
    if positions is not None and (wrong := [length for length in lengths if length != positions]):
        raise UsageError(
            f"--segment-length is {wrong[0]}, expected {positions}: a call of the file is {positions} position"
            f"{'s' * (positions > 1)}, as far as its axes show; leave it out, or give --position-axis NAME=N"
        )
    plan = make_plan(spec, batch, lengths, listener)
    dynamic = any(node.op_type == "DynamicQuantizeLinear" for node in taken.graph.graph)
    if plan.joint and dynamic:
        listener.warn(
            "DynamicQuantizeLinear computes one scale for all sequences of a call, so that each changes what others "
            "get; --batch-size 1 makes a bundle in which none does, quantize_static a file without such scales"
        )
    longest = plan.segment_lengths[0]
    if other := [each for each in plan.segment_lengths[1:] if not divisible(plan.spec, batch, longest, each)]:
        if len(lengths) > 1:
            raise UsageError(
                f"segments of {other[0]} are asked for beside {longest}, and one after another they do not give what "
                f"segments of {longest} give; give one --segment-length"
            )
        why = ", because DynamicQuantizeLinear computes one scale for a whole call" if dynamic else ""
        listener.warn(
            f"positions one by one do not give what a segment of {longest} gives{why}: the bundle takes segments of "
            f"{longest} alone; --segment-length 1 makes one that takes single positions"
        )
        plan = make_plan(spec, batch, (longest,), listener)
    if taken.opened:
        listener.stage("compare chains of segments with the file's run over all positions")
        check_opened(plan.spec, taken.step, batch, plan.segment_lengths, taken.whole, taken.opened)
    return plan
