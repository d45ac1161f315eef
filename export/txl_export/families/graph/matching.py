"""Which inputs and outputs of a foreign graph are those of a step: by names, then by types and sizes, then by proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from txl_runtime.errors import CheckError, UsageError, some
from txl_runtime.types import Arrays

from txl_export.families.graph.naming import kinship, likeness, most_alike
from txl_export.families.graph.reading import Port
from txl_export.families.own_module.spec import VALID, InputSpec, StateSpec, StepSpec

MOST = 120
"""Ways to match what names do not tell that are looked at."""
ADVICE = "call the inputs, states and outputs of the StepSpec as the file does"


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
    given: Arrays
    pairs: Mapping[str, str]
    batch: int | None = None
    length: int | None = None
    returns: Mapping[str, str] = field(default_factory=dict)


def ways_in(
    where: str, spec: StepSpec, ports: Sequence[Port], optional: Sequence[Port], pairs: Mapping[str, str], given: Arrays
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
        name: {
            port.name: fixed
            for port in known.values()
            if port.name not in given and (port.name not in pairs or isinstance(entry, StateSpec))
            if (fixed := _fixed(entry, port)) is not None
        }
        for name, entry in entries.items()
    }
    ways = _ways({name: [*some] for name, some in fits.items()}, kinship)
    if beside := [port for port in ports if port.name not in given and port.name not in ways[0].values()]:
        told = ", ".join(f"{port.name} {port.dtype} {list(port.shape)}" for port in beside[:4])
        lacking = [f"{name} {entries[name].dtype} {list(entries[name].shape)}" for name in fits if name not in ways[0]]
        if lacking:
            raise CheckError(f"{where}: takes {told}, expected the module's {some(lacking, 4)}; {ADVICE}")
        raise UsageError(
            f"{where}: takes {told} besides, expected what the module takes; give constants by --inputs FILE.npz"
        )
    found = []
    for way in ways:
        own = [fits[name][port] for name, port in way.items()]
        sizes = _size(where, "B", "sequences", own), _size(where, "L", "positions", own)
        found.append(Wiring(way, given, pairs, *sizes))
    return found


def ways_out(where: str, wiring: Wiring, wanted: Arrays, found: Arrays) -> list[Wiring]:
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


def _fixed(entry: InputSpec | StateSpec, port: Port) -> set[tuple[str, int]] | None:
    """The numbers of sequences ("B") and of positions ("L") that a graph fixes where it takes a step's input or state;
    None where it does not take that.
    """
    axes, grows = entry.axes, entry.grows if isinstance(entry, StateSpec) else None
    dtype = entry.dtype if isinstance(entry, StateSpec) else entry.module_dtype
    if len(port.shape) != len(axes.shape) or _kind(port.dtype) != _kind(dtype):
        return None
    sizes = [(axis, *both) for axis, both in enumerate(zip(axes.shape, port.shape, strict=True))]
    numbers = [(axis, said, size) for axis, said, size in sizes if isinstance(size, int)]
    if any(axis == grows or said not in ("B", "L", size) for axis, said, size in numbers):
        return None
    return {(said, size - axes.ahead * (said == "L")) for _, said, size in numbers if isinstance(said, str)}


def _size(where: str, letter: str, what: str, fixed: Sequence[set[tuple[str, int]]]) -> int | None:
    """How many sequences or positions the graph takes, None for any number."""
    sizes = sorted({size for one in fixed for said, size in one if said == letter})
    if len(sizes) > 1 or min(sizes, default=1) < 1:
        told = some([*map(str, sizes)])
        raise CheckError(f"{where}: takes {told} {what} ({letter}) at once, expected one number; {ADVICE}")
    return sizes[0] if sizes else None


def _ways(fits: Mapping[str, Sequence[str]], kin: Callable[[str, str], int]) -> list[dict[str, str]]:
    """What names tell, with every way to give the others one each as far as there are any, in the order of both.

    Args:
        fits: names of a step's, and for each the names of the graph's that it can be.
        kin: how much two names are alike.
    """
    taken = most_alike({(one, other): kin(one, other) for one, some in fits.items() for other in some})
    held = {*taken.values()}
    left = {one: [other for other in some if other not in held] for one, some in fits.items() if one not in taken}
    found = list(islice(_maps(left), MOST))
    most = max(map(len, found))
    return [taken | way for way in found if len(way) == most]


def _maps(left: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Maps that give each key a value of its own; those that leave a key without one come last."""
    if not left:
        yield {}
        return
    (key, values), *rest = left.items()
    for value in values:
        for more in _maps({name: [one for one in several if one != value] for name, several in rest}):
            yield {key: value, **more}
    yield from _maps(dict(rest))
