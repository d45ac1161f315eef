"""The loop on the CPU: arrays of NumPy, bound to programs once, and memory that is never copied between segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import UsageError
from txl_runtime.host.engine import Engine
from txl_runtime.host.memory import Memory, open_memory
from txl_runtime.host.softmax import open_output
from txl_runtime.streaming.loop import Loop, Resident, Want
from txl_runtime.streaming.memory import Initial, LoopState
from txl_runtime.streaming.outputs import RowsResult
from txl_runtime.types import Array, Call, Floats, Ids


@dataclass(frozen=True)
class _Bound:
    """A program tied to arrays and to one side of the memory: its inputs by name, its first output, and its call."""

    inputs: Mapping[str, Ids]
    rows: Floats
    call: Call


class OnHost:
    """What loops on the CPU have in common: what the host can read is an array, and nothing lies elsewhere."""

    def resident(self, tokens: Any) -> None:
        """See `Loop`; there is nothing that is not read as an array."""
        return

    def fetch(self, tokens: Resident) -> Ids:
        """See `Loop`; there is nothing to fetch, since `resident` finds nothing."""
        raise UsageError(f"tokens are a {type(tokens).__name__}, expected an array in the host's memory")


class HostLoop(OnHost, LoopState, Loop):
    """See `streaming.loop.Loop`. All B sequences are computed; `OpenHostLoop` computes less.

    Args:
        manifest: of the bundle.
        engine: that has opened the programs.
        update: the rule of the memory.
        programs: the segment programs of that rule.
        initial: what a memory row is before anything was seen.
    """

    piecewise, leading = True, False

    def __init__(
        self, manifest: Manifest, engine: Engine, update: str, programs: Sequence[Program], initial: Initial
    ) -> None:
        super().__init__(update, manifest, nullcontext())
        self._engine = engine
        self._programs = sorted(programs, key=lambda program: program.segment_length)
        self.output = open_output(self._programs[0].kind, manifest, engine)
        self.memory: Memory = open_memory(update, manifest, initial, self.counters)
        self._arrays: dict[str, tuple[dict[str, Ids], Floats]] = {}
        self._bound: dict[tuple[int, int, int], _Bound] = {}
        self._batch = manifest.batch_size
        self.clear(np.arange(manifest.batch_size))

    def run(
        self, inputs: Mapping[str, Ids | Resident], counts: Ids, want: Want = "rows", commit: bool = True
    ) -> RowsResult:
        """See `Loop`. The rows are a view of what the program returned."""
        given: Mapping[str, Any] = inputs  # arrays alone, since `resident` finds nothing
        side, b, rows = self.counters.side, len(counts), self.computed(counts)
        length = next(iter(given.values())).shape[1]
        bound = self._bound.get((length, side, rows))
        if bound is None:
            bound = self._bind(length, side, rows)
        for name, array in bound.inputs.items():
            array[:b, :length] = given[name]
        self.valid[:b] = counts
        if rows < b:
            bound.rows[rows:b] = 0
        bound.call()
        if commit:
            self.counters.advance(self.valid, self.memory.move_to_front, rows)
        return RowsResult(bound.rows[:b, :length], counts, given.get("targets"), self.output)

    def computed(self, counts: Ids) -> int:
        """How many sequences a segment is computed for, from the first on."""
        return self._batch

    def _bind(self, length: int, side: int, rows: int) -> _Bound:
        """Tie the smallest program of so many positions to arrays of so many sequences, for one side of the memory."""
        program = next(program for program in self._programs if program.segment_length >= length)
        memory, after = self.memory.bound(side, rows)
        result, *_ = program.outputs
        if program.name not in self._arrays:
            given = [spec for spec in program.inputs if spec.name not in memory and spec.name not in self.counts]
            arrays = {spec.name: np.zeros(spec.fixed, np.int32) for spec in given}
            self._arrays[program.name] = arrays, np.zeros(result.fixed, np.float32)
        arrays, returned = self._arrays[program.name]
        # One program serves several lengths: it is bound once per side, whatever the length.
        longest = program.segment_length
        found = self._bound.get((longest, side, rows))
        if found is None:
            inputs: dict[str, Array] = {name: array[:rows] for name, array in {**arrays, **self.counts}.items()}
            call = self._engine.bind(program, {**inputs, **memory}, {result.name: returned[:rows], **after})
            found = self._bound[longest, side, rows] = _Bound(arrays, returned, call)
        self._bound[length, side, rows] = found
        return found
