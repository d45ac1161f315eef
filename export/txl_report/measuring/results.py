"""What was measured on a text, as plain values for the page.

Losses are negative log-likelihoods in nats per token. A standard error is that of the mean. Tokens that stand near each
other are not independent, so errors are computed from means of blocks of neighbouring tokens. Where nothing was
measured, a `Missing` stands instead of these values: it says why, and what would make it measurable.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """The loss over some tokens.

    Attributes:
        count: how many tokens.
        nll: mean loss.
        error: standard error of `nll`; None where the tokens are too few to tell.
        perplexity: exp(nll); infinite where that is beyond the range of numbers.
    """

    count: int
    nll: float
    error: float | None
    perplexity: float


@dataclass(frozen=True)
class PositionLoss:
    """The loss of tokens that stand at the same places within their segment: position 0 is predicted with the first
    token of a segment as the last one seen. `last` is included. `without` is the loss of the same tokens with no memory
    row, None where nothing can be left out.
    """

    first: int
    last: int
    loss: Loss
    without: Loss | None = None


@dataclass(frozen=True)
class MemoryLoss:
    """The loss with a memory that was capped at some rows, over the same tokens as with every other cap.

    Attributes:
        rows: the most memory rows that could be filled.
        loss: over the tokens.
        more: how much larger the loss is than with all M rows: the mean over tokens of the difference.
        more_error: standard error of `more`, from the differences.
    """

    rows: int
    loss: Loss
    more: float
    more_error: float | None


@dataclass(frozen=True)
class TokenGain:
    """One token, and what the memory did for it.

    Attributes:
        place: which token of the text, counted from 0.
        token: its id.
        text: its piece of the vocabulary; None where there is none. It can hold anything that a text can.
        with_memory, without_memory: the loss with M rows and with none.
    """

    place: int
    token: int
    text: str | None
    with_memory: float
    without_memory: float

    @property
    def gain(self) -> float:
        """By how many nats the memory lowered the loss; below zero where it raised it."""
        return self.without_memory - self.with_memory


@dataclass(frozen=True)
class MemoryGain:
    """What the memory did for the text as a whole.

    Attributes:
        count: tokens that were compared.
        mean, error: mean gain per token and its standard error.
        share_gained: of tokens whose loss the memory lowered, 0 … 1.
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
        used: tokens that the model was fed or asked for; the rest was cut off to bound the work.
        warm_up: tokens at the start of each of `sequences` pieces that only filled the memory and count nowhere.
        sequences: pieces of the text that ran side by side.
        segment_length: L, the length of the segments that the text was cut into.
        memory_length: M; None for a model that counts no memory rows.
        loss: over all tokens that count, with the whole memory.
        by_position: within the segment, in order; single positions, or bins of them where L is large.
        by_memory: by rows of memory, fewest first; None where the model counts none, or the text is too short.
        passage: the tokens in a row that gained most together, each with its gain; None likewise.
        gain: the same over the whole text; None likewise.
        reason: why those are None, as a sentence.
        notes: sentences that belong beside the numbers.
        of_bytes: whether every token is a byte, so that bits per token are bits per byte.
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
    """How far back the model uses its context, by its hardest tenth of tokens. See `measure_context`.

    Attributes:
        given, used: tokens in the text, and from its start those that took part.
        compared: tokens whose loss was measured at every length.
        step: Δ, by how many tokens contexts differ: c means c + 1 … c + Δ tokens, each as often as any other.
        length: the effective context, a multiple of Δ: the first c whose gain to c + Δ is below 1 %.
        gains: the paper's relative gain of c + Δ over c, for c = 0, Δ …: how much smaller the perplexity is, as a
            share. A token counts with the smaller of its two losses, so this is never below zero.
    """

    given: int
    used: int
    compared: int
    step: int
    length: int
    gains: tuple[float, ...]

    @property
    def longest(self) -> int:
        """The longest context; an effective one that is as long is a lower bound."""
        return len(self.gains) * self.step
