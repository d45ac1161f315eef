"""What a competitor is: something that does a bundle's work. The bundle itself is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays, Floats, Ids

from txl_deploy.bench.driving import filling, is_transformer_xl
from txl_deploy.bench.floor import floor_of


class Competitor(ABC):
    """Something that can do a bundle's work: it reads one segment at a time and carries its state along.

    Attributes:
        name: of the competitor.
        description: what runs.
        precision: what it computes in.
    """

    name: str
    description: str
    precision: str = "fp32"

    @abstractmethod
    def reset(self) -> None:
        """Start anew, with the state of streams that have seen nothing."""

    @abstractmethod
    def run(self, inputs: Arrays) -> Mapping[str, Array]:
        """One segment of all sequences, by the bundle's names of inputs and outputs."""

    @abstractmethod
    def step_bytes(self, length: int) -> int:
        """Bytes that one segment of `length` positions has to read at least when the state is full."""

    def advance(self, inputs: Arrays) -> None:
        """One segment that only moves the state on."""
        self.run(inputs)


class TokenCompetitor(Competitor):
    """One that does what a Transformer-XL does: it reads tokens, and can be asked for less than all outputs."""

    @abstractmethod
    def logprobs(self, tokens: Ids) -> Floats:
        """One segment int32 [b, T] → natural log-probabilities of the next token after each, float32 [b, T, V]."""

    @abstractmethod
    def next_token(self, tokens: Ids) -> Ids:
        """One segment int32 [b, T] → the most likely token after it, int32 [b]."""

    @abstractmethod
    def score(self, tokens: Ids) -> Floats:
        """Nats of tokens[:, 1:], float32 [b, T-1]; the segment is tokens[:, :-1]."""

    def run(self, inputs: Arrays) -> Mapping[str, Array]:
        (tokens,) = inputs.values()
        return {"logprobs": self.logprobs(tokens)}

    def advance(self, inputs: Arrays) -> None:
        (tokens,) = inputs.values()
        self.next_token(tokens)


Maker = Callable[[], Competitor]


class BundleCompetitor(TokenCompetitor):
    """A bundle of any family in this runtime, used through the public interface."""

    def __init__(self, name: str, model: Model) -> None:
        self.name, self.description = name, model.backend.description
        self.precision = str(model.manifest.precision)
        self.stream, self._bundle = model.stream(), model.bundle

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
        return sum(floor_of(self._bundle, length).values())


def fill(competitor: Competitor, model: Model) -> None:
    """Start a competitor anew and fill its state; the bundle tells when that is, of a state that grows."""
    competitor.reset()
    stream = competitor.stream if isinstance(competitor, BundleCompetitor) else None
    for inputs in filling(model.manifest, stream):
        competitor.advance(inputs)
