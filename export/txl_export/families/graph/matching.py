"""Which inputs and outputs of a foreign graph are those of a step: by names, by types and sizes, then by values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from txl_runtime.errors import CheckError, UsageError, some
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Arrays

from txl_export.families.graph.find.naming import counted_alike, kinship, likeness, most_alike
from txl_export.families.graph.take.reading import Port
from txl_export.families.own_module.spec import VALID, InputSpec, StateSpec, StepSpec

ADVICE = "call the inputs, states and outputs of the StepSpec as the file does"
TYPES = "the types differ, so correct dtype= in the StepSpec, or export the file with the module's types"


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
        unsure: of what a step takes and returns, what neither names nor sizes tell; values decide it.
    """

    takes: Mapping[str, str]
    given: Arrays
    pairs: Mapping[str, str]
    batch: int | None = None
    length: int | None = None
    returns: Mapping[str, str] = field(default_factory=dict)
    unsure: Collection[str] = ()


def way_in(
    where: str,
    spec: StepSpec,
    ports: Sequence[Port],
    optional: Sequence[Port],
    pairs: Mapping[str, str],
    given: Arrays,
    shown: Mapping[tuple[str, str], int],
) -> Wiring:
    """The way in which a graph's inputs are those of a step, in the order of both where nothing tells them apart.

    Args:
        where: the file, for messages.
        spec: of the step.
        ports, optional: the graph's inputs, and those that have a value in the file: of these, only the ones that are
            called like something of the step are its.
        pairs, given: see `Wiring`.
        shown: of an input of the step and one of the graph's, how much their values say that they are one.

    Raises:
        UsageError: `pairs` or `given` name no input of the graph, or `pairs` an input of the step.
        CheckError: it takes other sizes or types than the step, or what the step does not have.
    """
    counts = [InputSpec(VALID, ("B",), "int32")] if spec.lengths else []
    every: list[InputSpec | StateSpec] = [*spec.inputs, *counts, *spec.states]
    entries = {entry.name: entry for entry in every}
    alias = counted_alike(entries, [port.name for port in (*ports, *optional)])
    kin = [port for port in optional if any(kinship(alias[name], port.name) > 1 for name in entries)]
    known = {port.name: port for port in (*ports, *kin)}
    if wrong := [name for name in (*pairs, *given) if name not in known]:
        raise UsageError(f"{where}: has no input {some(wrong)}, it takes {some([*known], 9)}; check --state, --inputs")
    if mixed := [entry.name for entry in spec.inputs if entry.name in pairs]:
        raise UsageError(
            f"{where}: --state names {some(mixed)}, an input of the module's, expected a state; correct --state"
        )
    fits = {
        name: {
            port.name: fixed
            for port in known.values()
            if port.name not in given and (port.name not in pairs or isinstance(entry, StateSpec))
            if _kind(port.dtype) == _kind(_dtype(entry)) and (fixed := _fixed(entry, port)) is not None
        }
        for name, entry in entries.items()
    }
    way, unsure = _nearest(fits, lambda name, port: kinship(alias[name], port), lambda *pair: -shown.get(pair, 0))
    if beside := [port for port in ports if port.name not in given and port.name not in way.values()]:
        told = ", ".join(f"{port.name} {port.dtype} {list(port.shape)}" for port in beside[:4])
        if not (lacking := [entry for name, entry in entries.items() if name not in way]):
            expected = "besides, expected what the module takes; give constants by --inputs FILE.npz"
            raise CheckError(f"{where}: takes {told} {expected}")
        expected = some([f"{entry.name} {_dtype(entry)} {list(entry.shape)}" for entry in lacking], 4)
        typed = any(_fixed(entry, port) is not None for entry in lacking for port in beside)
        raise CheckError(f"{where}: takes {told}, expected the module's {expected}; {TYPES if typed else ADVICE}")
    own = [fits[name][port] for name, port in way.items()]
    sizes = _size(where, "B", "sequences", own), _size(where, "L", "positions", own)
    return Wiring(way, given, pairs, *sizes, unsure=unsure)


