"""Which inputs and outputs of a foreign graph are those of a step: by names, then by types and sizes, then by proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias

from txl_runtime.errors import CheckError, UsageError, some
from txl_runtime.types import Array

from txl_export.families.graph.naming import kinship, likeness, most_alike
from txl_export.families.graph.reading import Port
from txl_export.families.own_module.spec import VALID, InputSpec, StateSpec, StepSpec

MOST = 120
"""Ways to match what names do not tell that are looked at."""
ADVICE = "call the inputs, states and outputs of the StepSpec as the file does"
Fits: TypeAlias = Mapping[str, Sequence[str]]
"""Names of a step's, and for each the names of the graph's that it can be."""


@dataclass(frozen=True)
class Wiring:
    """What was matched.

    Attributes:
        takes: of a step's inputs and states, the graph's inputs.
        given: of the graph's other inputs, the value that they always have.
        pairs: inputs of the graph that are states, with their next values, as far as the user said it.
        batch, length: how many sequences and how many positions it takes; None for any number.
        returns: of a step's outputs and of its states' next values, the graph's outputs; keys are as `bits.named` has
            them.
    """

    takes: Mapping[str, str]
    given: Mapping[str, Array]
    pairs: Mapping[str, str]
    batch: int | None = None
    length: int | None = None
    returns: Mapping[str, str] = field(default_factory=dict)


def ways_in(
    where: str,
    spec: StepSpec,
    ports: Sequence[Port],
    optional: Sequence[Port],
    pairs: Mapping[str, str],
    given: Mapping[str, Array],
) -> list[Wiring]:
    """The ways in which a graph's inputs can be those of a step: one, or several that names do not tell apart.

    Args:
        where: the file, for messages.
        spec: of the step.
        ports, optional: the graph's inputs, and those that have a value in the file: of these, only the ones that are
            called like something of the step are its.
        pairs, given: see `Wiring`.

    Raises:
        UsageError: `pairs` or `given` name no input of the graph, or it takes what the step does not have.
        CheckError: it takes other sizes or types than the step.
    """
    counts = [InputSpec(VALID, ("B",), "int32")] if spec.lengths else []
    every: list[InputSpec | StateSpec] = [*spec.inputs, *counts, *spec.states]
    entries = {entry.name: entry for entry in every}
    kin = [port for port in optional if any(kinship(name, port.name) > 1 for name in entries)]
    known = {port.name: port for port in (*ports, *kin)}
    if wrong := [name for name in (*pairs, *given) if name not in known]:
        raise UsageError(f"{where}: has no input {some(wrong)}, it takes {some([*known], 9)}; check --state, --inputs")
    fits = {
        name: [
            port.name
            for port in known.values()
            if port.name not in given and (port.name not in pairs or isinstance(entry, StateSpec))
            if _sizes(entry, port) is not None
        ]
        for name, entry in entries.items()
    }
    ways = _ways(fits, kinship)
    beside = [port for port in ports if port.name not in given and port.name not in ways[0].values()]
    if beside:
        told = ", ".join(f"{port.name} {port.dtype} {list(port.shape)}" for port in beside[:4])
        lacking = [f"{name} {entries[name].dtype} {list(entries[name].shape)}" for name in fits if name not in ways[0]]
        if lacking:
            raise CheckError(f"{where}: takes {told}, expected the module's {some(lacking, 4)}; {ADVICE}")
        raise UsageError(
            f"{where}: takes {told} besides, expected what the module takes; give constants by --inputs FILE.npz"
        )
    return [_sized(where, entries, known, Wiring(way, given, pairs)) for way in ways]


def ways_out(where: str, wiring: Wiring, wanted: Mapping[str, Array], found: Mapping[str, Array]) -> list[Wiring]:
    """The ways in which what a graph returned can be what a step returned, for inputs that are matched.

    Args:
        where: the file, for messages.
        wiring: the inputs.
        wanted: what the step returned, as `bits.named` has it.
        found: what the graph returned.

    Raises:
        UsageError: the user's pairs name no output of the graph.
        CheckError: it returns nothing that could be an output of the step.
    """
    if wrong := [name for name in wiring.pairs.values() if name not in found]:
        raise UsageError(f"{where}: has no output {some(wrong)}, it gives {some([*found], 9)}; check --state")
    said = {f"state {name}": wiring.pairs[port] for name, port in wiring.takes.items() if port in wiring.pairs}
    fits = {
        key: [
            name
            for name, array in found.items()
            if name not in said.values() and array.shape == values.shape
            if _kind(array.dtype.name) == _kind(values.dtype.name)
        ]
        for key, values in wanted.items()
        if key not in said
    }

    def kin(key: str, port: str) -> int:
        kind, _, name = key.partition(" ")
        return max(kinship(name, port), likeness(wiring.takes.get(name, ""), port) if kind == "state" else 0)

    ways = [said | way for way in _ways(fits, kin)]
    if lacking := [f"{key} {list(wanted[key].shape)}" for key in wanted if key[0] == "o" and key not in ways[0]]:
        shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in [*found.items()][:6])
        raise CheckError(f"{where}: gives {shapes}, expected the module's {some(lacking, 4)}; {ADVICE}")
    return [replace(wiring, returns=way) for way in ways]


def the_right(where: str, ways: Sequence[Wiring], holds: Callable[[Wiring], bool]) -> Wiring:
    """The first way in which the graph computes what the step computes; where there is one it is not tried.

    Raises:
        CheckError: there are several, and none is right.
    """
    tried = ways[:MOST]
    if len(ways) == 1:
        return ways[0]
    if (right := next(filter(holds, tried), None)) is not None:
        return right
    sides = [{**way.takes, **way.returns} for way in tried]
    names = [name for name in sides[0] if len({side.get(name) for side in sides}) > 1]
    choices = dict.fromkeys(side[name] for name in names for side in sides if name in side)
    raise CheckError(
        f"{where}: no name tells which of {some([*choices], 9)} is the module's {some(names, 9)}, and in none of "
        f"{len(tried)} orders does it compute what the module computes; {ADVICE} to see where they part"
    )


def _kind(dtype: str) -> str:
    """The kind of a type's values: f, i or b."""
    return dtype[:1].replace("u", "i")


