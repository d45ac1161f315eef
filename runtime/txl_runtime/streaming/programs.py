"""Which of a loop's programs runs a segment: by what is wanted, its length, and the shapes of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Output, Program, StateTensor
from txl_runtime.errors import BackendError, UsageError

Want = Literal["rows", "last", "next", "nll"]
"""What a caller will ask a result for: an engine may have a program that computes just that."""

Shape: TypeAlias = tuple[int, ...] | None
"""Of one state; None for one that is absent."""
Shapes: TypeAlias = tuple[Shape, ...]
"""Of every state that steps return whole, in the order of the table."""

WHOLE = ("logprobs", "hidden", "step")
"""The kinds of programs that serve every call."""
KINDS: dict[Want, tuple[str, ...]] = {
    "rows": WHOLE,
    "last": ("last", "next", *WHOLE),
    "next": ("next", "last", *WHOLE),
    "nll": ("score", *WHOLE),
}
"""The kinds that compute what is wanted, the one of the least beside it first."""


def start_shape(state: StateTensor) -> Shape:
    """The shape of a state before anything was seen."""
    if state.absent:
        return None
    if state.rows is None or state.row_axis is None:
        return state.shape
    return tuple(state.rows[0] if axis == state.row_axis else size for axis, size in enumerate(state.shape))


def leaves_rows_open(program: Program) -> bool:
    """Whether the program takes states of any number of rows."""
    return any("rows" in spec.shape for spec in (*program.inputs, *program.outputs))


def shapes_after(program: Program, states: Sequence[StateTensor]) -> tuple[tuple[int, ...], ...]:
    """The shapes of the states that a program returns; it may leave no size open."""
    returned = {spec.name: spec for spec in program.outputs}
    return tuple(returned[state.output].fixed for state in states)


def features_of(program: Program, manifest: Manifest) -> Output | None:
    """What a program returns for the softmax: the log-probabilities themselves, or the rows they are made of."""
    logprobs, first = manifest.logprobs, program.outputs[0]
    if logprobs is None or program.kind != "hidden":
        return logprobs
    return msgspec.structs.replace(logprobs, name=first.name, shape=("B", "L", int(first.shape[-1])))


class Programs:
    """The programs of one update rule and one B. Those of `WHOLE` kinds serve every call; the others are shortcuts."""

    def __init__(self, manifest: Manifest, programs: Sequence[Program], backend: str = "cpu") -> None:
        self._backend, self._exact = backend, manifest.lengths == "exact"
        self._states = manifest.states_of("replace")
        self._programs = sorted(programs, key=lambda program: (program.segment_length, leaves_rows_open(program)))
        timed = ((entry.name, entry.axes) for entry in manifest.given if entry.axes.positions)
        self._timed = next(((name, axes.positions[0], axes.ahead) for name, axes in timed), None)
        self._found: dict[tuple[Want, int, Shapes], Program] = {}

    def length_of(self, inputs: Mapping[str, Any]) -> int:
        """T of a segment's inputs; 1 where no input has positions."""
        if self._timed is None:
            return 1
        name, axis, ahead = self._timed
        size: int = inputs[name].shape[axis]
        return size - ahead

    def find(self, want: Want, length: int, shapes: Shapes) -> Program:
        """The program for a segment of T positions: of that length, or the shortest that holds it.

        Shapes are those of all replaced states, or none where they never change. Of several programs it is the one that
        is best for what is wanted. So a shortcut is not taken where a whole program is shorter, which is less work.

        Raises:
            BackendError: there is none of such a length.
            UsageError: there is none for these shapes of the state.
        """
        found = self._found.get((want, length, shapes))
        if found is None:
            kinds = KINDS[want]
            fitting = [p for p in self._programs if p.kind in kinds and self._fits(p, length, shapes)]
            if not fitting:
                raise self._missing(length, shapes)
            found = min(fitting, key=lambda program: (program.segment_length, kinds.index(program.kind)))
            if len(self._found) > 4096:  # states that grow row by row have ever new shapes
                self._found.clear()
            self._found[want, length, shapes] = found
        return found

    def _fits(self, program: Program, length: int, shapes: Shapes) -> bool:
        longest = program.segment_length
        if longest < length or (self._exact and longest != length):
            return False
        taken = {spec.name: spec.shape for spec in program.inputs}
        pairs = zip(self._states, shapes, strict=True) if shapes else ()
        return all(_takes(taken.get(state.input), shape) for state, shape in pairs)

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
    """Whether a program's input, or its lack of one, suits the shape that is held."""
    if wanted is None or shape is None:
        return wanted is None and (shape is None or 0 in shape)
    return len(shape) == len(wanted) and all(size in ("rows", has) for size, has in zip(wanted, shape, strict=True))


def _shown(shape: Shape) -> str:
    return "absent" if shape is None else str(list(shape))
