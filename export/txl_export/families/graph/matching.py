"""Which inputs and outputs of a foreign graph are those of a step: by names, then by types and sizes, then by proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from txl_runtime.bundle.axes import Axes
from txl_runtime.errors import CheckError, UsageError, some
from txl_runtime.types import Array

from txl_export.families.graph.naming import kinship, likeness
from txl_export.families.graph.reading import Port
from txl_export.families.own_module.spec import VALID, StateSpec, StepSpec

MOST = 120
"""Ways to match what names do not tell, of which each is run."""
ADVICE = "call the inputs, states and outputs of the StepSpec as the file does, or give --state IN=OUT for each state"


@dataclass(frozen=True)
class Slot:
    """An input or state of a step, which the graph has to take.

    Attributes:
        name: in the specification.
        kind: of its values, as NumPy has it: f, i or b.
        axes: its sizes.
        state: whether it is a state.
        grows: the axis whose size is another in each run, or None.
    """

    name: str
    kind: str
    axes: Axes
    state: bool = False
    grows: int | None = None

    @property
    def told(self) -> str:
        """It, for people."""
        return f"{'state' if self.state else 'input'} {self.name} {list(self.axes.shape)}"

    def fits(self, port: Port) -> bool:
        """Whether the graph takes such values there, for some number of sequences and positions."""
        return self.sizes(port) is not None

    def sizes(self, port: Port) -> dict[str, set[int]] | None:
        """The numbers of sequences and of positions that the graph fixes there; None where it takes something else."""
        found: dict[str, set[int]] = {"B": set(), "L": set()}
        if len(port.shape) != len(self.axes.shape) or kind_of(port.dtype) != self.kind:
            return None
        for axis, (said, size) in enumerate(zip(self.axes.shape, port.shape, strict=True)):
            if isinstance(size, str):
                continue
            if axis == self.grows or (isinstance(said, int) and said != size):
                return None
            if isinstance(said, str):
                found[said].add(size - (self.axes.ahead if said == "L" else 0))
        return found if all(size > 0 for sizes in found.values() for size in sizes) else None


@dataclass
class Wiring:
    """What was matched.

    Attributes:
        takes: of a step's inputs and states, the graph's inputs.
        returns: of its outputs, and of its states' next values, the graph's outputs: keys are "output" or "state" and
            the name.
        given: of the graph's other inputs, the value that they always have.
        batch: how many sequences it takes; None for any number.
        length: how many positions; None for any number.
    """

    takes: dict[str, str]
    returns: dict[str, str]
    given: Mapping[str, Array]
    batch: int | None = None
    length: int | None = None
    pairs: Mapping[str, str] = field(default_factory=dict)

    def told(self, states: Sequence[str]) -> str:
        """What its states were taken for, for people."""
        return ", ".join(
            f"{name}: {self.takes.get(name, 'nothing')} → {self.returns.get(f'state {name}', 'nothing')}"
            for name in states
        )


def kind_of(dtype: str) -> str:
    """The kind of values that a type has: f, i, b, or "" for others."""
    return {"float": "f", "double": "f", "bfloat": "f", "int": "i", "uint": "i", "bool": "b"}.get(
        dtype.rstrip("0123456789"), ""
    )


def slots_of(spec: StepSpec) -> list[Slot]:
    """What a step takes, in the order of its arguments."""
    given = [Slot(one.name, kind_of(one.module_dtype), one.axes) for one in spec.inputs]
    counts = [Slot(VALID, "i", Axes(("B",)))] if spec.lengths else []
    return [*given, *(_of_state(one) for one in spec.states), *counts]


def _of_state(entry: StateSpec) -> Slot:
    return Slot(entry.name, kind_of(entry.dtype), entry.axes, True, entry.grows)


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
        ports: the graph's inputs.
        optional: those that have a value in the file; taken are the ones that names tell.
        pairs: inputs that are states, with the outputs that are their next values, as far as the user says it.
        given: values of inputs that are none of the step's.

    Raises:
        UsageError: `pairs` or `given` name no input of the graph, or it takes something that nobody gives.
        CheckError: it takes nothing that could be a state or an input of the step.
    """
    slots = slots_of(spec)
    kin = [port for port in optional if any(kinship(slot.name, port.name) > 1 for slot in slots)]
    ports = [*ports, *(port for port in kin if port.name not in given)]
    names = [port.name for port in ports]
    if wrong := [name for name in (*pairs, *given) if name not in names]:
        raise UsageError(f"{where}: has no input {some(wrong)}, it takes {some(names, 9)}; check --state and --inputs")
    known = {port.name: port for port in ports if port.name not in given}
    fits = {
        slot.name: [name for name, port in known.items() if slot.fits(port) and (slot.state or name not in pairs)]
        for slot in slots
    }
    taken = _by_names(fits, kinship)
    left = {name: [port for port in some if port not in taken.values()] for name, some in fits.items()}
    ways = [taken | more for more in _maps({name: some for name, some in left.items() if name not in taken})]
    found = ways[0]
    beside = [name for name in known if name not in found.values() and known[name] not in optional]
    without = [slot.told for slot in slots if slot.name not in found]
    if beside:
        told = ", ".join(f"{name} {known[name].dtype} {list(known[name].shape)}" for name in beside[:4])
        lacking = f"for {some(without, 4)} it takes nothing else" if without else "the module has nothing like it"
        raise (CheckError if without else UsageError)(
            f"{where}: takes {told} and {lacking}; {ADVICE}, and give constants by --inputs FILE.npz"
        )
    return [_sized(where, slots, known, Wiring(way, {}, given, pairs=pairs)) for way in ways]


