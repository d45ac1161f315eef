"""Finds the shapes that states take while they grow or appear; every set of shapes is a stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from txl_runtime.errors import UsageError

from txl_export.families.own_module.module_call import Eager, Tries
from txl_export.families.own_module.sizes import States

StateShapes = dict[str, tuple[int, ...] | None]
"""Shapes of states by name; None for a state that is absent."""

MOST_GRAPHS, MOST_TRANSITIONS = 64, 1 << 14
"""Maximum number of graphs if each set of shapes has its own graph, and of transitions that are examined if one graph
takes all shapes. Each transition costs a call of the module here and a segment in the verification."""


@dataclass(frozen=True)
class Stage:
    """A set of shapes that the states have at the same time.

    Attributes:
        number: 0 for the start.
        shapes: the shape of every state.
    """

    number: int
    shapes: StateShapes


@dataclass(frozen=True)
class Transition:
    """A segment of `length` positions that leads from `stage` to `after`, which may be the same stage."""

    stage: Stage
    length: int
    after: Stage


def shapes_of(states: Mapping[str, Tensor | None]) -> StateShapes:
    """Return the shapes of states by name. For example, {"h": (2, 32)}."""
    return {name: None if tensor is None else tuple(tensor.shape) for name, tensor in states.items()}


def reached(
    eager: Eager, batch_size: int, segment_lengths: tuple[int, ...], most: int = MOST_GRAPHS
) -> tuple[Transition, ...]:
    """Return every transition that segments of these lengths can reach from the start, in the order of the search.

    Raises:
        UsageError: there are more than `most` transitions, or a state takes a shape that was not declared.
        OwnCodeError: the module cannot take a length.
    """
    tries = Tries(eager, batch_size, 1)
    states = tries.fresh()
    known = {_key(states): Stage(0, shapes_of(states))}
    # only states that are still to be examined are held, because they may have many rows
    waiting = deque([(known[_key(states)], states)])
    transitions: list[Transition] = []
    while waiting:
        stage, held = waiting.popleft()
        for length in segment_lengths:
            after: States = dict(eager(tries.inputs(length), held, tries.valid(length))[1])
            if (key := _key(after)) not in known:
                known[key] = Stage(len(known), shapes_of(after))
                waiting.append((known[key], after))
            transitions.append(Transition(stage, length, known[key]))
            if len(transitions) > most:
                raise UsageError(too_many(transitions, most))
    return tuple(transitions)


def _key(states: States) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
    return tuple(sorted(shapes_of(states).items()))


def too_many(transitions: Sequence[Transition], most: int) -> str:
    """Return the message for a module whose states take more than `most` sizes."""
    start = transitions[0].stage.shapes
    changing = {name for one in transitions for name, sizes in one.after.shapes.items() if sizes != start[name]}
    lengths = sorted({one.length for one in transitions}, reverse=True)
    return (
        f"segments of {' and '.join(map(str, lengths))} lead {', '.join(sorted(changing))} through more than {most} "
        "sizes, expected fewer; give a larger --segment-length alone, or keep all rows from the start and a state that "
        "counts them"
    )
