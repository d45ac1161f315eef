"""Matches inputs, outputs and states of an ONNX graph with a step's: by equal names, or as the user says."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from txl_runtime.bundle.axes import Axes
from txl_runtime.errors import CheckError, UsageError, some
from txl_runtime.types import Array, Arrays

from txl_export.families.graph.find.naming import likeness
from txl_export.families.graph.take.reading import Foreign, Port

MOST = 64
"""Maximum number of names that a message lists."""


@dataclass(frozen=True)
class Step:
    """The names, types and axes that a file is matched with.

    Attributes:
        whose: "the module" or "the bundle", for messages.
        takes: axes and dtype of inputs and states; an axis named otherwise than "B" or "L" must be open in the file.
        states: the names in `takes` that are states.
        gives: names of the outputs, without states.
        more: whether the file may have additional states.
    """

    whose: str
    takes: Mapping[str, tuple[Axes, str]]
    states: Sequence[str]
    gives: Sequence[str]
    more: bool = False


@dataclass(frozen=True)
class FileOptions:
    """The user's options for a file.

    Attributes:
        rename: the step's name for an input or output of the file.
        pairs: for a state's input in the file, the output that is its next value.
        given: arrays by the file's names: a constant input of every call, or a state's initial value.
    """

    rename: Mapping[str, str]
    pairs: Mapping[str, str]
    given: Arrays

    def without(self, names: Collection[str]) -> tuple[dict[str, Array], FileOptions]:
        """Return the arrays in `given` under these names of a step's inputs, and the options without these arrays.

        For example, names {"sr"} take 16000 out of `given` {"sr": 16000, "h": [[0.0]]}.
        """
        samples = {name: values for name, values in self.given.items() if name in names}
        return samples, replace(self, given={name: one for name, one in self.given.items() if name not in names})


@dataclass(frozen=True)
class Wiring:
    """The correspondence of a file's inputs and outputs with a step's.

    Attributes:
        takes, returns: the file's name for each input or state, and for each output, of the step.
        after: the output that is the next value of a state, by the name of the state's input in the file; by the step's
            name if the file has no such input.
        given: arrays by the file's names, see `FileOptions`.
        fixed: the number of sequences ("B") and positions ("L") that the file fixes.
    """

    takes: Mapping[str, str]
    returns: Mapping[str, str]
    after: Mapping[str, str]
    given: Arrays
    fixed: Mapping[str, int]

    def feeds(self, values: Arrays) -> dict[str, Array]:
        """Return arrays by the file's names, for inputs and states by the step's names.

        For example, {"h": [2, 8]} becomes {"h_in": [2, 8]}.
        """
        return {**self.given, **{port: values[name] for name, port in self.takes.items()}}


def match(foreign: Foreign, step: Step, said: FileOptions) -> Wiring:
    """Match a file with a step: `h_in` of the file is the step's `h_in`, or its `h` if `said` renames it.

    Raises:
        UsageError: some names have no match; the message lists them, with options to paste.
        CheckError: under one name the file takes a different type or different sizes than the step.
    """
    where, wanted = str(foreign.path), {*said.rename, *said.pairs, *said.given, *step.takes}
    ports = {one.name: one for one in (*foreign.inputs, *(one for one in foreign.optional if one.name in wanted))}
    results = [one.name for one in foreign.outputs]
    _check_names(where, ports, results, step, said)
    called = {port: said.rename.get(port, port) for port in (*ports, *results)}
    takes = {called[port]: port for port in ports if called[port] in step.takes and port not in said.given}
    returns = {called[port]: port for port in results if called[port] in step.gives}
    after, used = dict(said.pairs), {*returns.values(), *said.pairs.values()}
    lacked = {} if step.more else {name: name for name in step.states if name not in takes}
    for port, name in {**lacked, **{port: called[port] for port in ports}}.items():
        if port not in after and (name in step.states or (step.more and port not in takes.values())):
            alike = {one: 3 if called[one] == name else likeness(port, one) for one in results if one not in used}
            most = max(alike.values(), default=0)
            best = [one for one, how in alike.items() if how == most > 0]
            if len(best) == 1:
                after[port] = best[0]
                used.add(best[0])
    _check_complete(foreign, step, ports, Wiring(takes, returns, after, said.given, {}))
    fixed = dict[str, int]()
    for name, port in takes.items():
        (axes, dtype), entry = step.takes[name], ports[port]
        sizes = _fixed(axes, dtype, entry)
        if sizes is None or any(size < 1 or fixed.setdefault(letter, size) != size for letter, size in sizes):
            known = "".join(f", {letter} {size}" for letter, size in fixed.items())
            raise CheckError(
                f"{where}: takes {port} {entry.dtype} {list(entry.shape)}, expected {step.whose}'s {name} {dtype} "
                f"{list(axes.shape)}{known}; export the file with its types and sizes, or correct the StepSpec"
            )
    return Wiring(takes, returns, after, said.given, fixed)


def _fixed(axes: Axes, dtype: str, port: Port) -> list[tuple[str, int]] | None:
    """Return the sizes that a file fixes for "B" and "L" in an input; None if its shape or dtype does not fit."""
    if len(port.shape) != len(axes.shape) or kind(port.dtype) != kind(dtype):
        return None
    numbers = [(own, size) for own, size in zip(axes.shape, port.shape, strict=True) if isinstance(size, int)]
    if any(own not in ("B", "L", size) for own, size in numbers):
        return None
    return [(own, size - axes.ahead * (own == "L")) for own, size in numbers if isinstance(own, str)]


def kind(dtype: str) -> str:
    """Return the kind of a dtype: "f" for floats, "i" for integers, "b" for bool."""
    return dtype[:1].replace("u", "i")


def _check_names(where: str, ports: Mapping[str, Port], results: Sequence[str], step: Step, said: FileOptions) -> None:
    """Refuse options with names that neither the file nor the step has."""
    own = list(dict.fromkeys((*step.takes, *step.states, *step.gives)))
    wrong = [one for one in (*said.rename, *said.pairs.values()) if one not in ports and one not in results]
    wrong += [one for one in (*said.pairs, *said.given) if one not in ports]
    if wrong := wrong + [f"={name}" for name in said.rename.values() if name not in own]:
        has = f"the file takes {some([*ports], MOST)} and gives {some(results, MOST)}"
        raise UsageError(
            f"{where}: --rename, --state or --inputs name {some(wrong)}; {has}, {step.whose} has {some(own, MOST)}; "
            "check them"
        )


def _check_complete(foreign: Foreign, step: Step, ports: Mapping[str, Port], wiring: Wiring) -> None:
    """Refuse names without a match.

    The file may lack inputs that it would not read, and outputs of states that it would not change.
    """
    used = {*wiring.takes.values(), *wiring.returns.values(), *wiring.after, *wiring.after.values(), *wiring.given}
    left = [one.name for one in foreign.inputs if one.name not in used]
    free = {one.name: one for one in foreign.outputs if one.name not in used}
    asked = [name for name in step.takes if name not in wiring.takes] if left else []
    lacking = [name for name in step.gives if name not in wiring.returns]
    named = _guess(left, asked, lambda port, name: _fixed(*step.takes[name], ports[port]) is not None)
    named |= _guess(free, lacking, lambda *_: True)
    loose = [port for name, port in wiring.takes.items() if name in step.states and port not in wiring.after]
    stray = {*step.states} - {*wiring.after}
    loose += [port for port in left if (named[port] in stray if port in named else step.more)]
    others = [one for one in free if one not in named]
    fed = _guess(
        others,
        loose,
        lambda one, port: free[one].dtype == ports[port].dtype and len(free[one].shape) == len(ports[port].shape),
    )
    if not (left or lacking or fed):
        return
    options = [f"--rename {shlex.quote(f'{port}={name}')}" for port, name in named.items()]
    options += [f"--state {shlex.quote(f'{port}={one}')}" for one, port in fed.items() if not likeness(port, one)]
    if others := [port for port in left if port not in named and port not in fed.values()]:
        options.append(f"what is always the same ({some(others)}?) by --inputs FILE.npz")
    ours = [*asked, *lacking, *(f"a next value of {port}" for port in fed.values() if port not in left)]
    theirs = [f"{verb} {some(names, MOST)}" for verb, names in (("takes", left), ("gives", [*free])) if names]
    raise UsageError(
        f"{foreign.path}: {' and '.join(theirs) or 'has nothing'} beside what has equal names, and {step.whose} has "
        f"{some(ours, MOST) or 'nothing'}, expected one name for each thing; "
        f"give {' '.join(options) or 'another file'}"
    )


def _guess(theirs: Iterable[str], ours: Iterable[str], fits: Callable[[str, str], bool]) -> dict[str, str]:
    """Return the step's name for each name of the file: the most similar name that fits, else the first that fits.

    For example, {"h_in": "h", "c_in": "c"}. A name of the step that no name of the file fits is left out.
    """
    left, pairs = [*theirs], dict[str, str]()
    for name in ours:
        if able := [one for one in left if fits(one, name)]:
            best = max(able, key=lambda one: max(likeness(name, one), likeness(one, name)))
            pairs[best] = name
            left.remove(best)
    return pairs
