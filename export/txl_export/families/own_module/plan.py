"""Plans a bundle of a user's module: runs the module before any graph is made, and makes the manifest's tables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

from torch import Tensor
from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.manifest import FORMAT, FORMAT_VERSION, Manifest
from txl_runtime.bundle.tables import Input, Output, Program, StateTensor
from txl_runtime.errors import UsageError, some
from txl_runtime.listener import Listener

from txl_export.families.own_module.attributes import ModuleCopy, untouched
from txl_export.families.own_module.independence import dependence, influence
from txl_export.families.own_module.module_call import Eager, Tries
from txl_export.families.own_module.own_code import OwnCodeError
from txl_export.families.own_module.probing import check_step, constant_states, idle_states, run_first_call, tidied
from txl_export.families.own_module.sizes import in_bundle, initial_value, shown, usual_lengths
from txl_export.families.own_module.spec import LOGITS, VALID, OutputSpec, StateSpec, StepSpec
from txl_export.families.own_module.spec_checks import check_spec, remarks
from txl_export.families.own_module.stages import MOST_GRAPHS, MOST_TRANSITIONS, Transition, reached, too_many

_SECONDS = 10.0
"""Maximum number of seconds that are spent on the search for a segment length that the module takes."""


@dataclass(frozen=True)
class Plan:
    """A step, with the facts that running it has shown.

    Attributes:
        spec: the user's specification, with shapes ("B", "L" and numbers) and roles of outputs filled in.
        batch_size: the batch size B.
        segment_lengths: the segment lengths L, largest first; (1,) if no input has an "L".
        output_dtypes: dtypes of the bundle's outputs by name.
        transitions: changes of state shapes by a segment; each becomes a program.
        streams: "independent", or "lockstep": all sequences run or none does.
        reason: the reason for lockstep; "" for independent sequences.
        joint: whether sequences influence one another, so that a batch has to be complete.
        warnings: warnings, which the listener has received, too.
    """

    spec: StepSpec
    batch_size: int
    segment_lengths: tuple[int, ...]
    output_dtypes: dict[str, str]
    transitions: tuple[Transition, ...]
    streams: Literal["independent", "lockstep"]
    reason: str
    joint: bool
    warnings: tuple[str, ...]

    @property
    def outputs(self) -> tuple[OutputSpec, ...]:
        """The outputs, each with a shape and a role."""
        return self.spec.output_specs

    @property
    def reads_valid(self) -> bool:
        """True if programs have the input `valid`: which sequences run, or how many positions of each count."""
        return self.streams == "independent" or self.spec.lengths

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """The manifest's table of inputs, without the states."""
        table = []
        for entry in self.spec.inputs:
            facts: dict[str, Any] = {
                "dtype": in_bundle(entry.module_dtype),
                "shape": entry.shape,
                "vocab": entry.tokens,
            }
            role: Any = "feature" if entry.tokens is None else "tokens"
            table.append(Input(name=entry.name, role=role, lookahead=entry.lookahead, **facts))
        valid = Input(name=VALID, dtype="int32", shape=("B",), role="valid")
        return (*table, valid) if self.reads_valid else tuple(table)

    @cached_property
    def results(self) -> tuple[Output, ...]:
        """The manifest's table of outputs, without states; the graph makes "logprobs" from "logits"."""
        table = []
        for entry in self.outputs:
            dtype: Any = "float32" if entry.role == "logits" else self.output_dtypes[entry.name]
            role, shape = "logprobs" if entry.role == "logits" else entry.role or "feature", cast(Any, entry.shape)
            table.append(Output(name=entry.name, dtype=dtype, shape=shape, role=role))
        return tuple(table)

    @cached_property
    def states(self) -> tuple[StateTensor, ...]:
        """The manifest's table of states."""
        return tuple(map(self._state, self.spec.states))

    @cached_property
    def initial_tensors(self) -> dict[str, Tensor]:
        """The initial values of states that are tensors, e.g. [1, 32], by the names they get in the weight file."""
        values = {f"initial.{one.name}": initial_value(self.spec, one) for one in self.spec.states if one.grows is None}
        return {name: value.clone().contiguous() for name, value in values.items() if isinstance(value, Tensor)}

    def _state(self, entry: StateSpec) -> StateTensor:
        shape, value, dtype = (
            entry.axes.sizes(self.batch_size, 0),
            initial_value(self.spec, entry),
            in_bundle(entry.dtype),
        )
        held = f"initial.{entry.name}" if isinstance(value, Tensor) else value or None
        return StateTensor(
            name=entry.name,
            input=f"state.{entry.name}.in",
            output=f"state.{entry.name}.out",
            dtype=cast(Any, dtype),
            shape=shape,
            batch_axis=entry.axes.batch,
            row_axis=entry.grows,
            rows=None if entry.grows is None else (0, shape[entry.grows]),
            absent=entry.initial is None,
            initial=held if entry.grows is None else None,
            update="replace",
        )

    def manifest(self, programs: Sequence[Program], **more: Any) -> Manifest:
        """Return the manifest of this step's bundle; `more` are fields that the plan lacks, e.g. model_id."""
        return Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            batch_size=self.batch_size,
            inputs=self.inputs,
            outputs=self.results,
            states=self.states,
            programs=tuple(programs),
            streams=self.streams,
            joint=self.joint,
            lengths="valid" if self.spec.lengths else "exact",
            commits="rows" if self.spec.lengths or 1 in self.segment_lengths else "segment",
            files={},
            **more,
        )

    @property
    def too_many(self) -> str:
        """The error message if there are too many transitions to make a graph for each; else ""."""
        return too_many(self.transitions, MOST_GRAPHS) if len(self.transitions) > MOST_GRAPHS else ""


