"""Which input and output of a foreign graph are one state: by what the graph does, and never by a name alone.

A graph without state returns arrays of an input's shape, too: a denoiser's picture, a residual block's features. Fed
back they would change what comes later, so that alone proves nothing. What does:

* a recurrent operator, or a cell written out, starts from the input and ends in the output;
* the output holds numbers of the input at other places, behind or before new ones that do not depend on it: a window
  that moves on, a cache that grows.

Names decide between pairs that are alike, and they are believed where nothing speaks against a pair. A layer's gate and
a sequence that another one is put behind look like a cell and a cache, so that words that say two things stand against
those. Whatever remains is undecided, and said to be.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from txl_runtime.types import Array

from txl_export.families.graph.find.naming import STATES, counted_alike, likeness, most_alike
from txl_export.families.graph.find.structure import Value
from txl_export.families.graph.find.trying import Inputs, other_than
from txl_export.families.graph.take.running import RunError, Runner

EXACT = frozenset(("recurrent", "cell"))
"""Proofs that say which input an output belongs to, whatever both are called."""
LOOKED_AT = 1024
"""Numbers of an output that are looked at one by one."""
MOST_PAIRS = 2**13
"""Pairs that are looked at."""
PROOFS = {
    "recurrent": "a recurrent operator starts from it and ends in what is returned",
    "moved": "what is returned holds its numbers at other places, and new ones beside them",
    "grown": "what is returned holds its numbers, and new ones behind or before them",
    "written": "new numbers are written into it at a place that is computed",
    "cell": "a gate carries it over and adds a bounded candidate, as a GRU's or LSTM's cell",
    "window": "it stands before what is returned in one window",
    "counted": "what is returned is it and a constant more",
    "named": "it takes up other inputs, changes other outputs, and the names say so",
}
"""What shows that a pair is a state, the strongest first."""
DECIDES = "The names do not say it for sure, but whoever trained it knows"
"""What would settle an undecided pair."""
LOUD = 10
"""What usual numbers are multiplied by before an input is said to come back as it is: thresholds may be beyond them."""
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
    """An input that may be a state, and the outputs that it may be returned as.

    Attributes:
        input, outputs: names.
        why: why that cannot be known, and what would decide it.
    """

    input: str
    outputs: tuple[str, ...]
    why: str


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


def pair(inputs: Inputs, runner: Runner, first: Mapping[str, Array]) -> Paired:
    """Decide which inputs and outputs are states.

    Args:
        inputs: with sizes for which the graph runs.
        runner: with the graph.
        first: what it returns for the inputs of seed 0.

    Raises:
        EndedError: see `Runner.run`.
    """
    return _Pairing(inputs, runner, first).decide()


class _Pairing:
    """The pairs that there may be, each with what speaks for it."""

    def __init__(self, inputs: Inputs, runner: Runner, first: Mapping[str, Array]) -> None:
        self._inputs, self._structure, self._runner, self._first = inputs, inputs.structure, runner, first
        self._given, self._other = inputs.draw(0), inputs.draw(1)
        self._ports = {port.name: port for port in inputs.foreign.inputs}
        draws = np.random.default_rng(0)
        self._at = {name: draws.integers(0, array.size or 1, LOOKED_AT) for name, array in first.items()}
        self._as_returned = counted_alike(self._ports, first)
        self._changed: dict[str, set[str]] = {}
        self._places: dict[str, dict[str, NDArray[np.bool_]]] = {}
        for name in self._ports:
            if inputs.varies(name) or name in inputs.could_be_states:
                self._change(name)
        pairs = [(given, one) for given in self._ports if given in inputs.could_be_states for one in first]
        self._grown = {pair: axes for pair in pairs if (axes := self._fits(*pair)) is not None}
        if len(self._grown) > MOST_PAIRS:
            raise RunError(f"{len(self._grown)} pairs of inputs and outputs fit, expected at most {MOST_PAIRS}")
        self._proofs = {pair: self._shown(*pair) for pair in self._grown}
        self._taken: dict[str, str] = {}

    def decide(self) -> Paired:
        """See `pair`."""
        result = Paired()
        for proof in PROOFS:
            found = self._free(pair for pair, shown in self._proofs.items() if proof in shown)
            if proof not in EXACT:
                found = [pair for pair in found if not self._named_otherwise(pair)]
            if proof == "named":
                found = [pair for pair in found if self._returns_more(pair)]
            chosen = most_alike({pair: self._alike(*pair) for pair in found}, alone=True)
            self._taken |= chosen
            for given, returned in chosen.items():
                port, grown = self._ports[given], self._grown[given, returned]
                result.states.append(State(given, returned, port.shape, port.dtype, proof, max(grown, default=None)))
        order = [*self._ports]
        result.states.sort(key=lambda state: order.index(state.input))
        for given in order:
            if outputs := [output for name, output in self._free(self._proofs) if name == given]:
                self._leftover(given, outputs, result)
        return result

    def _leftover(self, given: str, outputs: list[str], result: Paired) -> None:
        """Say of an input that is no state, and has outputs of its shape, what it is or may be."""
        same = [output for output in outputs if np.array_equal(self._first[output], self._given[given])]
        if same := same and self._same_when_loud(given, same):
            result.data[given] = (
                f"came back as it was, in a run as usual and in one {LOUD} times as large: " + ", ".join(same)
            )
        elif not any(self._inputs.varies(name) for name in self._ports if name not in {given, *self._taken}):
            result.data[given] = "is the one input with data: fed back, nothing new would ever come in"
        elif result.states and len(outputs) == 1 and outputs == self._rest():
            result.data[given] = "if it were a state, too, the graph would return nothing else"
        else:
            rivals = sorted({name for name, output in self._free(self._proofs) if output in outputs} - {given})
            alike = f"; {', '.join(rivals)} would fit as well" if rivals else ""
            why = f"it may be fed back, as any array of its shape may, and no node shows that it is carried on{alike}"
            result.undecided.append(Undecided(given, tuple(outputs), f"{why}. {DECIDES}"))

    def _same_when_loud(self, given: str, outputs: list[str]) -> list[str]:
        """Those outputs that are this input with large numbers in every array of data, too."""
        data = {name: one for name, one in self._other.items() if one.dtype.kind == "f" and self._inputs.varies(name)}
        feeds = self._given | {name: array * LOUD for name, array in data.items()}
        with contextlib.suppress(RunError):
            found = self._runner.run(feeds)
            return [output for output in outputs if np.array_equal(found[output], feeds[given])]
        return []

    def _rest(self) -> list[str]:
        """Outputs that are no states as far as is known."""
        returned = {*self._taken.values()}
        return [output for output in self._first if output not in returned]

    def _free(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those pairs of which neither side is a state's."""
        rest = {*self._rest()}
        return [pair for pair in pairs if pair[0] not in self._taken and pair[1] in rest]

    def _returns_more(self, pair: Pair) -> bool:
        rest = {*self._rest()} - {pair[1]}
        changes = self._changed.get(pair[0], set()) & rest
        return bool(changes or (self._taken and rest))  # of a stack, a layer changes the next alone

    def _named_otherwise(self, pair: Pair) -> bool:
        """Whether names speak for another pair that has not been ruled out, so that this one is to stand back."""
        rivals = [(g, o) for g, o in self._free(self._proofs) if (g == pair[0]) != (o == pair[1])]
        return max((self._alike(*rival) for rival in rivals), default=0) > self._alike(*pair)

    # ---- what speaks for a pair

    def _alike(self, given: str, returned: str) -> int:
        return likeness(self._as_returned[given], returned)

    def _change(self, name: str) -> None:
        """Note which outputs change with an input alone, and which of their numbers that are looked at."""
        value, found = other_than(self._given[name], self._other[name]), dict[str, Array]()
        with contextlib.suppress(RunError):  # a setting, perhaps, of which nothing else is allowed
            found = self._runner.run({**self._given, name: value})
        self._changed[name], self._places[name] = set(), {}
        for output, before in self._first.items():
            if output in found and found[output].shape == before.shape and before.size:
                after, at = found[output], self._at[output]
                if not np.array_equal(after, before, equal_nan=before.dtype.kind == "f"):
                    self._changed[name].add(output)
                self._places[name][output] = after.ravel()[at] != before.ravel()[at]

    def _taken_up(self, given: str, returned: str) -> bool:
        """Whether something else than the input itself changes what is returned."""
        return any(returned in changed for name, changed in self._changed.items() if name != given)

    def _fits(self, given: str, returned: str) -> list[int] | None:
        """The axes on which what is returned is longer, one at most; None where it cannot be given again."""
        array, found, port = self._given[given], self._first[returned], self._ports[given]
        sizes = [*zip(port.shape, array.shape, found.shape, strict=False)]
        unlike = [axis for axis, (_, before, after) in enumerate(sizes) if before != after]
        grown = [axis for axis in unlike if isinstance(sizes[axis][0], str) and sizes[axis][2] > sizes[axis][1]]
        fits = array.dtype == found.dtype and array.ndim == found.ndim and len(unlike) < 2 and unlike == grown
        return grown if fits else None

    def _shown(self, given: str, returned: str) -> set[str]:
        """What speaks for a pair, as keys of `PROOFS`."""
        self._runner.check()
        known, bit = self._structure.outputs.get(returned, Value()), 1 << self._structure.names.index(given)
        array, found, alike = self._given[given], self._first[returned], self._alike(given, returned)
        more, shown = self._taken_up(given, returned), {kind for kind in EXACT if getattr(known, kind) & bit}
        if kind := self._copied(given, returned, known.moved & bit, alike):
            shown.add(kind)
        others = [port for name, port in self._ports.items() if name != given]
        if not any(port.dtype.startswith(("int", "uint")) or self._inputs.varies(port.name) for port in others):
            shown.discard("cell")  # of the one input with data it is a layer's gate
        if _say_two_things(given, returned):
            shown -= {"cell", "grown"}
        if array.shape == found.shape:
            steps = {*np.unique(found - array).tolist()} if array.dtype.kind in "iu" and array.ndim < 2 else set()
            named = alike or given not in self._structure.rows
            kept = returned in self._places.get(given, {}) and returned not in self._changed[given]
            shown |= {"counted"} if named and not more and len(steps) == 1 and steps != {0} else set()
            shown |= {"written"} if known.written & bit else set()
            shown |= {"window"} if known.beside & bit and kept and more else set()
        stretched = any(self._inputs.roles.get(str(size)) == "segment" for size in self._ports[given].shape)
        return shown | ({"named"} if alike == 2 and more and not stretched else set())

    def _copied(self, given: str, returned: str, moved: int, alike: int) -> str:
        """What is shown where numbers come back at other places, beside ones that do not depend on them; or ""."""
        array, found = self._given[given], self._first[returned]
        own, at = self._places.get(given, {}).get(returned), self._at[returned]
        if own is None or not array.size or not moved:
            return ""  # without a way for them, numbers are alike by chance, as in half precision
        numbers, grown = found.ravel()[at], array.shape != found.shape
        copies = own & (numbers != 0) & np.isin(numbers, array)
        if not grown:
            copies &= numbers != array.ravel()[at]
        others = [places[returned] for name, places in self._places.items() if name != given and returned in places]
        if not copies.any() or not (~own & np.any([np.zeros_like(own), *others], 0)).any():
            return ""
        inputs = [name for name, other in self._given.items() if grown and name != given and other.ndim == found.ndim]
        wholly = [self._given[name].ravel()[:LOOKED_AT] for name in inputs if self._given[name].dtype == found.dtype]
        pasted = any(part.size and np.isin(part, found).all() for part in wholly)
        return "" if pasted and not alike else "grown" if grown else "moved"


def _say_two_things(given: str, returned: str) -> bool:
    """Whether both names are words, of which the first is not of a state nor the second the same."""
    words = all(name[-1:].isalpha() and re.search("[A-Za-z]{4}", name) for name in (given, returned))
    return words and not likeness(given, returned) and STATES.isdisjoint(re.findall("[a-z]+", given.lower()))
