"""Which shapes a module's states take: they grow, or are absent at first, and every set of shapes is a stage."""

from __future__ import annotations

from dataclasses import dataclass

from txl_export.families.own_module.running import Eager

StateShapes = dict[str, tuple[int, ...] | None]
"""Sizes by name; None where a state is absent."""

MOST_TRANSITIONS = 64
"""As many programs a bundle of a growing state has at most."""


@dataclass(frozen=True)
class Stage:
    """A set of shapes that the states have at once.

    Attributes:
        number: 0 for the start.
        shapes: of every state.
    """

    number: int
    shapes: StateShapes


@dataclass(frozen=True)
class Transition:
    """A segment of `length` that leads from one stage to another, or to the same."""

    stage: Stage
    length: int
    after: Stage


def reached(eager: Eager, batch_size: int, segment_lengths: tuple[int, ...]) -> tuple[Transition, ...]:
    """Every transition that segments of these lengths can reach from the start, in the order they are found.

    Raises:
        UsageError: there are too many, or the module cannot take a length.
    """
    raise NotImplementedError
