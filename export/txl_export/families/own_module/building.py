"""Writes a plan's files: a graph for each set of shapes and one weight file; fills the manifest's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import onnx_ir as ir
from txl_runtime.bundle.open_batch import at_axes
from txl_runtime.bundle.reading import WEIGHTS
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import UsageError, some
from txl_runtime.listener import Listener

from txl_export.families.own_module.any_batch import leave_open, may_be_open
from txl_export.families.own_module.capture import Capture, Captured, capture
from txl_export.families.own_module.diagnosis import CaptureError
from txl_export.families.own_module.identity import model_id, own_tensors, parameter_count
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.rehearsal import examples_for
from txl_export.families.own_module.spec import VALID
from txl_export.families.own_module.stages import MOST_GRAPHS, Transition
from txl_export.graphs.checking import check_graph
from txl_export.graphs.half import HALF, HalfPrecision, to_half, weights_of_products
from txl_export.graphs.passes.improving import improve
from txl_export.graphs.shared_weights import SharedWeights

_SPREAD = 32
"""Number of stages at which a graph with open rows is compared with the module, if there are more than
`MOST_GRAPHS`."""


class StepGraphs:
    """The programs of a bundle and their graphs, which share one set of weights.

    Attributes:
        programs, states, inputs, outputs: the manifest's tables.
        routes: the route by which each program's graph was captured, "export" or "decomposed".
        growth: "symbolic" or "stages" if states grow or are absent at first, else "none".
        note: the reason why a step with growing states needs stages; "" if it does not.
        fixed: the reason why graphs take exactly B sequences although sequences are independent; "" if B is open.
        parameters: number of trained values.
        model_id: the hash that identifies the function.
    """

    def __init__(self, plan: Plan, growth: Literal["none", "symbolic", "stages"]) -> None:
        self.states, self.inputs, self.outputs = plan.states, plan.inputs, plan.results
        names = {name for state in plan.states for name in (state.input, state.output, f"initial.{state.name}")}
        names |= {VALID, *(entry.name for entry in plan.inputs), *(entry.name for entry in plan.results)}
        self.weights = SharedWeights(own_tensors(plan.spec.module), names)
        self.programs: list[Program] = []
        self.models: list[ir.Model] = []
        self.routes: dict[str, str] = {}
        self.axes: list[Mapping[str, int]] = []
        self.growth, self.note, self.fixed, self.model_id = growth, "", "", ""
        self.parameters = parameter_count(plan.spec.module)

    def add(self, found: Captured, open_batch: bool = False) -> None:
        """Add a program and let its graph refer to the shared weights; `open_batch` says that the graph has B open."""
        network, name, model = found.network, found.name, found.model
        self.programs.append(
            Program(
                name=name,
                kind="step",
                segment_length=network.length,
                update="replace",
                file=f"{name}.onnx",
                inputs=network.inputs,
                outputs=network.outputs,
                open_batch=open_batch,
            )
        )
        self.axes.append(network.batch_axes)
        self.weights.adopt(model.graph)
        self.models.append(model)
        self.routes[name] = found.route


def write_step(
    folder: Path, plan: Plan, precision: str, growth: str, listener: Listener, make: Capture = capture
) -> StepGraphs:
    """Capture a step's graphs and write them, with their weights, into a folder.

    Args:
        plan: the step and its shapes.
        precision: fp32, fp16 or bf16.
        growth: form of the graphs of growing states. "symbolic": one graph with an open number of rows. "stages": one
            graph for each number. "auto": symbolic if that graph equals the module, else stages.
        make: captures a graph.

    Raises:
        UsageError: a graph cannot be captured.
    """
    if whole := [entry.name for entry in plan.spec.states if entry.dtype == "int64"]:
        listener.warn(f"state {some(whole)}: int32 in the bundle, beyond {2**31 - 1} it begins again at {-(2**31)}")
    left_out = {f"initial.{entry.name}": entry.name for entry in plan.spec.states if entry.initial is ...}
    if initial := [name for tensor, name in left_out.items() if tensor in plan.initial_tensors]:
        listener.warn(
            f"state {some(initial)}: the first values are those of the module's attribute, so model_id is new; bundles "
            "made by older versions start at zeros, and what they saved is not taken"
        )
    written = _captured(plan, growth, listener, make)
    written.model_id = model_id(plan.spec, plan.inputs, plan.results, [model.graph for model in written.models])
    # these passes run after the identity is computed, because bundles of older versions were hashed without them
    for model in written.models:
        improve(model)
    written.weights.keep({name for model in written.models for name in model.graph.initializers})
    for name, tensor in plan.initial_tensors.items():
        written.weights.add(name, tensor)
    parameters = {name for name, _ in plan.spec.module.named_parameters()}
    if precision in HALF and not _halve(written, precision, parameters):
        listener.warn(f"{precision} changes nothing: no product of the step has a weight in the weight file")
    _write(folder, written)
    return written


def _captured(plan: Plan, growth: str, listener: Listener, make: Capture) -> StepGraphs:
    """Capture the graphs; leave the number of rows open if `growth` asks for it and such a graph equals the module."""
    note = ""
    growing = any(entry.grows is not None for entry in plan.spec.states)
    absent = [entry.name for entry in plan.spec.states if entry.initial is None]
    if growing and growth != "stages":
        try:
            if absent:
                raise UsageError(
                    f"state {absent[0]} is absent at first, but a graph with an open number of rows needs it from the "
                    "start; expected growth 'stages'; give --growth stages"
                )
            return _symbolic(plan, listener, make)
        except UsageError as error:
            if growth == "symbolic" or (isinstance(error, CaptureError) and error.final):
                raise
            note = str(error)
    written = _staged(plan, listener, make)
    written.note = note
    return written


def _symbolic(plan: Plan, listener: Listener, make: Capture) -> StepGraphs:
    """Capture one graph for each segment length, in which the number of rows of growing states is open."""
    graphs = StepGraphs(plan, "symbolic")
    for length in plan.segment_lengths:
        name = f"step-{length}"
        listener.stage(f"capture and check {name}")
        tried = _to_try(plan, length)
        networks = {one.stage.number: StepNetwork(plan, one, open_rows=True) for one in tried}
        examples = {one.stage.number: examples_for(plan, one, networks[one.stage.number]) for one in tried}
        everywhere = [example for group in examples.values() for example in group]
        errors: list[CaptureError] = []
        for number in _to_trace_at(plan, tried):
            try:
                traced = [examples[number][0], *everywhere]
                graphs.add(make(networks[number], name, traced))
            except CaptureError as error:
                if error.final:
                    raise
                errors.append(error)
            else:
                break
        else:
            raise errors[0]
    return graphs


def _to_try(plan: Plan, length: int) -> list[Transition]:
    """Return the transitions at which a graph with open rows is compared with the module.

    These are all transitions of this segment length, or 32 spread evenly if there are more than `MOST_GRAPHS`: each
    comparison starts without rows and runs every segment up to its stage, so n comparisons run n²/2 segments.
    """
    every = [one for one in plan.transitions if one.length == length]
    if len(every) <= MOST_GRAPHS:
        return every
    return [every[round(number * (len(every) - 1) / (_SPREAD - 1))] for number in range(_SPREAD)]


def _to_trace_at(plan: Plan, tried: Sequence[Transition]) -> list[int]:
    """Return numbers of stages at which to capture open rows: the stage with most rows, then a middle stage.

    At 0 or 1 rows torch.export would take the size for fixed.
    """
    growing = [(entry.name, entry.grows) for entry in plan.spec.states if entry.grows is not None]

    def fewest(one: Transition) -> int:
        return min((one.stage.shapes[name] or ())[axis] for name, axis in growing)

    ordered = sorted(tried, key=fewest, reverse=True)
    return list(dict.fromkeys(one.stage.number for one in (ordered[0], ordered[len(ordered) // 2])))


def _staged(plan: Plan, listener: Listener, make: Capture) -> StepGraphs:
    """Capture a graph for each length and each set of shapes; open B in all graphs if that is possible."""
    if plan.too_many:
        raise UsageError(plan.too_many)
    fixed_sizes = all(state.row_axis is None and not state.absent for state in plan.states)
    graphs, programs = StepGraphs(plan, "none" if fixed_sizes else "stages"), list[Captured]()
    for transition in plan.transitions:
        length, alone = transition.length, all(one.stage.number == 0 for one in plan.transitions)
        name = f"step-{length}" if alone else f"step-{length}.{transition.stage.number}"
        listener.stage(f"capture and check {name}")
        network = StepNetwork(plan, transition)
        examples = examples_for(plan, transition, network)
        programs.append(make(network, name, examples))
    if may_be_open(plan):
        graphs.fixed = leave_open(plan, programs)
    for program in programs:
        graphs.add(program, open_batch=may_be_open(plan) and not graphs.fixed)
    return graphs


def _halve(graphs: StepGraphs, precision: str, parameters: set[str]) -> bool:
    """Convert all graphs to half precision; return whether any weight was converted.

    A weight that one graph multiplies by in half precision is converted in all graphs.
    """
    half: HalfPrecision = "fp16" if precision == "fp16" else "bf16"
    products = (weights_of_products(model.graph, half, parameters) for model in graphs.models)
    halved = set[str]().union(*products) & graphs.weights.names
    graphs.weights.halve(halved, HALF[half][1])
    for model in graphs.models:
        to_half(model, half, halved)
    return bool(halved)


def _write(folder: Path, graphs: StepGraphs) -> None:
    """Write the weight file and the graphs, each with references to its weights, and check each against its program."""
    stored = graphs.weights.write(folder / WEIGHTS)
    for program, model, axes in zip(graphs.programs, graphs.models, graphs.axes, strict=True):
        stored.point_into(model.graph)
        model.metadata_props["txl-deploy.program"] = program.note()
        ir.save(model, folder / program.file)
        promised = at_axes(program, axes) if program.open_batch else program
        check_graph(folder / program.file, promised, model.graph.opset_imports[""])
