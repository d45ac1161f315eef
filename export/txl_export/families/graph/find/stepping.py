"""Makes a step's tables from an ONNX graph: inputs, outputs and states, found by runs and by the user's options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor
from txl_runtime.errors import UsageError, brief, printable, some
from txl_runtime.listener import Listener
from txl_runtime.types import Array

from txl_export.families.graph.find.behaviour import Axes, Behaviour, name_of_size
from txl_export.families.graph.find.naming import likeness
from txl_export.families.graph.find.pairing import State, options_of, pair
from txl_export.families.graph.find.structure import read_structure
from txl_export.families.graph.find.trying import Inputs
from txl_export.families.graph.take.file_module import FileStep, Side, kind_of
from txl_export.families.graph.take.reading import Foreign, Port
from txl_export.families.graph.take.running import Runner
from txl_export.families.own_module.sizes import in_bundle
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec

MOST_NAMED = 2**16
"""Maximum number of pairs of inputs and outputs whose names are compared."""


@dataclass(frozen=True)
class Choices:
    """The options of an export of a file.

    Attributes:
        states: for an input, the output that is its next value; "" for an input that is no state.
        fix: values of inputs and open sizes that never change; see `fixing.fix`.
        open: whether hidden states become inputs and outputs.
        initial: initial values of states, by the names of their inputs.
        batch_axes, position_axes: axes of sequences and of positions, by the names of inputs and outputs.
        outputs: outputs to keep besides states; () for all.
        windows: number of rows to keep of growing caches, by the names of their inputs; see `open.caches`.
    """

    states: Mapping[str, str] = field(default_factory=dict)
    fix: Mapping[str, Any] = field(default_factory=dict)
    open: bool = False
    initial: Mapping[str, Array] = field(default_factory=dict)
    batch_axes: Mapping[str, int] = field(default_factory=dict)
    position_axes: Mapping[str, int] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    windows: Mapping[str, int] = field(default_factory=dict)


def find_step(
    foreign: Foreign,
    choices: Choices,
    hidden: Mapping[str, str],
    segment: Mapping[str, int],
    runner: Runner,
    listener: Listener,
) -> FileStep:
    """Make the tables of a step for a graph whose settings are fixed and whose hidden states are explicit.

    Args:
        foreign, runner: the graph; the runner has it open.
        choices: the options of the export.
        hidden: names of the outputs of states that were hidden, by the names of their inputs.
        segment: the axes of positions that `segment_axes` found.
        listener: receives progress.

    Raises:
        UsageError: a state is undecided, an open size has no value, or a type is none of a bundle's.
        RunError, EndedError: see `Runner.run`.
    """
    inputs = Inputs(foreign, read_structure(foreign.model.graph, foreign.inputs), {**segment, **choices.position_axes})
    if settings := sorted(inputs.structure.branching):
        name = settings[0]
        such = some([*map(str, inputs.structure.compared.get(name) or [0, 1])])
        raise UsageError(
            f"{name} decides which part of the graph runs, expected one part; give --fix {name}=VALUE, such as {such}"
        )
    listener.stage("find sizes and inputs with which it runs")
    inputs.find(runner)
    listener.stage("pair inputs and outputs")
    states = _states({**choices.states, **hidden}, inputs, runner)
    listener.stage("change sizes and single places")
    _check_axes("--position-axis", choices.position_axes, inputs)
    tables = _Tables(inputs, states, Behaviour(inputs, runner, states).axes(), choices, frozenset(hidden))
    for context in inputs.structure.contexts:
        listener.warn(
            f"convolution {context.node} reads {context.before} positions of {context.input} before those that are "
            "new: give them in front of these in each call"
        )
    return tables.step()


def segment_axes(foreign: Foreign, told: Mapping[str, int], runner: Runner) -> dict[str, int]:
    """Find the axes of positions of a graph's inputs and outputs; its hidden states may still be hidden.

    Raises:
        RunError, EndedError: see `Runner.run`.
    """
    inputs = Inputs(foreign, read_structure(foreign.model.graph, foreign.inputs), told)
    inputs.find(runner)
    return Behaviour(inputs, runner, pair(inputs, runner).states).axes().positions


def keep_outputs(foreign: Foreign, choices: Choices) -> bool:
    """Remove unwanted outputs from a graph, in place, and nodes that only they need; return whether any were removed.

    Outputs that may be a state's next value stay: results of recurrent operators, and outputs with names of states.

    Raises:
        UsageError: `choices.outputs` names no output of the graph.
    """
    outputs = {port.name: port for port in foreign.outputs}
    if unknown := [name for name in choices.outputs if name not in outputs]:
        raise UsageError(f"the file returns no {some(unknown)}, expected {some([*outputs], 9)}; check --output")
    if (pairs := len(foreign.inputs) * len(outputs)) > MOST_NAMED:
        raise UsageError(f"{pairs} pairs of inputs and outputs, expected at most {MOST_NAMED}; no model has so many")
    graph = foreign.model.graph
    names = {*(choices.outputs or outputs), *choices.states.values(), *read_structure(graph, foreign.inputs).carried}
    for port in foreign.inputs:
        names |= {name for name, one in outputs.items() if one.dtype == port.dtype and likeness(port.name, name)}
    left = [value for value in graph.outputs if value.name in names]
    dropped = len(left) < len(graph.outputs)
    if dropped:
        graph.outputs.clear()
        graph.outputs.extend(left)
        RemoveUnusedNodesPass()(foreign.model)
    return dropped


def _states(known: Mapping[str, str], inputs: Inputs, runner: Runner) -> list[State]:
    values, first, carried = inputs.given, inputs.first, inputs.structure.carried
    for name, output in known.items():
        if name not in values or (output and output not in first):
            raise UsageError(
                f"the file has no {name if name not in values else output}, it takes {some([*values], 9)} and gives "
                f"{some([*first], 9)}; check --state"
            )
        ends = [end for end, names in carried.items() if name in names and first[end].shape == values[name].shape]
        if ends and output not in ends:
            raise UsageError(
                f"{name} is said to come back as {output or 'nothing'}, but a recurrent operator starts from it and "
                f"ends in {some(ends)}; correct --state {name}={output}, or the folder that says so"
            )
    pairs = pair(inputs, runner, known)
    if pairs.undecided:
        may = "; ".join(f"{one.input} as {' or '.join(one.outputs)}" for one in pairs.undecided)
        raise UsageError(
            f"inputs may come back as outputs of their shape, which neither a node nor a name says: {may}. Whoever "
            f"trained the model knows; give {options_of(pairs.undecided)}, with other outputs where these are wrong, "
            "and none where an input is no state"
        )
    if not pairs.states:
        raise UsageError(
            "the file has no state to carry from call to call, expected one: a state hidden in an LSTM, GRU, RNN or "
            "convolution becomes one by --open, a pair that is one is named by --state IN=OUT; see txl-deploy inspect"
        )
    if growing := [one for one in pairs.states if one.grows is not None]:
        rows = {one.input: inputs.rows_of(one.input, one.grows or 0) for one in growing}
        options = " ".join(f"--window {name}={count}" for name, count in rows.items())
        raise UsageError(
            f"state {growing[0].input} is longer after each call, without an end, which no bundle has; give the rows "
            f"that are kept, as in {options}"
        )
    return pairs.states


def _check_axes(option: str, axes: Mapping[str, int], inputs: Inputs) -> None:
    """Refuse axes that the graph lacks, or that have different sizes."""
    shapes = {name: array.shape for name, array in (inputs.given | inputs.first).items()}
    for name, axis in axes.items():
        if axis >= len(shapes.get(name, ())):
            raise UsageError(
                f"{option} is {name}={axis}, expected one of {some([*shapes], 9)} and one of its axes; check it"
            )
    if len({shapes[name][axis] for name, axis in axes.items()}) > 1:
        places = ", ".join(f"{shapes[name][axis]} in {name}" for name, axis in axes.items())
        raise UsageError(f"{option} names axes of {places}, expected one size; check it")


@dataclass(frozen=True)
class _Tables:
    """Turns a graph's inputs, outputs and states into a step's tables."""

    inputs: Inputs
    states: Sequence[State]
    axes: Axes
    choices: Choices
    hidden: frozenset[str]

    def step(self) -> FileStep:
        """Return the tables of the step."""
        after = {state.input: state.output for state in self.states}
        foreign, values = self.inputs.foreign, self.inputs.given
        ports, outputs = ({port.name: port for port in side} for side in (foreign.inputs, foreign.outputs))
        taken = [name for name in ports if name not in after]
        returned = [name for name in outputs if name not in after.values()]
        names, own = _names([*taken, *returned]), _names([*after])  # an output may have the same name as an input
        _check_axes("--batch-axis", self.choices.batch_axes, self.inputs)
        if unknown := [name for name in self.choices.initial if name not in after]:
            raise UsageError(f"--initial has {some(unknown)}, expected states: {some([*after], 9)}; check its names")
        places = [(name, axis) for name, axis in self.axes.positions.items() if name in ports]
        lengths = {values[name].shape[axis] for name, axis in places}
        fixed = any(isinstance(ports[name].shape[axis], int) for name, axis in places)
        return FileStep(
            tuple(map(self._input, [ports[name] for name in taken], names)),
            tuple(map(self._output, [outputs[name] for name in returned], names[len(taken) :])),
            tuple((self._state(ports[name], plain), after[name]) for name, plain in zip(after, own, strict=True)),
            self._sequences(ports),
            1 if not lengths else max(lengths) if fixed else None,
            frozenset(after) - self.hidden,
        )

    def _sequences(self, ports: Mapping[str, Port]) -> int | None:
        """Return the number of sequences if the file fixes it; None if it is open."""
        sizes = {port.shape[axis] for name, port in ports.items() if (axis := self._batch(name)) is not None}
        numbers = sorted(size for size in sizes if isinstance(size, int))
        if len(numbers) > 1:
            raise UsageError(
                f"the file takes {some([*map(str, numbers)])} sequences at once, expected one number of them; give "
                "--batch-axis NAME=N for each input whose sequences stand elsewhere"
            )
        return numbers[0] if numbers else None if sizes else 1

    def _batch(self, name: str) -> int | None:
        """Return the axis of sequences: the user's, else the one that runs showed, else the first of the right size."""
        declared, shown = self.choices.batch_axes, self.axes.batch.get(name)
        if name in declared:
            return declared[name]
        arrays = self.inputs.given | self.inputs.first
        sizes, others = arrays[name].shape, {arrays[one].shape[axis] for one, axis in declared.items()}
        count = others.pop() if len(others) == 1 else self.axes.sequences
        if shown is not None and (not declared or sizes[shown] == count):
            return shown
        if not declared and (self.axes.batch or count != 1):
            return None
        places = [axis for axis, size in enumerate(sizes) if size == count and axis != self.axes.positions.get(name)]
        by_nodes = self.inputs.structure.kinds.sequences.get(name)
        return by_nodes if by_nodes in places else next(iter(places), None)

    def _letter(self, name: str, axis: int) -> str:
        if axis == self._batch(name):
            return "B"
        return "L" if self.axes.positions.get(name) == axis else ""

    def _shape(self, name: str, sizes: Sequence[int], declared: Sequence[int | str]) -> tuple[int | str, ...]:
        shape = tuple(self._letter(name, axis) or int(size) for axis, size in enumerate(sizes))
        for axis, size in enumerate(shape):
            opened = isinstance(declared[axis], str) and declared[axis] not in self.inputs.fixed
            if opened and isinstance(size, int) and name not in self.inputs.first:
                open_size = name_of_size(name, axis, str(declared[axis]))
                raise UsageError(
                    f"{name} is open on axis {axis}, and it is neither sequences nor positions that come back, "
                    f"expected a size; give --fix {open_size}={size} or another, --batch-axis {name}={axis} or "
                    f"--position-axis {name}={axis}"
                )
        return shape

    def _input(self, port: Port, name: str) -> Side:
        shape, rows = self._shape(port.name, self.inputs.given[port.name].shape, port.shape), self.inputs.structure.rows
        tokens = rows.get(port.name) if port.dtype in ("int64", "int32") else None
        return Side(port.name, port.dtype, InputSpec(name, shape, kind_of(port.name, port.dtype), tokens))

    def _output(self, port: Port, name: str) -> Side:
        array = self.inputs.first[port.name]
        shape = self._shape(port.name, array.shape, array.shape)
        return Side(port.name, array.dtype.name, OutputSpec(name, shape, self._role(array)))

    def _role(self, array: Array) -> str | None:
        """Return "logits" or "logprobs" if an output has a number for each token that is read; else None."""
        rows = {self.inputs.structure.rows.get(port.name) for port in self.inputs.foreign.inputs} - {None}
        if len(rows) != 1 or array.ndim < 2 or array.dtype != np.float32 or array.shape[-1] not in rows:
            return None
        sums = np.exp(array.astype(np.float64)).sum(-1)
        return "logprobs" if np.allclose(sums, 1, atol=1e-3) else "logits"

    def _state(self, port: Port, name: str) -> Side:
        shape = self._shape(port.name, self.inputs.given[port.name].shape, port.shape)
        initial: Any = 0.0
        if port.name in self.choices.initial:
            initial = _first_value(port, self.choices.initial[port.name])
        return Side(port.name, port.dtype, StateSpec(name, shape, kind_of(port.name, port.dtype), initial))


def _first_value(port: Port, values: Array) -> Tensor:
    """Convert the initial value of a state to a bundle's dtype; refuse values that the dtype would change."""
    own, value = in_bundle(kind_of(port.name, port.dtype)), np.asarray(values)
    if value.dtype.kind in "fiub":
        # a value that does not fit becomes a different number, which the comparison below finds
        with np.errstate(all="ignore"):
            first = value.astype(own) if own == "float32" else value.astype(port.dtype).astype(own)
        if own == "float32" or np.array_equal(first, value):
            return torch.from_numpy(first)
    raise UsageError(
        f"{port.name} begins with {brief(printable(' '.join(str(value).split())))}, expected {port.dtype}"
        f"{' of at most 32 bits, which a bundle has for it' if port.dtype in ('int64', 'uint32') else ''}; check "
        "--initial"
    )


def _names(ports: Sequence[str]) -> list[str]:
    """Return names that a bundle allows, all different, e.g. "x_1" for "x.1"."""
    names: list[str] = []
    for name in ports:
        plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
        plain = plain if re.match("[A-Za-z_]", plain) and plain not in ("valid", "fill", "head") else f"_{plain}"
        while plain in names:
            plain += "_"
        names.append(plain)
    return names
