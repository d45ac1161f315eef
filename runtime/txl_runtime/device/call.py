"""One program of one loop, tied to memory, and the work of a step: copies in, the program, copies of results out.

The first step runs as it is, since engines set themselves up in it. From then on the work is recorded as a whole, once
for each set of results that is asked for again, and a step is the replay of such a record. Results that are asked for
once, or in ever other sizes, are fetched behind a record that has no copies of them.
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
    """An executable tied to its inputs, its results and one side of a loop's memory.

    Args:
        inputs, results: what it reads and returns beside the memory.
        memory: where the states are that it reads and writes, by the names of its inputs and of its outputs.

    Attributes:
        recording: how far recording its work has come.
        runs: how often it ran, as far as that matters: less than twice, or more.
        settling: whether it has just run for the second time; who sees that sets it back.
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
    """What one step puts into the queue, piece by piece."""

    call: DeviceCall
    fetches: Sequence[tuple[Part, int]]

    def put(self) -> None:
        """All of it."""
        call = self.call
        call.inputs.send(call.queue)
        call.engine()
        self.fetch()

    def fetch(self) -> None:
        """The copies of results."""
        for part, to in self.fetches:
            part.fetch(self.call.queue, to)


class Step:
    """The steps of a call that fetch one set of results. To call it is to put a step into the queue.

    Nothing that it holds holds it, so that memory is given back as soon as a loop goes.

    Args:
        parts: of results, by their tensors' names.
        staged: where they arrive.
        bare: the steps that fetch nothing; None for those themselves.

    Attributes:
        arrived: views of the parts, by their names, good from when a step is done until the loop's next one.
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
        """A step as long as nothing quicker is known."""
        call, bare = self._call, self._bare
        if not call.recording.possible or not call.runs:
            with call.queue.beside_records():  # another model's engine may be recording in another thread
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
        """Record the step and replay it; where that fails, it is done as it is."""
        recording = self._call.recording
        self._quick = recording.record(self._call.name, self._call.queue, self._work.put)
        if self._quick is None:
            self._work.put()
            return
        recording.records += bool(self._work.fetches)
        self._quick()


class Steps:
    """All steps of a loop's calls."""

    def __init__(self) -> None:
        self._made: dict[tuple[DeviceCall, tuple[tuple[str, Part], ...]], Step] = {}

    def find(self, call: DeviceCall, parts: Mapping[str, Part], staged: Raw) -> Step:
        """The steps of a call that fetch these parts, see `Step`."""
        key = (call, tuple(parts.items()))
        if key not in self._made:
            bare = self.find(call, {}, staged) if parts else None
            self._made[key] = Step(call, parts, staged, bare)
        return self._made[key]

    def forget(self) -> None:
        """Let go of all of them: results will arrive elsewhere."""
        for call, _ in self._made:
            call.recording.records = 0
        self._made.clear()


def _joined(fetches: list[tuple[Part, int]], part: Part, to: int) -> list[tuple[Part, int]]:
    """Fetches and one more; what lies one behind the other on the device comes in one copy."""
    if fetches:
        before, start = fetches[-1]
        if before.rows == part.rows == 1 and before.address + to - start == part.address:
            return [*fetches[:-1], (before._replace(width=to - start + part.width), start)]
    return [*fetches, (part, to)]


def room_for(parts: Mapping[str, Part]) -> int:
    """Bytes that parts need where they arrive."""
    return sum(aligned(part.size) for part in parts.values())


def open_blocks(
    device: Device,
    executable: Executable,
    memory: tuple[Mapping[str, int], Mapping[str, int]],
    last: Sequence[str] = (),
) -> tuple[Inputs, Results]:
    """Blocks for what a program reads and returns beside the memory; of what it reads, `last` stands last."""
    program = executable.program

    def beside(specs: Sequence[TensorSpec], held: Mapping[str, int]) -> list[TensorSpec]:
        return [spec for spec in specs if spec.name not in held]

    inputs = Inputs(device, beside(program.inputs, memory[0]), last)
    return inputs, Results(device, beside(program.outputs, memory[1]))
