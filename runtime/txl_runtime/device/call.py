"""The steps of a loop's program: each step copies inputs to the device, runs the program, and copies results back.

The first step is not recorded, because engines initialise in it. Later the whole work is recorded, once for each set of
results that is fetched a second time, and a step replays the record. Results that are fetched only once, or in changing
sizes, are copied after replaying a record that copies no results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from txl_runtime.bundle.tables import TensorSpec
from txl_runtime.device.blocks import Inputs, Part, Raw, Results
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.interface import Executable, Launch, aligned, check_addresses, host_address
from txl_runtime.device.recording import MOST_RECORDS, Recording
from txl_runtime.types import Array


class DeviceCall:
    """An executable bound to its inputs, its results and one side of a loop's states.

    Args:
        inputs, results: blocks of the executable's inputs and results besides the states.
        memory: (addresses of the states it reads by input name, addresses of the states it writes by output name).

    Attributes:
        recording: the records of the call's work.
        runs: number of runs, counted only until the step replays a record.
        settling: set to True after the second run; the loop sets it back to False.
    """

    def __init__(
        self,
        executable: Executable,
        queue: Queue,
        inputs: Inputs,
        results: Results,
        memory: tuple[Mapping[str, int], Mapping[str, int]],
    ) -> None:
        addresses: dict[str, int] = {**inputs.addresses, **results.addresses, **memory[0], **memory[1]}
        check_addresses(executable, addresses)
        self.name, self.queue, self.inputs, self.results = executable.program.name, queue, inputs, results
        with queue.beside_records():
            self.engine: Launch = executable.prepare(addresses, queue)
        self.recording = Recording(executable.recordable)
        self.runs, self.settling = 0, False


class _Work(NamedTuple):
    """The work of one unrecorded step, and (part, host address) for each result to copy."""

    call: DeviceCall
    fetches: Sequence[tuple[Part, int]]

    def put(self) -> None:
        """Put the copy of inputs, the program and the copies of results into the queue."""
        call = self.call
        call.inputs.send(call.queue)
        call.engine()
        self.fetch()

    def fetch(self) -> None:
        """Put the copies of results into the queue."""
        for part, to in self.fetches:
            part.fetch(self.call.queue, to)


class Step:
    """A step of a call that fetches one set of results. Calling this object puts the step into the queue.

    The object is in no cycle of references, so that its memory is freed together with the loop.

    Args:
        parts: parts of results to fetch, by tensor name.
        staged: host memory in which the results arrive.
        bare: the step of the same call that fetches nothing; None if this step fetches nothing.

    Attributes:
        arrived: views of the parts by name, valid from the end of a step until the loop's next step.
    """

    def __init__(self, call: DeviceCall, parts: Mapping[str, Part], staged: Raw, bare: Step | None) -> None:
        fetches: list[tuple[Part, int]] = []
        self.arrived: dict[str, Array] = {}
        start = 0
        for name, part in parts.items():
            self.arrived[name] = part.view(staged[start:])
            fetches = _joined(fetches, part, host_address(staged) + start)
            start += aligned(part.size)
        self._call, self._bare, self._work = call, bare, _Work(call, fetches)
        self._again = False
        self._quick: Launch | None = None

    def __call__(self) -> None:
        if self._quick is None:
            self._begin()
        else:
            self._quick()

    def _begin(self) -> None:
        """Put a step into the queue while it has no record, and make a record if the same results are fetched again."""
        call, bare = self._call, self._bare
        if not call.recording.possible or not call.runs:
            with call.queue.beside_records():  # a different thread may be recording a second model's engine
                self._work.put()
        elif bare is None or (self._again and call.recording.records < MOST_RECORDS):
            self._record()
        else:
            bare()
            self._work.fetch()
        self._again = True
        call.runs += 1
        if call.runs == 2:
            call.settling = True
        if not call.recording.possible and call.runs > 1:
            self._quick = self._work.put

    def _record(self) -> None:
        """Record the step and replay it; if recording fails, run it unrecorded."""
        recording = self._call.recording
        self._quick = recording.record(self._call.name, self._call.queue, self._work.put)
        if self._quick is None:
            self._work.put()
            return
        recording.records += bool(self._work.fetches)
        self._quick()


class Steps:
    """The steps of a loop's calls; each step is made when it is first needed."""

    def __init__(self) -> None:
        self._made: dict[tuple[DeviceCall, tuple[tuple[str, Part], ...]], Step] = {}

    def find(self, call: DeviceCall, parts: Mapping[str, Part], staged: Raw) -> Step:
        """Return the step of a call that fetches these parts, e.g. a part {"logprobs": [4, 1, 256]}."""
        key = (call, tuple(parts.items()))
        if key not in self._made:
            bare = self.find(call, {}, staged) if parts else None
            self._made[key] = Step(call, parts, staged, bare)
        return self._made[key]

    def forget(self) -> None:
        """Drop all steps, because the array in which results arrive is replaced."""
        for call, _ in self._made:
            call.recording.records = 0
        self._made.clear()


def _joined(fetches: list[tuple[Part, int]], part: Part, to: int) -> list[tuple[Part, int]]:
    """Add a copy to the list; if the new part follows the last one on the device, both become one copy."""
    if fetches:
        before, start = fetches[-1]
        if before.rows == part.rows == 1 and before.address + to - start == part.address:
            return [*fetches[:-1], (before._replace(width=to - start + part.width), start)]
    return [*fetches, (part, to)]


def room_for(parts: Mapping[str, Part]) -> int:
    """Return the number of bytes of host memory that the parts need, each rounded up to a multiple of `ALIGNMENT`."""
    return sum(aligned(part.size) for part in parts.values())


def open_blocks(
    device: Device,
    executable: Executable,
    memory: tuple[Mapping[str, int], Mapping[str, int]],
    last: Sequence[str] = (),
) -> tuple[Inputs, Results]:
    """Return blocks for a program's inputs and results besides its states; `last` names the inputs that come last."""
    program = executable.program

    def beside(specs: Sequence[TensorSpec], held: Mapping[str, int]) -> list[TensorSpec]:
        return [spec for spec in specs if spec.name not in held]

    inputs = Inputs(device, beside(program.inputs, memory[0]), last)
    return inputs, Results(device, beside(program.outputs, memory[1]))
