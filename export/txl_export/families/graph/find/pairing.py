"""Which input and output of a foreign graph are one state: by a recurrent operator, else by their names, else asked.

A graph without state returns arrays of an input's shape, too: a denoiser's picture, a residual block's features. So a
shape alone proves nothing, and whatever neither a node nor a name says is asked of whoever trained the model.
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
"""Pairs that are looked at."""
PROOFS = {"recurrent": "by a recurrent operator", "named": "by its name", "said": "by --state"}
"""What says that a pair is a state, the strongest first."""
Pair = tuple[str, str]
"""Names of an input and an output."""


@dataclass(frozen=True)
class State:
    """A pair that is a state.

    Attributes:
        input, output: their names.
        shape: of the input; open sizes are texts.
        dtype: of both.
        proof: a key of `PROOFS`.
        grows: the axis on which the output is longer; None where it is as long.
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
        input, outputs: its name, and those of the outputs that it may be returned as.
        suggested: the output to try, "" for none: some data has to come in, and go out.
    """

    input: str
    outputs: tuple[str, ...]
    suggested: str


@dataclass
class Paired:
    """What was decided.

    Attributes:
        states, undecided: see there.
        data: inputs with an output of their shape that cannot be a state, and why.
    """

    states: list[State] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)


def pair(inputs: Inputs, runner: Runner, said: Mapping[str, str] | None = None) -> Paired:
    """Decide which inputs and outputs are states.

    Args:
        inputs: with sizes for which the graph runs.
        runner: with the graph.
        said: inputs and outputs that are states as the user says, or "" for an input that is none.

    Raises:
        RunError: more pairs fit than any model has.
        EndedError: see `Runner.run`.
    """
    return _Pairing(inputs, runner, said or {}).decide()


class _Pairing:
    """The pairs that there may be, and those that were taken."""

    def __init__(self, inputs: Inputs, runner: Runner, said: Mapping[str, str]) -> None:
        self._inputs, self._runner, self._said = inputs, runner, said
        self._given, self._first, self._other = inputs.given, inputs.first, inputs.draw(1)
        self._ports = {port.name: port for port in inputs.foreign.inputs}
        alike = defaultdict[tuple[str, int], list[str]](list)
        for name, array in self._first.items():
            alike[array.dtype.name, array.ndim].append(name)
        pairs = [(name, end) for name, one in self._given.items() for end in alike[one.dtype.name, one.ndim]]
        if len(pairs) > MOST_PAIRS:
            raise RunError(f"{len(pairs)} pairs of inputs and outputs fit, expected at most {MOST_PAIRS}")
        self._grown = {pair: axes for pair in pairs if (axes := self._fits(*pair)) is not None}
        self._taken = {name: output for name, output in said.items() if output}

    def decide(self) -> Paired:
        """See `pair`."""
        found, carried = dict.fromkeys(self._taken, "said"), self._inputs.structure.carried
        alike = {pair: likeness(*pair) for pair in self._free(self._grown)}
        recurrent = {pair: how for pair, how in alike.items() if pair[0] in carried.get(pair[1], ())}
        self._taken |= (chosen := _best(recurrent))
        found |= dict.fromkeys(chosen, "recurrent")
        named = _best({pair: alike[pair] for pair in self._free(alike) if alike[pair]})
        self._taken |= (chosen := self._shown(named))
        found |= dict.fromkeys(chosen, "named")
        result = Paired()
        for name, port in self._ports.items():
            if name in found:
                grows = next(iter(self._grown.get((name, self._taken[name]), [])), None)
                result.states.append(State(name, self._taken[name], port.shape, port.dtype, found[name], grows))
        left = defaultdict[str, list[str]](list)
        for name, output in self._free(self._grown):
            left[name].append(output)
        result.data = {name: why for name, outputs in left.items() if (why := self._no_state(name, outputs))}
        asked = {
            name: outputs
            for name, outputs in left.items()
            if name not in result.data and not (self._inputs.stretches(name) or means_data(name))
        }
        tried = self._suggested(asked)
        result.undecided = [Undecided(name, tuple(outputs), tried.get(name, "")) for name, outputs in asked.items()]
        return result

    def _fits(self, given: str, returned: str) -> list[int] | None:
        """The axes on which what is returned is longer, one at most; None where it cannot be given again."""
        array, found, port = self._given[given], self._first[returned], self._ports[given]
        unlike = [axis for axis, (a, b) in enumerate(zip(array.shape, found.shape, strict=True)) if a != b]
        grows = [axis for axis in unlike if isinstance(port.shape[axis], str) and found.shape[axis] > array.shape[axis]]
        return grows if len(unlike) < 2 and unlike == grows else None

    def _free(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those pairs of which neither side is taken."""
        given, returned = {*self._taken, *self._said}, {*self._taken.values()}
        return [pair for pair in pairs if pair[0] not in given and pair[1] not in returned]

    def _shown(self, named: Mapping[str, str]) -> dict[str, str]:
        """Those pairs of one name that a run does not speak against: data comes in and goes out beside them, and a
        change of the state changes another output, or, of one that nobody reads, what comes in changes the state.
        """
        named = {name: output for name, output in named.items() if not self._inputs.stretches(name)}
        taken = self._taken | named
        if not (self._data(taken) and {*self._first} - {*taken.values()}):
            return {}
        fed = self._changed(self._data(taken))
        return {name: output for name, output in named.items() if output in fed or self._changed([name]) - {output}}

    def _data(self, taken: Collection[str]) -> list[str]:
        return [name for name in self._ports if name not in taken and self._inputs.varies(name)]

    def _changed(self, names: Iterable[str]) -> set[str]:
        """Outputs that are others where some inputs are."""
        others = {name: other_than(self._given[name], self._other[name]) for name in names}
        with contextlib.suppress(RunError):  # a setting, perhaps, of which nothing else is allowed
            found = self._runner.run({**self._given, **others})
            return {name for name, before in self._first.items() if not _equal(before, found.get(name))}
        return set()

    def _no_state(self, name: str, outputs: Collection[str]) -> str:
        """Why an input that has outputs of its shape is no state; "" where it may be one."""
        if not self._data({name, *self._taken}):
            return "is the one input with data: fed back, nothing new would ever come in"
        if self._taken and not {*self._first} - {*self._taken.values(), *outputs}:
            return "if it were a state, too, the graph would return nothing else"
        return ""

    def _suggested(self, asked: Mapping[str, Collection[str]]) -> dict[str, str]:
        """Outputs to try, for the last inputs first, because data is given before states as a rule."""
        found = dict[str, str]()
        for name in reversed([*asked]):
            taken = self._taken | found
            free = [output for output in asked[name] if output not in taken.values()]
            if free and self._data({**taken, name: free[0]}) and {*self._first} - {*taken.values(), free[0]}:
                found[name] = free[0]
        return found


def options_of(undecided: Iterable[Undecided]) -> str:
    """The options that answer everything which is undecided, ready to be typed."""
    return shlex.join(word for one in undecided for word in ("--state", f"{one.input}={one.suggested}"))


def _best(scores: Mapping[Pair, int]) -> dict[str, str]:
    """The pairs that are more alike than every other pair of their input and of their output."""
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
