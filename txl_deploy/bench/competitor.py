"""Define a competitor: a program that does a bundle's work. The bundle itself is a competitor, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays, Floats, Ids

from txl_deploy.bench.driving import filling, is_transformer_xl
from txl_deploy.bench.floor import floor_of
from txl_deploy.bench.on_device import saved_bytes


class Competitor(ABC):
    """A program that can do a bundle's work: it reads one segment at a time and carries its state along.

    Attributes:
        name: name of the competitor.
        description: the code that runs.
        precision: the precision in which the competitor computes.
    """

    name: str
    description: str
    precision: str = "fp32"

    @abstractmethod
    def reset(self) -> None:
        """Set all sequences to their first state."""

    @abstractmethod
    def run(self, inputs: Arrays) -> Mapping[str, Array]:
        """Run one segment of all sequences, by the bundle's names, e.g. {"x": [B, L, 3]} → {"y": [B, L, 2]}."""

    @abstractmethod
    def step_bytes(self, length: int) -> int:
        """Return the smallest number of bytes that a segment of `length` positions reads when the state is full."""

    def advance(self, inputs: Arrays) -> None:
        """Run one segment, e.g. {"ids": [4, 64]}, to update the state; its results are not needed."""
        self.run(inputs)


class TokenCompetitor(Competitor):
    """A competitor for a Transformer-XL: it reads tokens, and has a method for each result that a task needs."""

    @abstractmethod
    def logprobs(self, tokens: Ids) -> Floats:
        """Return natural log-probabilities of the next token after each token: int32 [b, T] → float32 [b, T, V].

        For example, [4, 1] → [4, 1, 256].
        """

    @abstractmethod
    def next_token(self, tokens: Ids) -> Ids:
        """Return the most likely token after a segment: int32 [b, T] → int32 [b].

        For example, [4, 64] → [17, 4, 9, 2].
        """

    @abstractmethod
    def score(self, tokens: Ids) -> Floats:
        """Return negative log-likelihoods of tokens[:, 1:] in nats, float32 [b, T-1]; the segment is tokens[:, :-1]."""

    def run(self, inputs: Arrays) -> Mapping[str, Array]:
        (tokens,) = inputs.values()
        return {"logprobs": self.logprobs(tokens)}

    def advance(self, inputs: Arrays) -> None:
        (tokens,) = inputs.values()
        self.next_token(tokens)


Maker = Callable[[], Competitor]
"""A function that makes a competitor. It is called just before the competitor is compared with the bundle."""


class BundleCompetitor(TokenCompetitor):
    """The competitor that runs a bundle of any family, through the public interface of this project's runtime."""

    def __init__(self, name: str, model: Model) -> None:
        self.name, self.description = name, model.backend.description
        self.precision = str(model.manifest.precision)
        self.stream, self._bundle, self._saved = model.stream(), model.bundle, saved_bytes(model)

    def reset(self) -> None:
        self.stream.reset()

    def run(self, inputs: Arrays) -> Mapping[str, Array]:
        return self.stream.run(inputs)

    def advance(self, inputs: Arrays) -> None:
        if is_transformer_xl(self._bundle.manifest):
            super().advance(inputs)
        else:
            self.run(inputs)

    def logprobs(self, tokens: Ids) -> Floats:
        return self.stream.step(tokens)

    def next_token(self, tokens: Ids) -> Ids:
        return next(self.stream.generate(tokens, 1, temperature=0))

    def score(self, tokens: Ids) -> Floats:
        return self.stream.score(tokens)

    def step_bytes(self, length: int) -> int:
        return sum(floor_of(self._bundle, length, self._saved).values())


def fill(competitor: Competitor, model: Model) -> None:
    """Reset a competitor, and run segments until its state is full.

    A state that grows is full when it stops growing, which only the stream of a `BundleCompetitor` shows.
    """
    competitor.reset()
    stream = competitor.stream if isinstance(competitor, BundleCompetitor) else None
    for inputs in filling(model.manifest, stream):
        competitor.advance(inputs)