def make_plan(spec: StepSpec, batch_size: int, segment_lengths: Sequence[int], listener: Listener) -> Plan:
    """Run the module in every way that a bundle will, and refuse what no bundle can hold.

    Args:
        segment_lengths: segment lengths L of the export; () for the specification's; if it has none, 64 and 1, unless
            the module refuses one of them.

    Raises:
        UsageError: the specification and the module do not agree, or the module does what a step must not do, e.g.
            keeps undeclared state.
        OwnCodeError: the module raised an exception.
    """
    asked = check_spec(spec, batch_size, segment_lengths)
    listener.stage("run the module")
    run_first_call(spec, batch_size, asked)
    warnings = remarks(spec)
    with untouched(spec.module):
        spec.module.eval()
        original = ModuleCopy(spec.module)
        try:
            return _plan_of(spec, batch_size, asked, original, warnings, listener)
        finally:
            original.put_back()


def _plan_of(
    spec: StepSpec, batch_size: int, asked: Sequence[int], original: ModuleCopy, warnings: list[str], listener: Listener
) -> Plan:
    if not original.whole:
        warnings.append("the module has more than 2 GB of parameters: it was not tried whether calls change them")
    eager = Eager(spec)
    if asked:
        lengths = tuple(sorted(set(asked), reverse=True))
        transitions = reached(eager, batch_size, lengths, MOST_TRANSITIONS if _may_be_open(spec) else MOST_GRAPHS)
    else:
        lengths, transitions, dropped = _usual_lengths(eager, batch_size)
        warnings += dropped
    outputs, dtypes = _outputs(eager, batch_size, lengths)
    spec = replace(spec, outputs=outputs)
    tries = Tries(Eager(spec), batch_size)
    left = list(dict.fromkeys(path for length in lengths for path in check_step(tries, length, original)))
    if left:
        warnings.append(
            f"a call leaves {some(left, 1)} in the module, which no later call reads; the bundle has none of it"
        )
        spec = tidied(spec, left, {path: original.values[path] for path in left if path in original.values})
        tries = Tries(Eager(spec), batch_size)
    to_fill = len({transition.stage.number for transition in transitions}) + 1
    for name in constant_states(tries, lengths, to_fill):
        warnings.append(f"state {name} comes back as it went in: did the module forget to return the new one?")
    for name in idle_states(tries, lengths[0], to_fill):
        warnings.append(f"state {name} changes no output of the segments that were tried; look whether it is needed")
    reason = next((found for length in lengths if (found := dependence(tries, length))), "")
    if reason:
        warnings.append(f"the sequences run all or none, and are reset together: {reason}")
    for warning in warnings:
        listener.warn(warning)
    streams: Literal["independent", "lockstep"] = "lockstep" if reason else "independent"
    joint = bool(reason) and any(influence(tries, length) for length in lengths)
    return Plan(
        spec,
        batch_size,
        lengths,
        dtypes,
        transitions,
        streams,
        reason,
        joint,
        tuple(warnings),
    )


