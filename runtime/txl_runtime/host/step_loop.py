"""The loop on the CPU of steps that return their whole state: two sets of arrays take turns, bound to programs once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.host.engine import Engine
from txl_runtime.host.loop import OnHost
from txl_runtime.streaming.loop import Loop, Resident, Want
from txl_runtime.streaming.memory import Initial
from txl_runtime.streaming.outputs import Output, WholeOutput
from txl_runtime.streaming.steps import (
    Shapes,
    StepPrograms,
    StepResult,
    StepState,
    empty_outputs,
    leaves_rows_open,
    shapes_after,
)
from txl_runtime.types import Array, Arrays, Call, Ids


@dataclass(frozen=True)
class _Held:
    """The state: which side its arrays are of, their shapes, and the arrays themselves."""

    side: int
    shapes: Shapes
    arrays: tuple[Array | None, ...]


@dataclass(frozen=True)
class _Bound:
    """A program tied to arrays: the states that it reads, its call, and what is held after it."""

    taken: tuple[Array | None, ...]
    call: Call
    after: _Held


class StepLoop(OnHost, StepState, Loop):
    """See `streaming.loop.Loop`. Inputs are arrays as the input table declares them, with b and T for "B" and "L".

    A program whose sizes are all fixed is bound to arrays that it shares with the others of its shapes. One that takes
    any number of rows returns new arrays, which are kept as they are.

    Args:
        manifest: of the bundle.
        engine: that has opened the programs.
        programs: of kind "step".
        initial: what states start as.
    """

    piecewise, leading = True, False

    def __init__(self, manifest: Manifest, engine: Engine, programs: Sequence[Program], initial: Initial) -> None:
        super().__init__(manifest, initial, nullcontext())
        self._manifest, self._engine = manifest, engine
        self._programs = StepPrograms(manifest, programs)
        self.output: Output = WholeOutput(manifest)
        self._pool: dict[tuple[str, tuple[int, ...], int], Array] = {}
        self._exchanged: dict[str, tuple[dict[str, Array], dict[str, Array]]] = {}
        self._bound: dict[tuple[str, int], _Bound] = {}
        self._independent = manifest.streams == "independent"
        self._now = _held(0, [None] * len(self.states))
        self.clear(np.arange(manifest.batch_size))

    def run(
        self, inputs: Mapping[str, Array | Resident], counts: Ids, want: Want = "rows", commit: bool = True
    ) -> StepResult:
        """See `Loop`. A segment in which nothing counts does nothing."""
        given: Mapping[str, Any] = inputs  # arrays alone, since `resident` finds nothing
        length, targets = self._programs.length_of(given), given.get("targets")
        if not counts.any():
            empty = empty_outputs(self._manifest, len(counts), length)
            return StepResult(self._manifest, empty, counts, length, targets, self.output)
        now = self._now
        program = self._programs.find(length, now.shapes)
        taken, bound_to = self._exchanged.get(program.name) or self._open(program)
        returned: Arrays = bound_to
        self._fill(taken, given, counts)
        if leaves_rows_open(program):
            returned, after = self._run_open(program, taken, now)
        else:
            bound = self._bound.get((program.name, now.side)) or self._bind(program, now)
            for array, own in zip(now.arrays, bound.taken, strict=True):
                if own is not None and own is not array:  # a program that leaves rows open returned it
                    assert array is not None
                    np.copyto(own, array)
            bound.call()
            after = bound.after
        if commit:
            self._now = after
        return StepResult(self._manifest, returned, counts, length, targets, self.output)

    def held(self) -> list[Array | None]:
        return list(self._now.arrays)

    def hold(self, arrays: Sequence[Array | None]) -> None:
        kept, now = list(arrays), self._now
        for index, (state, old, array) in enumerate(zip(self.states, now.arrays, arrays, strict=True)):
            if array is not None and array is not old:
                own = kept[index] = self._array(state, array.shape, now.side)
                np.copyto(own, array)
        self._now = _held(now.side, kept)

    def _open(self, program: Program) -> tuple[dict[str, Array], dict[str, Array]]:
        """Arrays for what a program reads beside the state and for what it returns."""
        carried = {name for state in self.states for name in (state.input, state.output)}
        taken, returned = (
            {spec.name: np.zeros(spec.fixed, np.dtype(spec.dtype)) for spec in side if spec.name not in carried}
            for side in (program.inputs, program.outputs)
        )
        self._exchanged[program.name] = taken, returned
        return taken, returned

    def _fill(self, taken: Arrays, given: Mapping[str, Any], counts: Ids) -> None:
        """Write a segment's inputs; what no sequence has is zero, whatever stood there before."""
        for entry in self._manifest.inputs:
            if entry.name not in taken:
                continue
            array = taken[entry.name]
            if entry.role == "valid":
                array[: len(counts)] = counts
                array[len(counts) :] = 0 if self._independent else counts.max()
                continue
            value = given[entry.name]
            if array.shape != value.shape:
                array.fill(0)
            array[tuple(slice(size) for size in value.shape)] = value

    def _bind(self, program: Program, now: _Held) -> _Bound:
        """Tie a program to the arrays of one side, for its shapes."""
        taken, returned = self._exchanged[program.name]
        shapes = {spec.name: spec.fixed for spec in program.inputs}
        read = [
            self._array(state, shapes[state.input], now.side) if state.input in shapes else None
            for state in self.states
        ]
        written = [
            self._array(state, shape, 1 - now.side)
            for state, shape in zip(self.states, shapes_after(program, self.states), strict=True)
        ]
        inputs = {state.input: array for state, array in zip(self.states, read, strict=True) if array is not None}
        outputs = {state.output: array for state, array in zip(self.states, written, strict=True)}
        call = self._engine.bind(program, {**taken, **inputs}, {**returned, **outputs})
        bound = self._bound[program.name, now.side] = _Bound(tuple(read), call, _held(1 - now.side, written))
        return bound

    def _run_open(self, program: Program, taken: Arrays, now: _Held) -> tuple[Arrays, _Held]:
        """What a program that leaves rows open returns, and what is held after it."""
        names = {spec.name for spec in program.inputs}
        states = {
            state.input: array
            for state, array in zip(self.states, now.arrays, strict=True)
            if array is not None and state.input in names
        }
        found = self._engine.run(program, {**taken, **states})
        return found, _held(now.side, [found[state.output] for state in self.states])

    def _array(self, state: StateTensor, shape: tuple[int, ...], side: int) -> Array:
        key = state.name, shape, side
        if key not in self._pool:
            self._pool[key] = np.zeros(shape, np.dtype(state.dtype))
        return self._pool[key]


def _held(side: int, arrays: Sequence[Array | None]) -> _Held:
    return _Held(side, tuple(None if array is None else array.shape for array in arrays), tuple(arrays))
