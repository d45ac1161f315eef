"""Names that a foreign graph shares with a step: inputs, outputs and states by equal names, or as the user says."""

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
"""Names that a message lists."""


@dataclass(frozen=True)
class Step:
    """What a file is matched with.

    Attributes:
        whose: "the module" or "the bundle", for messages.
        takes: axes and type of inputs and states; an axis of another text than "B" and "L" has to be open.
        states: the names of those that are states.
        gives: names of what is returned beside states.
        more: whether the file may have states that the step has not.
    """

    whose: str
    takes: Mapping[str, tuple[Axes, str]]
    states: Sequence[str]
    gives: Sequence[str]
    more: bool = False


@dataclass(frozen=True)
class Said:
    """What the user says of a file.

    Attributes:
        rename: names of the file's inputs and outputs, and the step's for the same.
        pairs: inputs of the file that are states, with the outputs that are their next values.
        given: by the file's names, what it takes besides in every call; of a state, what it begins with.
    """

    rename: Mapping[str, str]
    pairs: Mapping[str, str]
    given: Arrays

    def without(self, names: Collection[str]) -> tuple[dict[str, Array], Said]:
        """What is given under these names of a step's inputs, which are real inputs; and what is said besides."""
        samples = {name: values for name, values in self.given.items() if name in names}
        return samples, replace(self, given={name: one for name, one in self.given.items() if name not in names})


@dataclass(frozen=True)
class Wiring:
    """How a file is fed and read in the place of a step.

    Attributes:
        takes, returns: the file's names of a step's inputs and states, and of its outputs, by the step's names.
        after: outputs of the file that are next values, by the inputs of the file that they are fed back to; where the
            file has no such input, by the name of the step's state.
        given: see `Said`.
        fixed: how many sequences ("B") and positions ("L") the file takes, where that is one number.
    """

    takes: Mapping[str, str]
    returns: Mapping[str, str]
    after: Mapping[str, str]
    given: Arrays
    fixed: Mapping[str, int]

    def feeds(self, values: Arrays) -> dict[str, Array]:
        """What the file is fed, for a step's inputs and states by the step's names."""
        return {**self.given, **{port: values[name] for name, port in self.takes.items()}}


def match(foreign: Foreign, step: Step, said: Said) -> Wiring:
    """Match a file with a step: `h_in` of the file is the step's `h_in`, or its `h` where that is said.

    Raises:
        UsageError: names without a match; all are listed, with the options to paste.
        CheckError: under one name the file takes another type or other sizes than the step.
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
        (axes, dtype), found = step.takes[name], ports[port]
        sizes = _fixed(axes, dtype, found)
        if sizes is None or any(size < 1 or fixed.setdefault(letter, size) != size for letter, size in sizes):
            known = "".join(f", {letter} {size}" for letter, size in fixed.items())
            raise CheckError(
                f"{where}: takes {port} {found.dtype} {list(found.shape)}, expected {step.whose}'s {name} {dtype} "
                f"{list(axes.shape)}{known}; export the file with its types and sizes, or correct the StepSpec"
            )
    return Wiring(takes, returns, after, said.given, fixed)


def _fixed(axes: Axes, dtype: str, port: Port) -> list[tuple[str, int]] | None:
    """The numbers of sequences ("B") and of positions ("L") that a file fixes in an input; None where it is another."""
    if len(port.shape) != len(axes.shape) or kind(port.dtype) != kind(dtype):
        return None
    numbers = [(own, size) for own, size in zip(axes.shape, port.shape, strict=True) if isinstance(size, int)]
    if any(own not in ("B", "L", size) for own, size in numbers):
        return None
    return [(own, size - axes.ahead * (own == "L")) for own, size in numbers if isinstance(own, str)]


def kind(dtype: str) -> str:
    """The kind of a type's values: f, i or b."""
    return dtype[:1].replace("u", "i")


def _check_names(where: str, ports: Mapping[str, Port], results: Sequence[str], step: Step, said: Said) -> None:
    """Refuse names that are nobody's."""
    own = list(dict.fromkeys((*step.takes, *step.states, *step.gives)))
    wrong = [one for one in (*said.rename, *said.pairs.values()) if one not in ports and one not in results]
    wrong += [one for one in (*said.pairs, *said.given) if one not in ports]
    if wrong := wrong + [f"={name}" for name in said.rename.values() if name not in own]:
        has = f"the file takes {some([*ports], MOST)} and gives {some(results, MOST)}"
        raise UsageError(
            f"{where}: --rename, --state or --inputs name {some(wrong)}; {has}, {step.whose} has {some(own, MOST)}; "
            "check them"
        )


def _check_complete(foreign: Foreign, step: Step, ports: Mapping[str, Port], found: Wiring) -> None:
    """Refuse names without a match; the file may lack what it does not read, and what it does not change."""
    used = {*found.takes.values(), *found.returns.values(), *found.after, *found.after.values(), *found.given}
    left = [one.name for one in foreign.inputs if one.name not in used]
    free = {one.name: one for one in foreign.outputs if one.name not in used}
    asked = [name for name in step.takes if name not in found.takes] if left else []
    lacking = [name for name in step.gives if name not in found.returns]
    named = _guess(left, asked, lambda port, name: _fixed(*step.takes[name], ports[port]) is not None)
    named |= _guess(free, lacking, lambda *_: True)
    loose = [port for name, port in found.takes.items() if name in step.states and port not in found.after]
    stray = {*step.states} - {*found.after}
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
    """Which of the file's may be which of a step's: of those that fit the one most alike by name, else the first."""
    left, found = [*theirs], dict[str, str]()
    for name in ours:
        if able := [one for one in left if fits(one, name)]:
            best = max(able, key=lambda one: max(likeness(name, one), likeness(one, name)))
            found[best] = name
            left.remove(best)
    return found