def _may_be_open(spec: StepSpec) -> bool:
    """Return whether one graph can take any number of rows: a state grows, and no state is absent at first."""
    entries = spec.states
    return any(entry.grows is not None for entry in entries) and all(entry.initial is not None for entry in entries)


def _usual_lengths(eager: Eager, batch_size: int) -> tuple[tuple[int, ...], tuple[Transition, ...], list[str]]:
    """Return the usual segment lengths that the module takes, their transitions, and notes on refused lengths."""
    lengths: tuple[int, ...] = ()
    transitions: tuple[Transition, ...] = ()
    errors: dict[int, UsageError] = {}
    for length in usual_lengths(eager.spec):
        try:
            transitions = reached(eager, batch_size, (*lengths, length))
            lengths = (*lengths, length)
        except UsageError as error:
            errors[length] = error
    if lengths:
        return lengths, transitions, [f"no program takes segments of {length}: {why}" for length, why in errors.items()]
    first = next(iter(errors.values()))
    if not isinstance(first, OwnCodeError):
        raise first
    tries, until = Tries(eager, batch_size), time.monotonic() + _SECONDS
    for other in range(2, max(errors)):
        try:
            tries.eager(tries.inputs(other), tries.fresh(), tries.valid(other))
        except UsageError:
            if time.monotonic() > until:
                break
            continue
        raise OwnCodeError(
            f"{first}; it takes segments of {other}: give --segment-length {other}, or look whether an axis is where "
            "it should be",
            first.frames,
        )
    raise first


def _outputs(eager: Eager, batch_size: int, lengths: tuple[int, ...]) -> tuple[tuple[OutputSpec, ...], dict[str, str]]:
    """Return the outputs with shapes and roles, and the outputs' dtypes in a bundle."""
    tries, filled, dtypes = Tries(eager, batch_size), [], {}
    runs = {length: eager(tries.inputs(length), tries.fresh(), tries.valid(length))[0] for length in lengths}
    for entry in eager.spec.output_specs:
        shapes = {length: outputs[entry.name] for length, outputs in runs.items()}
        dtype = str(shapes[lengths[0]].dtype).removeprefix("torch.")
        sizes = {length if eager.spec.has_length else 0: tuple(tensor.shape) for length, tensor in shapes.items()}
        shape = _shape(entry.name, sizes, batch_size) if entry.shape is None else entry.shape
        if entry.role in LOGITS and (dtype != "float32" or len(shape) < 2 or shape[-1] in ("B", "L")):
            raise UsageError(
                f"output {entry.name} has the role {entry.role} and is {dtype} {shape}, expected float32 with the "
                "vocabulary last, e.g. ('B', 'L', 1000)"
            )
        dtypes[entry.name] = in_bundle(dtype)
        filled.append(replace(entry, shape=shape, role=entry.role or "feature"))
    return tuple(filled), dtypes


def _shape(name: str, sizes: Mapping[int, tuple[int, ...]], batch_size: int) -> tuple[int | str, ...]:
    """Return an output's shape, e.g. ("B", "L", 5) for {64: (4, 64, 5), 1: (4, 1, 5)}.

    The first axis is the batch; the second is "L" if its size equals every tried length.
    """
    first = next(iter(sizes.values()))
    shape: tuple[int | str, ...] = ("B", *first[1:])
    if len(first) > 1 and all(other[1:2] == (length,) for length, other in sizes.items()):
        shape = ("B", "L", *first[2:])
    if not first or any(other != Axes(shape).sizes(batch_size, length) for length, other in sizes.items()):
        seen_sizes = ", ".join(
            f"{shown(other)} for " + f"L = {length} and " * (length > 0) for length, other in sizes.items()
        )
        raise UsageError(
            f"output {name} is {seen_sizes}B = {batch_size}, expected the batch first and another size for another L "
            f"on axis 1 alone; say where they stand: OutputSpec({name!r}, shape=(…))"
        )
    return shape
