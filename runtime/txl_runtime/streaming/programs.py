"""The choice of the program that runs a segment, by the wanted result, the segment's length and the state's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Output, Program, StateTensor
from txl_runtime.errors import BackendError, UsageError

Want = Literal["rows", "last", "next", "nll"]
"""The method of `loop.Result` that a caller will use; an engine may have a program that computes only this result."""

Shape: TypeAlias = tuple[int, ...] | None
"""Shape of one state; None for an absent state."""
Shapes: TypeAlias = tuple[Shape, ...]
"""Shapes of all "replace" states, in the order of the table."""

WHOLE = ("logprobs", "hidden", "step")
"""Kinds of programs whose outputs are enough for every wanted result."""
KINDS: dict[Want, tuple[str, ...]] = {
    "rows": WHOLE,
    "last": ("last", "next", *WHOLE),
    "next": ("next", "last", *WHOLE),
    "nll": ("score", *WHOLE),
}
"""Kinds of programs that can compute each wanted result; the kind comes first that computes the least besides it."""


def start_shape(state: StateTensor) -> Shape:
    """Return the shape of a state before the first step; None if the state is absent then."""
    if state.absent:
        return None
    if state.rows is None or state.row_axis is None:
        return state.shape
    return tuple(state.rows[0] if axis == state.row_axis else size for axis, size in enumerate(state.shape))


def leaves_rows_open(program: Program) -> bool:
    """Return whether the program reads or returns a tensor whose number of memory rows is not fixed."""
    return any("rows" in spec.shape for spec in (*program.inputs, *program.outputs))


def shapes_after(program: Program, states: Sequence[StateTensor]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the states that a program returns; every size there has to be a number."""
    returned = {spec.name: spec for spec in program.outputs}
    return tuple(returned[state.output].fixed for state in states)


def features_of(program: Program, manifest: Manifest) -> Output | None:
    """Return the output that the softmax reads: log-probabilities, or feature rows [B, L, F] of a program "hidden"."""
    logprobs, first = manifest.logprobs, program.outputs[0]
    if logprobs is None or program.kind != "hidden":
        return logprobs
    return msgspec.structs.replace(logprobs, name=first.name, shape=("B", "L", int(first.shape[-1])))


class Programs:
    """The programs of one update rule and one batch size. Kinds in `WHOLE` give every result, other kinds some."""

    def __init__(self, manifest: Manifest, programs: Sequence[Program], backend: str = "cpu") -> None:
        self._backend, self._exact = backend, manifest.lengths == "exact"
        self._states = manifest.states_of("replace")
        self._programs = sorted(programs, key=lambda program: (program.segment_length, leaves_rows_open(program)))
        timed = ((entry.name, entry.axes) for entry in manifest.given if entry.axes.positions)
        self._timed = next(((name, axes.positions[0], axes.ahead) for name, axes in timed), None)
        self._cache: dict[tuple[Want, int, Shapes], Program] = {}

    def length_of(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of positions T of a segment's inputs; 1 if no input has an axis of positions."""
        if self._timed is None:
            return 1
        name, axis, ahead = self._timed
        size: int = inputs[name].shape[axis]
        return size - ahead

    def find(self, want: Want, length: int, shapes: Shapes) -> Program:
        """Return the shortest program that holds `length` positions; with exact lengths, the program of just this
        length.

        `shapes` are the shapes of all "replace" states, or () if they never change. Among equally short programs, the
        program that computes the least besides `want` is chosen. So a shorter whole program wins over a longer
        shortcut.

        Raises:
            BackendError: no program holds `length` positions.
            UsageError: no program reads these shapes of the state.
        """
        cached = self._cache.get((want, length, shapes))
        if cached is None:
            kinds = KINDS[want]
            fitting = [p for p in self._programs if p.kind in kinds and self._fits(p, length, shapes)]
            if not fitting:
                raise self._missing(length, shapes)
            cached = min(fitting, key=lambda program: (program.segment_length, kinds.index(program.kind)))
            if len(self._cache) > 4096:  # a state that grows by a row per step has a new shape in every step
                self._cache.clear()
            self._cache[want, length, shapes] = cached
        return cached

    def _fits(self, program: Program, length: int, shapes: Shapes) -> bool:
        longest = program.segment_length
        if longest < length or (self._exact and longest != length):
            return False
        shapes_by_name = {spec.name: spec.shape for spec in program.inputs}
        pairs = zip(self._states, shapes, strict=True) if shapes else ()
        return all(_takes(shapes_by_name.get(state.input), shape) for state, shape in pairs)

    def _missing(self, length: int, shapes: Shapes) -> BackendError | UsageError:
        if not shapes:
            return BackendError(f"backend {self._backend} has no program for {length} tokens; build the engines again")
        held = [f"{s.name} {_shown(shape)}" for s, shape in zip(self._states, shapes, strict=True)]
        known = sorted({program.segment_length for program in self._programs})
        return UsageError(
            f"a segment of {length} positions came with state {', '.join(held)}, expected a length and shapes "
            f"that a program takes (lengths {known}); reset the stream, or feed segments of one length"
        )


def _takes(wanted: tuple[int | str, ...] | None, shape: Shape) -> bool:
    """Return whether a program's input fits a state's shape; without an input, the state must be absent or empty."""
    if wanted is None or shape is None:
        return wanted is None and (shape is None or 0 in shape)
    return len(shape) == len(wanted) and all(size in ("rows", has) for size, has in zip(wanted, shape, strict=True))


def _shown(shape: Shape) -> str:
    return "absent" if shape is None else str(list(shape))