def way_out(where: str, wiring: Wiring, runs: Sequence[tuple[Arrays, Arrays]]) -> Wiring:
    """What a graph returned that is what a step returned, for inputs that are matched: what names do not tell has the
    nearest values.

    Args:
        where: the file, for messages.
        wiring: the inputs.
        runs: what the step returned in some calls, as `bits.named` has it, and what the graph returned in each.

    Raises:
        UsageError: the user's pairs name no output of the graph.
        CheckError: it returns nothing that could be an output of the step.
    """
    first, gives = runs[0]
    if wrong := [name for name in wiring.pairs.values() if name not in gives]:
        raise UsageError(f"{where}: has no output {some(wrong)}, it gives {some([*gives], 9)}; check --state")
    said = {f"state {name}": wiring.pairs[port] for name, port in wiring.takes.items() if port in wiring.pairs}
    fits = {
        key: [
            name
            for name, array in gives.items()
            if name not in said.values() and array.shape == values.shape
            if _kind(array.dtype.name) == _kind(values.dtype.name)
        ]
        for key, values in first.items()
        if key not in said
    }
    own = counted_alike(dict.fromkeys(key.partition(" ")[2] for key in first), gives)
    carried = counted_alike(wiring.takes.values(), gives)

    def kin(key: str, port: str) -> int:
        kind, _, name = key.partition(" ")
        given = carried.get(wiring.takes.get(name, ""), "")
        return max(kinship(own[name], port), likeness(given, port) if kind == "state" else 0)

    def far(key: str, port: str) -> float:
        sides = [(found[port], wanted[key]) for wanted, found in runs]
        return sum(min(relative_difference(*both), 1.0) if both[0].shape == both[1].shape else 1.0 for both in sides)

    way, unsure = _nearest(fits, kin, far)
    returns = said | way
    if lacking := [key for key in first if key[0] == "o" and key not in returns]:
        told = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in [*gives.items()][:6])
        expected = [f"{key} {first[key].dtype} {list(first[key].shape)}" for key in lacking]
        sizes, free = [first[key].shape for key in lacking], gives.keys() - {*returns.values()}
        advice = TYPES if any(gives[name].shape in sizes for name in free) else ADVICE
        raise CheckError(f"{where}: gives {told}, expected the module's {some(expected, 4)}; {advice}")
    return replace(wiring, returns=returns, unsure=[*wiring.unsure, *unsure])


def _kind(dtype: str) -> str:
    """The kind of a type's values: f, i or b."""
    return dtype[:1].replace("u", "i")


def _dtype(entry: InputSpec | StateSpec) -> str:
    """What the module is given."""
    return entry.dtype if isinstance(entry, StateSpec) else entry.module_dtype


def _fixed(entry: InputSpec | StateSpec, port: Port) -> set[tuple[str, int]] | None:
    """The numbers of sequences ("B") and of positions ("L") that a graph fixes where it takes a step's input or state;
    None where it does not take that.
    """
    axes, grows = entry.axes, entry.grows if isinstance(entry, StateSpec) else None
    if len(port.shape) != len(axes.shape):
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


def _nearest(
    fits: Mapping[str, Collection[str]], alike: Callable[[str, str], int], far: Callable[[str, str], float]
) -> tuple[dict[str, str], list[str]]:
    """What names tell, and of the rest what is nearest, and then what can be the fewest things; and what was unsure.

    Args:
        fits: names of a step's, and for each the names of the graph's that it can be.
        alike: how much two of them are alike.
        far: how far their values are from each other.
    """
    taken = most_alike({(one, other): alike(one, other) for one, some in fits.items() for other in some})
    held = taken.values()
    left = {one: [other for other in some if other not in held] for one, some in fits.items() if one not in taken}
    pairs = {(one, other): (far(one, other), len(some)) for one, some in left.items() for other in some}
    for one, other in sorted(pairs, key=pairs.__getitem__):
        if one not in taken and other not in held:
            taken[one] = other
    return taken, [one for one, some in left.items() if len(some) > 1]
