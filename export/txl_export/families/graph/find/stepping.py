"""What a foreign graph takes, returns and remembers, as the tables of a step: by runs, and by what the user says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from txl_runtime.errors import UsageError, brief, printable, some
from txl_runtime.listener import Listener
from txl_runtime.types import Array

from txl_export.families.graph.find.behaviour import Axes, Behaviour, name_of_size, positions
from txl_export.families.graph.find.pairing import DECIDES, EXACT, PROOFS, State, pair
from txl_export.families.graph.find.structure import read_structure
from txl_export.families.graph.find.trying import Inputs
from txl_export.families.graph.take.file_module import FileStep, Side, kind_of
from txl_export.families.graph.take.reading import Foreign, Port
from txl_export.families.graph.take.running import Runner
from txl_export.families.own_module.sizes import in_bundle
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec


@dataclass(frozen=True)
class Choices:
    """What was asked of an export of a file.

    Attributes:
        states: inputs and the outputs that are their next values; "" where an input is no state.
        fix: see `fixing.fix`.
        open: whether states that the graph hides become explicit.
        initial: what states hold first, by their inputs' names.
        batch_axes: where sequences stand, by the names of inputs and outputs.
    """

    states: Mapping[str, str]
    fix: Mapping[str, Any]
    open: bool
    initial: Mapping[str, Array]
    batch_axes: Mapping[str, int]


def find_step(
    foreign: Foreign,
    choices: Choices,
    hidden: Mapping[str, str],
    segment: Mapping[str, int],
    runner: Runner,
    heard: Listener,
) -> FileStep:
    """What a graph takes, returns and remembers.

    Args:
        foreign: the graph, whose settings are fixed and whose hidden states are open.
        choices: what the user knows of it.
        hidden: inputs and outputs of states that were opened.
        segment: where positions stand, as far as that is known; see `segment_axes`.
        runner: with the graph.
        heard: hears of the stages.

    Raises:
        UsageError: something is undecided, open without end, or of a type that no bundle has.
        RunError, EndedError: see `Runner.run`.
    """
    inputs = Inputs(foreign, read_structure(ir.to_proto(foreign.model), foreign.inputs))
    if settings := sorted(inputs.structure.branching):
        name = settings[0]
        such = some([*map(str, inputs.structure.compared.get(name) or [0, 1])])
        raise UsageError(
            f"{name} decides which part of the graph runs, expected one part; give --fix {name}=VALUE, such as {such}"
        )
    heard.stage("find sizes and inputs with which it runs")
    first = inputs.find(runner)
    heard.stage("pair inputs and outputs")
    states = _states(foreign, {**choices.states, **hidden}, inputs, runner, first)
    heard.stage("change sizes and single places")
    axes = Behaviour(inputs, runner, states).axes()
    segment = segment or positions(inputs, states, axes, first)
    for window in inputs.structure.windows:
        if not window.padded:
            heard.warn(
                f"convolution {window.node} reads {window.before} positions of {window.input} before those that are "
                "new: give them in front of these in each call"
            )
    return _Tables(foreign, inputs, states, axes, first, choices, frozenset(hidden), segment).step()


def segment_axes(foreign: Foreign, runner: Runner) -> dict[str, int]:
    """Where positions stand in what a graph takes and returns, whose hidden states need not be open; nothing where none
    do.

    Raises:
        RunError, EndedError: see `Runner.run`.
    """
    inputs = Inputs(foreign, read_structure(ir.to_proto(foreign.model), foreign.inputs))
    first = inputs.find(runner)
    states = pair(inputs, runner, first).states
    return positions(inputs, states, Behaviour(inputs, runner, states).axes(), first)


def _states(
    foreign: Foreign, known: Mapping[str, str], inputs: Inputs, runner: Runner, first: Mapping[str, Array]
) -> list[State]:
    ports = {port.name: port for port in foreign.inputs}
    for name, output in known.items():
        if name not in ports or (output and output not in first):
            raise UsageError(
                f"the file has no {name if name not in ports else output}, it takes {some([*ports], 9)} and gives "
                f"{some([*first], 9)}; check --state"
            )
    found = pair(inputs, runner, first)
    shown = {one.input: one for one in found.states if one.proof in EXACT}
    if wrong := [name for name, output in known.items() if name in shown and shown[name].output != output]:
        one = shown[wrong[0]]
        raise UsageError(
            f"{one.input} is said to come back as {known[one.input] or 'nothing'}, but {PROOFS[one.proof]}, which is "
            f"{one.output}; correct --state {one.input}={known[one.input]}, or the folder that says so"
        )
    if left := [one for one in found.undecided if one.input not in known]:
        may = " or ".join(left[0].outputs)
        raise UsageError(
            f"{left[0].input} may be a state that comes back as {may}: no node shows it. {DECIDES}; give --state "
            f"{left[0].input}={left[0].outputs[0]}, or --state {left[0].input}= if it is none"
        )
    told = [
        State(name, output, ports[name].shape, ports[name].dtype, "named") for name, output in known.items() if output
    ]
    taken = {*known, *known.values()}
    states = [one for one in found.states if one.input not in taken and one.output not in taken] + told
    if not states:
        raise UsageError(
            "the file has no state to carry from call to call, expected one: a state hidden in an LSTM, GRU, RNN or "
            "convolution becomes one by --open, a pair that is one is named by --state IN=OUT; see txl-deploy inspect"
        )
    if growing := [one for one in states if one.grows is not None]:
        raise UsageError(
            f"state {growing[0].input} is longer after each call, without an end, which no bundle has; expected one "
            "whose window has a fixed size: export the module with its oldest rows cut off"
        )
    order = [*ports]
    return sorted(states, key=lambda one: order.index(one.input))


@dataclass(frozen=True)
class _Tables:
    """A graph's inputs, outputs and states, made a step's tables."""

    foreign: Foreign
    inputs: Inputs
    states: Sequence[State]
    axes: Axes
    first: Mapping[str, Array]
    choices: Choices
    hidden: frozenset[str]
    segment: Mapping[str, int]

    def step(self) -> FileStep:
        """See `find_step`."""
        after = {state.input: state.output for state in self.states}
        ports = {port.name: port for port in self.foreign.inputs}
        outputs = {port.name: port for port in self.foreign.outputs}
        given = [name for name in ports if name not in after]
        returned = [name for name in outputs if name not in after.values()]
        names, own = _names([*given, *returned]), _names([*after])  # an output may be an input, and have its name
        for name, axis in self.choices.batch_axes.items():
            known = {**ports, **outputs}
            if name not in known or axis >= len(self._sizes(name)):
                raise UsageError(
                    f"--batch-axis is {name}={axis}, expected one of {some([*known], 9)} and one of its axes; check it"
                )
        if unknown := [name for name in self.choices.initial if name not in after]:
            raise UsageError(f"--initial has {some(unknown)}, expected states: {some([*after], 9)}; check its names")
        lengths = {self.first_input(name).shape[axis] for name, axis in self.segment.items() if name in ports}
        fixed = any(isinstance(ports[name].shape[axis], int) for name, axis in self.segment.items() if name in ports)
        return FileStep(
            tuple(map(self._input, [ports[name] for name in given], names)),
            tuple(map(self._output, [outputs[name] for name in returned], names[len(given) :])),
            tuple((self._state(ports[name], plain), after[name]) for name, plain in zip(after, own, strict=True)),
            self._sequences(ports),
            1 if not lengths else max(lengths) if fixed else None,
            frozenset(after) - self.hidden,
        )

    def first_input(self, name: str) -> Array:
        """What an input was in the first run."""
        return self.inputs.draw(0)[name]

    def _sizes(self, name: str) -> tuple[int, ...]:
        """In the first run."""
        return self.first[name].shape if name in self.first else self.first_input(name).shape

    def _sequences(self, ports: Mapping[str, Port]) -> int | None:
        """B, where the file fixes it."""
        found = {port.shape[axis] for name, port in ports.items() if (axis := self._batch(name)) is not None}
        numbers = sorted(size for size in found if isinstance(size, int))
        if len(numbers) > 1:
            raise UsageError(
                f"the file takes {some([*map(str, numbers)])} sequences at once, expected one number of them; give "
                "--batch-axis NAME=N for each input whose sequences stand elsewhere"
            )
        return numbers[0] if numbers else None if found else 1

    def _batch(self, name: str) -> int | None:
        """Where sequences stand: as the user says, as the file shows, or of fixed sizes the first that fits."""
        told, shown = self.choices.batch_axes, self.axes.batch.get(name)
        if name in told:
            return told[name]
        sizes, others = self._sizes(name), {self._sizes(one)[axis] for one, axis in told.items()}
        count = others.pop() if len(others) == 1 else self.axes.sequences
        if shown is not None and (not told or sizes[shown] == count):
            return shown
        if not told and (self.axes.batch or count != 1):
            return None
        places = [axis for axis, size in enumerate(sizes) if size == count and axis != self.segment.get(name)]
        return next(iter(places), None)

    def _letter(self, name: str, axis: int) -> str:
        if axis == self._batch(name):
            return "B"
        return "L" if self.segment.get(name) == axis else ""

    def _shape(self, name: str, sizes: Sequence[int], said: Sequence[int | str]) -> tuple[int | str, ...]:
        shape = tuple(self._letter(name, axis) or int(size) for axis, size in enumerate(sizes))
        for axis, size in enumerate(shape):
            if isinstance(said[axis], str) and isinstance(size, int) and name not in self.first:
                open_size = name_of_size(name, axis, str(said[axis]))
                raise UsageError(
                    f"{name} is open on axis {axis}, and it is neither sequences nor positions that come back, "
                    f"expected a size; give --fix {open_size}={size} or another, or --batch-axis {name}={axis}"
                )
        return shape

    def _input(self, port: Port, name: str) -> Side:
        shape, rows = self._shape(port.name, self.first_input(port.name).shape, port.shape), self.inputs.structure.rows
        tokens = rows.get(port.name) if port.dtype in ("int64", "int32") else None
        return Side(port.name, port.dtype, InputSpec(name, shape, kind_of(port.name, port.dtype), tokens))

    def _output(self, port: Port, name: str) -> Side:
        found = self.first[port.name]
        shape = self._shape(port.name, found.shape, found.shape)
        return Side(port.name, found.dtype.name, OutputSpec(name, shape, self._role(found)))

    def _role(self, found: Array) -> str | None:
        """The next token's logits, of a graph that reads tokens and returns a number for each."""
        rows = {self.inputs.structure.rows.get(port.name) for port in self.foreign.inputs} - {None}
        if len(rows) != 1 or found.ndim < 2 or found.dtype != np.float32 or found.shape[-1] not in rows:
            return None
        sums = np.exp(found.astype(np.float64)).sum(-1)
        return "logprobs" if np.allclose(sums, 1, atol=1e-3) else "logits"

    def _state(self, port: Port, name: str) -> Side:
        shape = self._shape(port.name, self.first_input(port.name).shape, port.shape)
        initial: Any = 0.0
        if port.name in self.choices.initial:
            initial = _first_value(port, self.choices.initial[port.name])
        return Side(port.name, port.dtype, StateSpec(name, shape, kind_of(port.name, port.dtype), initial))


def _first_value(port: Port, values: Array) -> Tensor:
    """What a state begins with, as a bundle has it."""
    own, found = in_bundle(kind_of(port.name, port.dtype)), np.asarray(values)
    if found.dtype.kind in "fiub":
        with np.errstate(all="ignore"):  # what does not fit is another number then
            first = found.astype(own) if own == "float32" else found.astype(port.dtype).astype(own)
        if own == "float32" or np.array_equal(first, found):
            return torch.from_numpy(first)
    raise UsageError(
        f"{port.name} begins with {brief(printable(' '.join(str(found).split())))}, expected {port.dtype}"
        f"{' of at most 32 bits, which a bundle has for it' if port.dtype in ('int64', 'uint32') else ''}; check "
        "--initial"
    )


def _names(given: Sequence[str]) -> list[str]:
    """Names that a bundle may have, each its own."""
    found: list[str] = []
    for name in given:
        plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
        plain = plain if re.match("[A-Za-z_]", plain) and plain not in ("valid", "fill", "head") else f"_{plain}"
        while plain in found:
            plain += "_"
        found.append(plain)
    return found