def ways_out(where: str, wiring: Wiring, wanted: Mapping[str, Array], found: Mapping[str, Array]) -> list[Wiring]:
    """The ways in which what a graph returned can be what a step returned, for inputs that are matched.

    Args:
        where: the file, for messages.
        wiring: the inputs.
        wanted: what the step returned, by "output" or "state" and the name.
        found: what the graph returned.

    Raises:
        UsageError: the user's pairs name no output of the graph.
        CheckError: it returns nothing that could be an output of the step.
    """
    if wrong := [name for name in wiring.pairs.values() if name not in found]:
        raise UsageError(f"{where}: has no output {some(wrong)}, it gives {some([*found], 9)}; check --state")
    said = {
        f"state {name}": wiring.pairs[port]
        for name, port in wiring.takes.items()
        if port in wiring.pairs and f"state {name}" in wanted
    }
    rest = [name for name in found if name not in wiring.pairs.values()]
    fits = {
        key: [name for name in rest if _alike(values, found[name])] for key, values in wanted.items() if key not in said
    }

    def kin(key: str, port: str) -> int:
        kind, _, name = key.partition(" ")
        own = likeness(wiring.takes[name], port) if kind == "state" and name in wiring.takes else 0
        return max(kinship(name, port), own)

    taken = said | _by_names(fits, kin)
    left = {
        key: [port for port in some if port not in taken.values()] for key, some in fits.items() if key not in taken
    }
    ways = [Wiring(**{**vars(wiring), "returns": taken | more}) for more in _maps(left)]
    if lacking := [key for key in wanted if key not in ways[0].returns and key.startswith("output ")]:
        shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in [*found.items()][:6])
        expected = ", ".join(f"{key} {list(wanted[key].shape)}" for key in lacking[:4])
        raise CheckError(f"{where}: gives {shapes}, expected the module's {expected} among it; {ADVICE}")
    return ways


def the_right(where: str, ways: Sequence[Wiring], holds: Callable[[Wiring], bool]) -> Wiring:
    """The first way in which the graph computes what the step computes; the only one is not tried.

    Raises:
        CheckError: there are several, and none is right.
    """
    if len(ways) == 1:
        return ways[0]
    for way in ways[:MOST]:
        if holds(way):
            return way
    first = ways[0]
    differing = [
        *(name for name in first.takes if len({way.takes.get(name) for way in ways}) > 1),
        *(key for key in first.returns if len({way.returns.get(key) for way in ways}) > 1),
    ]
    choices = dict.fromkeys(
        name for key in differing for way in ways for name in (way.takes.get(key), way.returns.get(key)) if name
    )
    raise CheckError(
        f"{where}: no name tells which of {some([*choices], 9)} is the module's {some(differing, 9)}, and in none of "
        f"{len(ways[:MOST])} orders does it compute what the module computes in the first segments; {ADVICE}"
    )


def _sized(where: str, slots: Sequence[Slot], known: Mapping[str, Port], wiring: Wiring) -> Wiring:
    """The same with the numbers of sequences and of positions."""
    fixed: dict[str, set[int]] = {"B": set(), "L": set()}
    for slot in slots:
        sizes = slot.sizes(known[wiring.takes[slot.name]]) if slot.name in wiring.takes else None
        for letter, some_sizes in (sizes or {}).items():
            fixed[letter] |= some_sizes
    for letter, what in (("B", "sequences"), ("L", "positions")):
        if len(fixed[letter]) > 1:
            raise CheckError(
                f"{where}: takes {' and '.join(map(str, sorted(fixed[letter])))} {what} ({letter}) at once in "
                f"different inputs, expected one number; {ADVICE}"
            )
    batch, length = (next(iter(fixed[letter]), None) for letter in "BL")
    return Wiring(wiring.takes, wiring.returns, wiring.given, batch, length, wiring.pairs)


def _alike(wanted: Array, found: Array) -> bool:
    """Whether values have the kind and the shape of others."""
    return wanted.shape == found.shape and kind_of(wanted.dtype.name) == kind_of(found.dtype.name)


def _by_names(fits: Mapping[str, Sequence[str]], kin: Callable[[str, str], int]) -> dict[str, str]:
    """What names tell: pairs that are more alike than each other pair that they rule out, the most alike first."""
    scored = {(one, other): score for one, some in fits.items() for other in some if (score := kin(one, other))}
    taken: dict[str, str] = {}
    while scored:
        for (one, other), score in sorted(scored.items(), key=lambda item: -item[1]):
            rivals = [s for (a, b), s in scored.items() if (a == one) != (b == other)]
            if score > max(rivals, default=0):
                taken[one] = other
                scored = {(a, b): s for (a, b), s in scored.items() if a != one and b != other}
                break
        else:
            break
    return taken


def _maps(fits: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Ways to give each key another of its values, at most `MOST` + 1, those in the order of both first.

    Where there are fewer values than keys, some keys get none.
    """
    for lacking in range(len(fits) + 1):
        ways = list(islice(_with(list(fits.items()), lacking), MOST + 1))
        if ways:
            return ways
    return [{}]


def _with(
    left: Sequence[tuple[str, Sequence[str]]], lacking: int, used: frozenset[str] = frozenset()
) -> Iterator[dict[str, str]]:
    """Maps of the first key and of those behind it, of which so many get nothing."""
    if not left:
        if not lacking:
            yield {}
        return
    (key, values), *rest = left
    for value in values:
        if value not in used:
            for more in _with(rest, lacking, used | {value}):
                yield {key: value, **more}
    if lacking:
        yield from _with(rest, lacking - 1, used)
