"""Hold measurements on a text as plain values for the page.

Losses are negative log-likelihoods in nats per token. Standard errors are errors of a mean; they are computed from
means of blocks of tokens, because neighbouring tokens are not independent. If a measurement is impossible, a `Missing`
replaces it, with the reason and a command that would help.
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
    """The loss of tokens at the same positions, `first` … `last` inclusive, of their segments.

    At position 0 the newest token that the model sees is the segment's first. `without` is the loss of the same tokens
    without any memory row; None if the model cannot run without memory.
    """

    first: int
    last: int
    loss: Loss
    without: Loss | None = None


@dataclass(frozen=True)
class MemoryLoss:
    """The loss with memory limited to a number of rows; the tokens are the same for every limit.

    Attributes:
        rows: the limit, in memory rows.
        loss: the loss over the tokens.
        more: mean over the tokens of (loss with this limit - loss with all M rows).
        more_error: standard error of `more`, computed from the differences.
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
        token: the token's id.
        text: the token's text, which may hold any character; None if there is no vocabulary.
        with_memory, without_memory: the loss with all memory rows, and without any.
    """

    place: int
    token: int
    text: str | None
    with_memory: float
    without_memory: float

    @property
    def gain(self) -> float:
        """Return the number of nats by which memory lowered the loss; negative if it raised the loss."""
        return self.without_memory - self.with_memory


@dataclass(frozen=True)
class MemoryGain:
    """The gain from memory over all measured tokens of a text.

    Attributes:
        count: number of tokens compared.
        mean, error: mean gain per token and its standard error.
        share_gained: share of tokens, 0 … 1, whose loss memory lowered.
        doubled: share of tokens, 0 … 1, whose probability memory at least doubled.
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
        given: number of tokens in the text.
        used: number of tokens that the model read or predicted; all later tokens were cut off to limit the work.
        warm_up: number of tokens at the start of each piece that only filled the memory; their losses do not count.
        sequences: number of pieces of the text that ran side by side.
        segment_length: length of the segments into which the text was cut.
        memory_length: number of memory rows; None for a model that counts none.
        loss: the loss over all counted tokens, with the whole memory.
        by_position: losses within the segment, in order; single positions, or bins of them if L is large.
        by_memory: losses by number of memory rows, fewest first; None if the model counts no rows, or the text is
            short.
        passage: the adjacent tokens with the largest total gain; None in the same cases as `by_memory`.
        gain: the gain over all counted tokens; None in the same cases.
        reason: the reason why these three are None, as a sentence.
        notes: sentences to show beside the numbers.
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
    """The length of context that the model uses, judged by the tenth of the tokens with the largest loss.

    See `measure_context`.

    Attributes:
        given, used: number of tokens in the text, and number of tokens from its beginning that were used.
        compared: number of tokens whose loss was measured at every length.
        step: Δ, the step between context lengths, in tokens: c stands for c + 1 … c + Δ tokens, each equally often.
        length: the effective context, a multiple of Δ: the first c whose gain to c + Δ is below 1 %.
        gains: the paper's relative gain of c + Δ over c, for c = 0, Δ …: the share by which perplexity falls. The
            smaller of a token's two losses counts, so a gain is never below zero.
    """

    given: int
    used: int
    compared: int
    step: int
    length: int
    gains: tuple[float, ...]

    @property
    def longest(self) -> int:
        """Return the longest context that was compared; an effective context of this length is a lower bound."""
        return len(self.gains) * self.step


@dataclass(frozen=True)
class FrequencyLoss:
    """The losses of tokens that a datastore has read `first` … `last` times; `last` is None for no limit.

    Attributes:
        without, mixed: the losses of the same tokens, of the model alone and with the store's neighbours.
    """

    first: int
    last: int | None
    without: Loss
    mixed: Loss


@dataclass(frozen=True)
class DatastoreMeasures:
    """Losses on a text with and without a datastore. See `measure_datastore`.

    Attributes:
        name: the store's name.
        rows: number of positions that the store has read.
        given: number of tokens in the text; `without.count` of them were predicted.
        without, mixed: the losses of the model alone, and with the store's neighbours.
        gain_error: standard error of the mean difference between the two; None if the tokens are too few.
        by_frequency: losses by how often the store has read the token, the rarest first.
        of_bytes: True if every token is a byte, so that bits per token are bits per byte.
    """

    name: str
    rows: int
    given: int
    without: Loss
    mixed: Loss
    gain_error: float | None
    by_frequency: tuple[FrequencyLoss, ...]
    of_bytes: bool = False
