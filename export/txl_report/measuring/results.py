"""Measurements on a text, as plain values for the page.

Losses are negative log-likelihoods in nats per token. A standard error is that of the mean. Neighbouring tokens are not
independent, so errors are computed from means of blocks of them. A `Missing` replaces these values if there is no
measurement: it says why, and what would make one possible.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """The loss over some tokens.

    Attributes:
        count: number of tokens.
        nll: mean loss.
        error: standard error of `nll`; None if the tokens are too few.
        perplexity: exp(nll); infinite beyond the range of float.
    """

    count: int
    nll: float
    error: float | None
    perplexity: float


@dataclass(frozen=True)
class PositionLoss:
    """The loss of tokens at the same positions `first` … `last`, inclusive, of their segments. Position 0 is predicted
    from a segment's first token as the newest one. `without` is the loss of the same tokens with no memory row, None if
    memory cannot be left out.
    """

    first: int
    last: int
    loss: Loss
    without: Loss | None = None


@dataclass(frozen=True)
class MemoryLoss:
    """The loss with a memory capped at a number of rows, over the same tokens as with every other cap.

    Attributes:
        rows: the cap, in memory rows.
        loss: the loss over the tokens.
        more: mean over tokens of the loss minus that with all M rows.
        more_error: standard error of `more`, from the differences.
    """

    rows: int
    loss: Loss
    more: float
    more_error: float | None


@dataclass(frozen=True)
class TokenGain:
    """A token, and its gain from memory.

    Attributes:
        place: index of the token in the text, from 0.
        token: its id.
        text: its piece of the vocabulary; None if there is no vocabulary. It may hold any character.
        with_memory, without_memory: the loss with M rows and with none.
    """

    place: int
    token: int
    text: str | None
    with_memory: float
    without_memory: float

    @property
    def gain(self) -> float:
        """Return the nats by which the memory lowered the loss; negative if it raised it."""
        return self.without_memory - self.with_memory


@dataclass(frozen=True)
class MemoryGain:
    """The gain from memory over the text as a whole.

    Attributes:
        count: number of tokens compared.
        mean, error: mean gain per token and its standard error.
        share_gained: share of tokens whose loss the memory lowered, 0 … 1.
        doubled: share of tokens whose probability the memory at least doubled.
    """

    count: int
    mean: float
    error: float | None
    share_gained: float
    doubled: float


@dataclass(frozen=True)
class TextMeasures:
    """Losses on a text. See `measure_text`.

    Attributes:
        given: tokens in the text.
        used: tokens that the model read or predicted; the rest was cut off to bound the work.
        warm_up: tokens at the start of each of `sequences` pieces that only filled the memory and are not counted.
        sequences: pieces of the text that ran side by side.
        segment_length: L, the length of the segments that the text was cut into.
        memory_length: M; None for a model that counts no memory rows.
        loss: the loss over all counted tokens, with the whole memory.
        by_position: losses within the segment, in order; single positions, or bins of them if L is large.
        by_memory: losses by rows of memory, fewest first; None if the model counts none, or the text is too short.
        passage: the run of tokens with the largest total gain, each with its gain; None likewise.
        gain: the same over the whole text; None likewise.
        reason: why those are None, as a sentence.
        notes: sentences that belong beside the numbers.
        of_bytes: True if every token is a byte, so that bits per token are bits per byte.
    """

    given: int
    used: int
    warm_up: int
    sequences: int
    segment_length: int
    memory_length: int | None
    loss: Loss
    by_position: tuple[PositionLoss, ...]
    by_memory: tuple[MemoryLoss, ...] | None
    passage: tuple[TokenGain, ...] | None
    gain: MemoryGain | None
    reason: str = ""
    notes: tuple[str, ...] = ()
    of_bytes: bool = False


@dataclass(frozen=True)
class ContextMeasure:
    """The length of context that the model uses, by its hardest tenth of tokens. See `measure_context`.

    Attributes:
        given, used: tokens in the text, and those from its start that were used.
        compared: tokens whose loss was measured at every length.
        step: Δ, the step between contexts, in tokens: c means c + 1 … c + Δ tokens, each equally often.
        length: the effective context, a multiple of Δ: the first c whose gain to c + Δ is below 1 %.
        gains: the paper's relative gain of c + Δ over c, for c = 0, Δ …: the share by which perplexity falls. A token
            counts with the smaller of its two losses, so this is never below zero.
    """

    given: int
    used: int
    compared: int
    step: int
    length: int
    gains: tuple[float, ...]

    @property
    def longest(self) -> int:
        """Return the longest context compared; an effective one of this length is a lower bound."""
        return len(self.gains) * self.step
