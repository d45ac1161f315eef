"""From a plan to files: a graph for each set of shapes, one weight file, and the tables of the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import onnx_ir as ir
from torch import Tensor
from txl_runtime.bundle.open_batch import at_axes
from txl_runtime.bundle.reading import WEIGHTS
from txl_runtime.bundle.tables import Input, Output, Program, StateTensor
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener

from txl_export.families.own_module.any_batch import Found, leave_open, may_be_open
from txl_export.families.own_module.capture import capture
from txl_export.families.own_module.diagnosis import ROUTES, CaptureError, Route
from txl_export.families.own_module.identity import model_id, own_tensors, parameter_count
from txl_export.families.own_module.network import StepNetwork, reads_valid
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.sizes import in_bundle, initial_value
from txl_export.families.own_module.spec import VALID, StateSpec
from txl_export.families.own_module.stages import Transition
from txl_export.families.own_module.trial import examples_for
from txl_export.graphs.checking import check_graph
from txl_export.graphs.half import HALF, HalfPrecision, to_half, weights_of_products
from txl_export.graphs.keeping_nan import keep_nan
from txl_export.graphs.settling import OPSET
from txl_export.graphs.shared_weights import SharedWeights

Growth = Literal["auto", "symbolic", "stages"]
GROWTHS: tuple[Growth, ...] = ("auto", "symbolic", "stages")
"""How rows that a state gains are written: "symbolic": one graph that leaves their number open. "stages": a graph for
each number. "auto": the first where it computes what the module computes, else the second."""
OPEN_ROUTES: tuple[Route, ...] = ("export", "decomposed")
"""The tracer would take the number of rows for fixed."""
PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Written:
    """What was written, as a manifest has it.

    Attributes:
        programs, states, inputs, outputs: its tables.
        routes: by which a program's graph was captured.
        growth: "symbolic" or "stages" where states grow or are absent at first, else "none".
        note: why a step that could have open rows has stages; "" otherwise.
        fixed: why graphs of independent sequences are of B of them alone; "" otherwise.
        parameters: number of trained values.
        model_id: which function this is.
    """

    programs: tuple[Program, ...]
    states: tuple[StateTensor, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    routes: dict[str, Route]
    growth: Literal["none", "symbolic", "stages"]
    note: str
    fixed: str
    parameters: int
    model_id: str


class _Graphs:
    """Programs and their graphs, which share one set of weights."""

    def __init__(self, plan: Plan) -> None:
        names = {f"state.{entry.name}.{side}" for entry in plan.spec.states for side in ("in", "out")}
        names |= {VALID, *(entry.name for entry in plan.spec.inputs), *(entry.name for entry in plan.outputs)}
        names |= {f"initial.{entry.name}" for entry in plan.spec.states}
        self.weights = SharedWeights(own_tensors(plan.spec.module), names)
        self.programs: list[Program] = []
        self.models: list[ir.Model] = []
        self.routes: dict[str, Route] = {}
        self.axes: list[Mapping[str, int]] = []
        self.fixed = ""

    def add(self, found: Found, open_batch: bool = False) -> None:
        """Take a program, whose graph may leave B open; the graph's weights are then the shared ones."""
        network, name, model = found.network, found.name, found.captured.model
        self.programs.append(
            Program(
                name=name,
                kind="step",
                segment_length=found.length,
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
        self.routes[name] = found.captured.route


def write_step(folder: Path, plan: Plan, precision: str, growth: str, heard: Listener) -> Written:
    """Capture a step's graphs and write them, with their weights, into a folder.

    Args:
        folder: of the bundle.
        plan: what the step is.
        precision: fp32, fp16 or bf16.
        growth: one of `GROWTHS`.
        heard: hears of each graph.

    Raises:
        UsageError: a graph cannot be captured, or the precision or the growth is none of these.
    """
    if precision not in PRECISIONS:
        raise UsageError(
            f"--precision {precision} is for a Transformer-XL, expected {', '.join(PRECISIONS)} for a model of your own"
        )
    if growth not in GROWTHS:
        raise UsageError(f"growth {growth!r} is not known, expected {', '.join(GROWTHS)}")
    for entry in plan.spec.states:
        if entry.dtype == "int64":
            heard.warn(f"state {entry.name} is int32 in the bundle: beyond {2**31 - 1} it begins again at {-(2**31)}")
    graphs, chosen, note = _captured(plan, growth, heard)
    inputs, outputs = input_table(plan), output_table(plan)
    identity = model_id(plan.spec, inputs, outputs, [model.graph for model in graphs.models])
    for model in graphs.models:  # behind the identity, which bundles of older versions have without it
        keep_nan(model)
    initial = dict(_initial_tensors(plan))
    for name, tensor in initial.items():
        graphs.weights.add(name, tensor)
    parameters = {name for name, _ in plan.spec.module.named_parameters()}
    if precision in HALF and not _halve(graphs, precision, parameters):
        heard.warn(f"{precision} changes nothing: no product of the step has a weight in the weight file")
    _write(folder, graphs)
    return Written(
        programs=tuple(graphs.programs),
        states=tuple(_state(plan, entry, f"initial.{entry.name}" in initial) for entry in plan.spec.states),
        inputs=inputs,
        outputs=outputs,
        routes=graphs.routes,
        growth=chosen,
        note=note,
        fixed=graphs.fixed,
        parameters=parameter_count(plan.spec.module),
        model_id=identity,
    )


def input_table(plan: Plan) -> tuple[Input, ...]:
    """What the programs read beside the states."""
    table = [
        Input(
            name=entry.name,
            dtype=in_bundle(entry.module_dtype),  # type: ignore[arg-type]
            shape=entry.shape,  # type: ignore[arg-type]
            role="feature" if entry.tokens is None else "tokens",
            vocab=entry.tokens,
            lookahead=entry.lookahead,
        )
        for entry in plan.spec.inputs
    ]
    if reads_valid(plan):
        table.append(Input(name=VALID, dtype="int32", shape=("B",), role="valid"))
    return tuple(table)


def output_table(plan: Plan) -> tuple[Output, ...]:
    """What the programs return beside the states; logits have become log-probabilities."""
    return tuple(
        Output(
            name=entry.name,
            dtype="float32" if entry.role == "logits" else plan.output_dtypes[entry.name],  # type: ignore[arg-type]
            shape=entry.shape,  # type: ignore[arg-type]
            role="logprobs" if entry.role == "logits" else entry.role or "feature",
        )
        for entry in plan.outputs
    )


def _state(plan: Plan, entry: StateSpec, has_tensor: bool) -> StateTensor:
    shape = entry.axes.sizes(plan.batch_size, 0)
    value = None if entry.grows is not None or has_tensor else initial_value(plan.spec, entry)
    return StateTensor(
        name=entry.name,
        input=f"state.{entry.name}.in",
        output=f"state.{entry.name}.out",
        dtype=in_bundle(entry.dtype),  # type: ignore[arg-type]
        shape=shape,
        batch_axis=entry.axes.batch,
        row_axis=entry.grows,
        rows=None if entry.grows is None else (0, shape[entry.grows]),
        absent=entry.initial is None,
        initial=f"initial.{entry.name}" if has_tensor else (float(value) if value else None),
        update="replace",
    )


def _initial_tensors(plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """The initial values that are tensors, for the weight file."""
    for entry in plan.spec.states:
        value = None if entry.grows is not None else initial_value(plan.spec, entry)
        if isinstance(value, Tensor):
            yield f"initial.{entry.name}", value.clone().contiguous()


def _captured(plan: Plan, growth: str, heard: Listener) -> tuple[_Graphs, Literal["none", "symbolic", "stages"], str]:
    """The graphs, with rows open where that is asked for and possible; how states grow, and why not otherwise."""
    note = ""
    growing = any(entry.grows is not None for entry in plan.spec.states)
    absent = [entry.name for entry in plan.spec.states if entry.initial is None]
    if growing and growth != "stages":
        try:
            if absent:
                raise UsageError(
                    f"state {absent[0]} is absent at first, which no graph with open rows takes; "
                    "expected growth 'stages' for it"
                )
            return _symbolic(plan, heard), "symbolic", ""
        except UsageError as error:
            if growth == "symbolic" or (isinstance(error, CaptureError) and error.final):
                raise
            note = str(error)
    return _staged(plan, heard), "stages" if growing or absent else "none", note


def _symbolic(plan: Plan, heard: Listener) -> _Graphs:
    """A graph for each length, for any number of rows that there can be."""
    graphs = _Graphs(plan)
    for length in plan.segment_lengths:
        name = f"step-{length}"
        heard.stage(f"capture and check {name}")
        networks = {
            one.stage.number: StepNetwork(plan, one, open_rows=True) for one in plan.transitions if one.length == length
        }
        examples = {
            one.stage.number: examples_for(plan, one, networks[one.stage.number])
            for one in plan.transitions
            if one.length == length
        }
        everywhere = [example for found in examples.values() for example in found]
        errors: list[CaptureError] = []
        for number in _to_trace_at(plan, length):
            try:
                traced = [examples[number][0], *everywhere]
                captured = capture(networks[number], name, traced, OPEN_ROUTES)
                graphs.add(Found(name, length, networks[number], captured, everywhere))
            except CaptureError as error:
                if error.final:
                    raise
                errors.append(error)
            else:
                break
        else:
            raise errors[0]
    return graphs


def _to_trace_at(plan: Plan, length: int) -> list[int]:
    """Stages to capture open rows at: the one with most of them, and one between. Sizes of 0 and 1 would be fixed."""
    ordered = sorted((one for one in plan.transitions if one.length == length), key=_fewest_rows, reverse=True)
    return list(dict.fromkeys(one.stage.number for one in (ordered[0], ordered[len(ordered) // 2])))


def _fewest_rows(transition: Transition) -> int:
    """How small the smallest size of any state is."""
    return min((size for shape in transition.stage.shapes.values() for size in shape or ()), default=0)


def _staged(plan: Plan, heard: Listener) -> _Graphs:
    """A graph for each length and each set of shapes; of one set B may be open."""
    if plan.too_many:
        raise UsageError(plan.too_many)
    graphs, programs = _Graphs(plan), list[Found]()
    routes: Sequence[Route] = ROUTES
    for transition in plan.transitions:
        length, alone = transition.length, all(one.stage.number == 0 for one in plan.transitions)
        name = f"step-{length}" if alone else f"step-{length}.{transition.stage.number}"
        heard.stage(f"capture and check {name}")
        network = StepNetwork(plan, transition)
        examples = examples_for(plan, transition, network)
        found = capture(network, name, examples, routes)
        routes = (found.route, *(route for route in ROUTES if route != found.route))
        programs.append(Found(name, length, network, found, examples))
    if may_be_open(plan):
        graphs.fixed = leave_open(plan, programs)
    for program in programs:
        graphs.add(program, open_batch=may_be_open(plan) and not graphs.fixed)
    return graphs


def _halve(graphs: _Graphs, precision: str, parameters: set[str]) -> bool:
    """Convert all graphs; a weight that one of them multiplies by in half precision is half in all. Whether any is."""
    half: HalfPrecision = "fp16" if precision == "fp16" else "bf16"
    products = (weights_of_products(model.graph, half, parameters) for model in graphs.models)
    halved = set[str]().union(*products) & graphs.weights.names
    graphs.weights.halve(halved, HALF[half][1])
    for model in graphs.models:
        to_half(model, half, halved)
    return bool(halved)


def _write(folder: Path, graphs: _Graphs) -> None:
    """The weight file, and every graph with its weights in it, held against its program."""
    stored = graphs.weights.write(folder / WEIGHTS)
    for program, model, axes in zip(graphs.programs, graphs.models, graphs.axes, strict=True):
        stored.point_into(model.graph)
        model.metadata_props["txl-deploy.program"] = msgspec.json.encode(program).decode()
        ir.save(model, folder / program.file)
        promised = at_axes(program, axes) if program.open_batch else program
        check_graph(folder / program.file, promised, OPSET)
