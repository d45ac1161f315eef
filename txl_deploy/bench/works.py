"""What a bundle is timed at: what a Transformer-XL does, and the steps of any other model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

from txl_report.schema.measurement import BUNDLE
from txl_runtime.model import Model
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Array

from txl_deploy.bench.competitor import BundleCompetitor, BundleSteps, Competitor, StepCompetitor, fill, filling
from txl_deploy.bench.driving import fill_steps, is_transformer_xl, random_inputs
from txl_deploy.bench.floor import Bytes, StepBytes, bytes_of_any_step, bytes_of_step
from txl_deploy.bench.timing import Work, random_tokens

SEGMENTS = 16
"""How many different segments the calls of a task go through in turns."""

C = TypeVar("C", bound=Competitor | StepCompetitor)


class Task(NamedTuple):
    """A kind of work: what is asked for after each segment of `segment_length` tokens.

    `decode` asks for the log-probabilities after one token, `prefill` for the most likely next token after a segment
    and nothing else, `score` for the nats of every token of a segment, `step` for all outputs of a segment.
    """

    kind: str
    segment_length: int


class Works(ABC, Generic[C]):
    """What a bundle of one kind of model is timed at.

    Attributes:
        model: the bundle, opened.
        ours: the bundle among its competitors.
        tasks: kinds of work.
        memory_form: of a Transformer-XL.
    """

    model: Model
    ours: C
    tasks: tuple[Task, ...]
    memory_form: str | None = None

    @abstractmethod
    def fill(self) -> None:
        """Fill the bundle's state; where it is compared with others, that has filled the state of all."""

    @abstractmethod
    def call(self, competitor: C, task: Task) -> Work:
        """One call of a task; consecutive calls take consecutive segments."""

    @abstractmethod
    def shortest(self, stream: Stream) -> Work:
        """Fill a stream's state; then what its shortest step is: there Python counts most."""

    @abstractmethod
    def floor(self, length: int) -> Bytes | StepBytes:
        """What the bundle has to read for a segment, at least."""

    @abstractmethod
    def rates(self, size: int, positions: int, per_second: float) -> dict[str, Any]:
        """Of a `Row`: what a call of so many positions has to read, and so many of them in a second."""

    @abstractmethod
    def conditions(self) -> dict[str, Any]:
        """Of `Conditions`: what is full, and what the calls read."""


class TokenWorks(Works[Competitor]):
    """Decode with L = 1, prefill and scoring with the longest segments."""

    ours: BundleCompetitor

    def __init__(self, model: Model) -> None:
        self.model, self.ours = model, BundleCompetitor(BUNDLE, model)
        self.memory_form = model.manifest.transformer_xl.memory
        longest = model.segment_lengths[0]
        long = (Task("prefill", longest),) if longest > 1 else ()
        self.tasks = (Task("decode", 1), *long, Task("score", longest))

    def fill(self) -> None:
        fill(self.ours, self.model)

    def call(self, competitor: Competitor, task: Task) -> Work:
        shape = (SEGMENTS, self.model.batch_size, task.segment_length + (task.kind == "score"))
        tokens = random_tokens(self.model.manifest.vocab_size, shape, seed=1)
        calls = {"decode": competitor.logprobs, "prefill": competitor.next_token, "score": competitor.score}
        call = calls[task.kind]
        return lambda index: call(tokens[index % SEGMENTS])

    def shortest(self, stream: Stream) -> Work:
        for segment in filling(self.model):
            stream.step(segment)
        tokens = random_tokens(self.model.manifest.vocab_size, (64, self.model.batch_size, 1))
        return lambda index: stream.step(tokens[index % len(tokens)])

    def floor(self, length: int) -> Bytes:
        return bytes_of_step(self.model.bundle, length)

    def rates(self, size: int, positions: int, per_second: float) -> dict[str, Any]:
        return {"tokens_per_second": per_second, "bytes_per_token": size / positions}

    def conditions(self) -> dict[str, Any]:
        rows = tuple(self.ours.stream.fill.tolist())
        length = self.model.manifest.memory_length
        return {"memory_length": length, "memory_rows": rows, "tokens": "uniformly random ids"}


class StepWorks(Works[StepCompetitor]):
    """Steps, of segments of every length."""

    ours: BundleSteps

    def __init__(self, model: Model) -> None:
        self.model, self.ours = model, BundleSteps(BUNDLE, model)
        self.tasks = tuple(Task("step", length) for length in model.segment_lengths)

    def fill(self) -> None:
        fill_steps(self.ours.stream, self.model.manifest)

    def call(self, competitor: StepCompetitor, task: Task) -> Work:
        segments = self._segments(task.segment_length)
        return lambda index: competitor.run(segments[index % SEGMENTS])

    def shortest(self, stream: Stream) -> Work:
        fill_steps(stream, self.model.manifest)
        segments = self._segments(self.model.segment_lengths[-1])
        return lambda index: stream.run(segments[index % SEGMENTS])

    def floor(self, length: int) -> StepBytes:
        return bytes_of_any_step(self.model.bundle)

    def rates(self, size: int, positions: int, per_second: float) -> dict[str, Any]:
        return {"positions_per_second": per_second, "bytes_per_step": size}

    def conditions(self) -> dict[str, Any]:
        shapes = {name: array.shape for name, array in self.ours.stream.state().items()}
        return {"state": shapes, "inputs": "normal values, uniformly random ids"}

    def _segments(self, length: int) -> list[dict[str, Array]]:
        return [random_inputs(self.model.manifest, length, seed) for seed in range(SEGMENTS)]


def works_of(model: Model) -> TokenWorks | StepWorks:
    """What a bundle is timed at."""
    return TokenWorks(model) if is_transformer_xl(model.manifest) else StepWorks(model)