def _sizes(entry: InputSpec | StateSpec, port: Port) -> dict[str, set[int]] | None:
    """The numbers of sequences and of positions that a graph fixes where it takes a step's input or state; None where
    it does not take that.
    """
    axes, grows = entry.axes, entry.grows if isinstance(entry, StateSpec) else None
    dtype = entry.dtype if isinstance(entry, StateSpec) else entry.module_dtype
    if len(port.shape) != len(axes.shape) or _kind(port.dtype) != _kind(dtype):
        return None
    fixed: dict[str, set[int]] = {"B": set(), "L": set()}
    for axis, (said, size) in enumerate(zip(axes.shape, port.shape, strict=True)):
        if isinstance(size, str):
            continue
        if axis == grows or (isinstance(said, int) and said != size):
            return None
        if isinstance(said, str):
            fixed[said].add(size - (axes.ahead if said == "L" else 0))
    return fixed


def _sized(
    where: str, entries: Mapping[str, InputSpec | StateSpec], ports: Mapping[str, Port], wiring: Wiring
) -> Wiring:
    """The same with how many sequences and positions the graph takes."""
    sizes, found = [_sizes(entries[name], ports[port]) or {} for name, port in wiring.takes.items()], list[int | None]()
    for letter, what in (("B", "sequences"), ("L", "positions")):
        fixed = sorted({size for one in sizes for size in one[letter]})
        if len(fixed) > 1 or min(fixed, default=1) < 1:
            told = some([*map(str, fixed)])
            raise CheckError(f"{where}: takes {told} {what} ({letter}) at once, expected one number; {ADVICE}")
        found.append(fixed[0] if fixed else None)
    return replace(wiring, batch=found[0], length=found[1])


def _ways(fits: Fits, kin: Callable[[str, str], int]) -> list[dict[str, str]]:
    """What names tell, with every way to give the others one each as far as there are any, in the order of both."""
    taken = _by_names(fits, kin)
    left = [(one, [other for other in some if other not in taken.values()]) for one, some in fits.items()]
    found = list(islice(_maps([pair for pair in left if pair[0] not in taken], frozenset()), MOST))
    most = max(map(len, found))
    return [taken | way for way in found if len(way) == most]


def _by_names(fits: Fits, kin: Callable[[str, str], int]) -> dict[str, str]:
    """Pairs that are more alike than each other pair that they rule out, the most alike first."""
    scores = {(one, other): score for one, some in fits.items() for other in some if (score := kin(one, other))}
    scores, taken = dict(sorted(scores.items(), key=lambda item: -item[1])), dict[str, str]()
    while (pair := most_alike(scores)) is not None:
        taken[pair[0]] = pair[1]
        scores = {other: score for other, score in scores.items() if other[0] != pair[0] and other[1] != pair[1]}
    return taken


def _maps(left: Sequence[tuple[str, Sequence[str]]], used: frozenset[str]) -> Iterator[dict[str, str]]:
    """Maps that give each key a value of its own; those that leave a key without one come last."""
    if not left:
        yield {}
        return
    (key, values), *rest = left
    for value in values:
        if value not in used:
            for more in _maps(rest, used | {value}):
                yield {key: value, **more}
    yield from _maps(rest, used)
