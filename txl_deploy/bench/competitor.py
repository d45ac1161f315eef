"""What a competitor is: something that does a bundle's work. The bundle itself is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays, Floats, Ids

from txl_deploy.bench.floor import bytes_of_any_step, bytes_of_step
from txl_deploy.bench.timing import random_tokens


class Competitor(Protocol):
    """Something that can do a bundle's work: it reads one segment at a time and carries its memory along."""

    name: str
    description: str

    def reset(self) -> None:
        """Start anew, with the memory of streams that have seen nothing."""

    def logprobs(self, tokens: Ids) -> Floats:
        """One segment int32 [b, T] → natural log-probabilities of the next token after each, float32 [b, T, V]."""

    def next_token(self, tokens: Ids) -> Ids:
        """One segment int32 [b, T] → the most likely token after it, int32 [b]."""

    def score(self, tokens: Ids) -> Floats:
        """Nats of tokens[:, 1:], float32 [b, T-1]; the segment is tokens[:, :-1]."""

    def step_bytes(self, length: int) -> int:
        """Bytes that one segment of `length` tokens has to read at least when the memory is full."""


Maker = Callable[[], tuple[Competitor, str]]
"""Makes a competitor, and says the precision that it computes in."""


class BundleCompetitor(Competitor):
    """A bundle in this runtime, used through the public interface."""

    def __init__(self, name: str, model: Model) -> None:
        self.name, self.description = name, model.backend.description
        self.stream, self._bundle = model.stream(), model.bundle

    def reset(self) -> None:
        self.stream.reset()

    def logprobs(self, tokens: Ids) -> Floats:
        return self.stream.step(tokens)

    def next_token(self, tokens: Ids) -> Ids:
        return next(self.stream.generate(tokens, 1, temperature=0))

    def score(self, tokens: Ids) -> Floats:
        return self.stream.score(tokens)

    def step_bytes(self, length: int) -> int:
        return bytes_of_step(self._bundle, length).total


class StepCompetitor(Protocol):
    """Something that does the steps of a bundle of any family, and carries its state along."""

    name: str
    description: str

    def reset(self) -> None:
        """Start anew, with the state of streams that have seen nothing."""

    def run(self, inputs: Arrays) -> Mapping[str, Array]:
        """One segment of all sequences, by the bundle's names of inputs and outputs."""

    def step_bytes(self, length: int) -> int:
        """Bytes that one segment of `length` positions has to read at least when the state is full."""


class BundleSteps(StepCompetitor):
    """A bundle in this runtime, used through the public interface."""

    def __init__(self, name: str, model: Model) -> None:
        self.name, self.description = name, model.backend.description
        self.stream, self._bundle = model.stream(), model.bundle

    def reset(self) -> None:
        self.stream.reset()

    def run(self, inputs: Arrays) -> Mapping[str, Array]:
        return self.stream.run(inputs)

    def step_bytes(self, length: int) -> int:
        return bytes_of_any_step(self._bundle).total


def filling(model: Model, seed: int = 0) -> Iterator[Ids]:
    """Random segments of the longest length: they fill the memory and then move every row of it out."""
    shape = (model.batch_size, model.segment_lengths[0])
    for index in range(-(-model.manifest.memory_length // shape[1]) + 1):
        yield random_tokens(model.manifest.vocab_size, shape, seed + index)


def fill(competitor: Competitor, model: Model) -> None:
    """Start a competitor anew and fill its memory."""
    competitor.reset()
    for tokens in filling(model):
        competitor.next_token(tokens)
