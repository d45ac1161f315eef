"""Pairs inputs and outputs of an ONNX graph as states: by recurrent operators, then by names; else the user decides.

An equal shape proves nothing: a denoiser without state also returns an array of its input's shape. So the user is asked
    about pairs that neither a node nor a name shows to be a state.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from txl_runtime.types import Array

from txl_export.families.graph.find.naming import likeness, means_data
from txl_export.families.graph.find.trying import Inputs, other_than
from txl_export.families.graph.take.running import RunError, Runner

MOST_PAIRS = 2**13
"""Maximum number of pairs that are examined."""
PROOFS = {"recurrent": "by a recurrent operator", "named": "by its name", "said": "by --state"}
"""Reasons why a pair is a state, the strongest first, each with the words that reports use."""
Pair = tuple[str, str]
"""Names of an input and of an output."""


@dataclass(frozen=True)
class State:
    """An input and an output that are one state.

    Attributes:
        input, output: the names of both.
        shape: the input's shape; open sizes are texts.
        dtype: the dtype of both.
        proof: a key of `PROOFS`.
        grows: the axis on which the output is longer; None if both shapes are equal.
    """

    input: str
    output: str
    shape: tuple[int | str, ...]
    dtype: str
    proof: str
    grows: int | None = None


@dataclass(frozen=True)
class Undecided:
    """An input that may be a state.

    Attributes:
        input, outputs: its name, and the names of outputs that may be its next value.
        suggested: the output to try; "" if the pair would leave no input or no output for data.
    """

    input: str
    outputs: tuple[str, ...]
    suggested: str


@dataclass
class Paired:
    """The pairs that are states, and the inputs about which the user has to decide."""

    states: list[State] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)


def pair(inputs: Inputs, runner: Runner, said: Mapping[str, str] | None = None) -> Paired:
    """Decide which inputs and outputs are states.

    Args:
        inputs, runner: the graph, and inputs with which it ran.
        said: the user's states: for each input, the output that is its next value, or "" if the input is no state.

    Raises:
        RunError: more pairs have fitting shapes than in any real model.
        EndedError: see `Runner.run`.
    """
    return _Pairing(inputs, runner, said or {}).decide()


class _Pairing:
    """Decides which of the pairs of inputs and outputs are states."""

    def __init__(self, inputs: Inputs, runner: Runner, stated: Mapping[str, str]) -> None:
        self._inputs, self._runner, self._stated = inputs, runner, stated
        self._given, self._first, self._other = inputs.given, inputs.first, inputs.draw(1)
        self._ports = {port.name: port for port in inputs.foreign.inputs}
        alike = defaultdict[tuple[str, int], list[str]](list)
        for name, array in self._first.items():
            alike[array.dtype.name, array.ndim].append(name)
        pairs = [(name, end) for name, one in self._given.items() for end in alike[one.dtype.name, one.ndim]]
        if len(pairs) > MOST_PAIRS:
            raise RunError(f"{len(pairs)} pairs of inputs and outputs fit, expected at most {MOST_PAIRS}")
        self._grown = {pair: axes for pair in pairs if (axes := self._fits(*pair)) is not None}
        self._paired = {name: output for name, output in stated.items() if output}

    def decide(self) -> Paired:
        """Return the pairs that are states, and the inputs about which the user has to decide."""
        reasons, carried = dict.fromkeys(self._paired, "said"), self._inputs.structure.carried
        alike = {pair: likeness(*pair) for pair in self._free(self._grown)}
        recurrent = {pair: how for pair, how in alike.items() if pair[0] in carried.get(pair[1], ())}
        self._paired |= (chosen := _best(recurrent))
        reasons |= dict.fromkeys(chosen, "recurrent")
        named = _best({pair: alike[pair] for pair in self._free(alike) if alike[pair]})
        self._paired |= (chosen := self._shown(named))
        reasons |= dict.fromkeys(chosen, "named")
        result = Paired()
        for name, port in self._ports.items():
            if name in reasons:
                grows = next(iter(self._grown.get((name, self._paired[name]), [])), None)
                result.states.append(State(name, self._paired[name], port.shape, port.dtype, reasons[name], grows))
        left = defaultdict[str, list[str]](list)
        for name, output in self._free(self._grown):
            left[name].append(output)
        asked = {
            name: outputs
            for name, outputs in left.items()
            if self._may_be_state(name, outputs) and not (self._inputs.stretches(name) or means_data(name))
        }
        tried = self._suggested(asked)
        result.undecided = [Undecided(name, tuple(outputs), tried.get(name, "")) for name, outputs in asked.items()]
        return result

    def _fits(self, port_name: str, returned: str) -> list[int] | None:
        """Compare shapes: [] if an output has the input's shape, [axis] if it is longer along one open axis.

        None for any other shape, because such an output cannot be the input's next value.
        """
        array, result, port = self._given[port_name], self._first[returned], self._ports[port_name]
        unlike = [axis for axis, (a, b) in enumerate(zip(array.shape, result.shape, strict=True)) if a != b]
        grows = [
            axis for axis in unlike if isinstance(port.shape[axis], str) and result.shape[axis] > array.shape[axis]
        ]
        return grows if len(unlike) < 2 and unlike == grows else None

    def _free(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Return the pairs whose input and output belong to no chosen state."""
        inputs, returned = {*self._paired, *self._stated}, {*self._paired.values()}
        return [pair for pair in pairs if pair[0] not in inputs and pair[1] not in returned]

    def _shown(self, named: Mapping[str, str]) -> dict[str, str]:
        """Return those pairs of similar names that test runs do not contradict.

        Data must still go in and out besides these states. And a change of the state must change another output; or,
        for a state without effect, a change of data must change the state.
        """
        named = {name: output for name, output in named.items() if not self._inputs.stretches(name)}
        pairs = self._paired | named
        if not (self._data(pairs) and {*self._first} - {*pairs.values()}):
            return {}
        fed = self._changed(self._data(pairs))
        return {name: output for name, output in named.items() if output in fed or self._changed([name]) - {output}}

    def _data(self, paired: Collection[str]) -> list[str]:
        return [name for name in self._ports if name not in paired and self._inputs.varies(name)]

    def _changed(self, names: Iterable[str]) -> set[str]:
        """Return the outputs that change if some inputs change."""
        others = {name: other_than(self._given[name], self._other[name]) for name in names}
        with contextlib.suppress(RunError):  # perhaps an input is a setting that allows no other value
            results = self._runner.run({**self._given, **others})
            return {name for name, before in self._first.items() if not _equal(before, results.get(name))}
        return set()

    def _may_be_state(self, name: str, outputs: Collection[str]) -> bool:
        """Return whether data would still go in and out if this input were a state."""
        others = {*self._first} - {*self._paired.values(), *outputs}
        return bool(self._data({name, *self._paired})) and (not self._paired or bool(others))

    def _suggested(self, asked: Mapping[str, Collection[str]]) -> dict[str, str]:
        """Choose an output to try for each input, last inputs first, because states usually come after data."""
        pairs = dict[str, str]()
        for name in reversed([*asked]):
            paired = self._paired | pairs
            free = [output for output in asked[name] if output not in paired.values()]
            if free and self._data({**paired, name: free[0]}) and {*self._first} - {*paired.values(), free[0]}:
                pairs[name] = free[0]
        return pairs


def options_of(undecided: Iterable[Undecided]) -> str:
    """Return the --state options that decide about all these inputs, ready to be typed."""
    return shlex.join(word for one in undecided for word in ("--state", f"{one.input}={one.suggested}"))


def _best(scores: Mapping[Pair, int]) -> dict[str, str]:
    """Return the pairs whose score beats every other pair of their input and of their output."""
    rivals = defaultdict[tuple[int, str], list[int]](list)
    for pair, how in scores.items():
        for side in enumerate(pair):
            rivals[side].append(how)
    return {
        pair[0]: pair[1]
        for pair, how in scores.items()
        if all(max(rivals[side]) == how and rivals[side].count(how) == 1 for side in enumerate(pair))
    }


def _equal(before: Array, after: Array | None) -> bool:
    return after is not None and np.array_equal(before, after, equal_nan=before.dtype.kind == "f")
