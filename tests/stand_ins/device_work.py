"""The work of a device that is not there: tasks in streams, done late and in turns, or recorded into graphs.

Nothing orders the work of two streams, and nothing makes work begin before somebody waits for it. So a seeded scheduler
leaves it as long as it can, or does some of some stream whenever anything is asked of the device.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from stand_ins.device_memory import Block, ViolationError


@dataclass(eq=False)
class Task:
    """A piece of work.

    Attributes:
        blocks: what it reads and writes; they must live until it is done.
        scratch: that of them which it works in; it serves one piece of work at a time.
        refused: why it cannot be recorded, where it cannot.
        event: the number of the record that it marks the place of, where it is one.
    """

    name: str
    work: Callable[[], None]
    blocks: Sequence[Block] = ()
    refused: str = ""
    owner: Graph | None = None
    scratch: Block | None = None


@dataclass(eq=False)
class Graph:
    """Recorded work; `pending` launches of it are not yet done."""

    tasks: list[Task]
    pending: int = 0


@dataclass(eq=False)
class Stream:
    """Work in the order in which it was asked for.

    Attributes:
        done, asked: how many tasks were done, and asked for.
        recording: the tasks of the capture that is open, if one is.
        invalid: why the open capture cannot become a graph.
        thread, mode: of the capture.
    """

    waiting: deque[Task] = field(default_factory=deque)
    done: int = 0
    recording: list[Task] | None = None
    invalid: str = ""
    thread: int = 0
    mode: int = 2

    @property
    def asked(self) -> int:
        return self.done + len(self.waiting)


class Scheduler:
    """Does the work of all streams.

    Args:
        seed: of the draws; None leaves all work until somebody waits for it.
        eager: whether work is done as soon as it is asked for.
        report: hears what goes wrong in a task: nobody who asked for it is there any more.

    Attributes:
        log: names of the tasks that were done.
    """

    def __init__(self, seed: int | None, eager: bool, report: Callable[[BaseException], None]) -> None:
        self._draws, self._eager, self._report = random.Random(seed), eager, report
        # Some seeds leave everything to the last, some hurry, most do something in between.
        self._hurry = 0.0 if seed is None else self._draws.choice((0.0, 0.02, 0.1, 0.3, 0.6))
        self.streams: list[Stream] = []
        self.log: list[str] = []

    def push(self, stream: Stream, task: Task) -> None:
        """Put a task into a stream, or record it.

        Raises:
            ViolationError: what it uses is gone by now.
        """
        if stream.recording is not None:
            if task.refused:
                stream.invalid = stream.invalid or task.refused
            stream.recording.append(task)
            return
        others = (other for line in self.streams if line is not stream for other in line.waiting)
        if task.scratch is not None and any(other.scratch is task.scratch for other in others):
            raise ViolationError(f"{task.name} works in memory that another stream's work is in")
        for block in task.blocks:
            if block.freed:
                raise ViolationError(f"{task.name} was asked for on {block.kind} memory that was freed")
            block.pending += 1
        stream.waiting.append(task)
        if self._eager:
            self.finish(stream)

    def launch(self, stream: Stream, graph: Graph) -> None:
        """Put all of a graph into a stream."""
        graph.pending += 1
        for task in graph.tasks:
            self.push(stream, replace(task, name=f"{task.name} (recorded)"))

        def end() -> None:
            graph.pending -= 1

        self.push(stream, Task("", end))

    def finish(self, stream: Stream, place: int | None = None) -> None:
        """Do a stream's work up to a place, and some of the others' in between."""
        place = stream.asked if place is None else place
        while stream.done < place:
            self._one(stream)
            if self._hurry and self._draws.random() < self._hurry:
                self._one(self._draws.choice(self.streams))

    def some(self) -> None:
        """Do some work that nobody waits for, or none."""
        while self._hurry and self.streams and self._draws.random() < self._hurry:
            self._one(self._draws.choice(self.streams))

    def chance(self, odds: float) -> bool:
        """A draw."""
        return self._draws.random() < odds

    def _one(self, stream: Stream) -> None:
        if not stream.waiting:
            return
        task = stream.waiting.popleft()
        stream.done += 1
        for block in task.blocks:
            block.pending -= 1
        try:
            for block in task.blocks:
                if block.freed:
                    raise ViolationError(f"{task.name} ran on {block.kind} memory that was freed")
            if task.name:
                self.log.append(task.name)
            task.work()
        except BaseException as error:  # an engine's own, say
            self._report(error)
