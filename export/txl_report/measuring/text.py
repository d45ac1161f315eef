"""Measure losses on a text, by the position in the segment and by the length of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from txl_runtime.bundle.vocabulary import Bytes, Words
from txl_runtime.listener import Listener, Silent
from txl_runtime.streaming.inputs import refusal
from txl_runtime.types import Ids

from txl_report.facts.plain import Missing
from txl_report.measuring.averages import Values, error_of, loss_of
from txl_report.measuring.gains import gain_of, passage_of
from txl_report.measuring.results import MemoryLoss, PositionLoss, TextMeasures
from txl_report.measuring.texts import TextPieces, checked_ids, cut_pieces, fewer
from txl_report.numbers import counted

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary
    from txl_runtime.model import Model

MOST_TOKENS = 16_384
"""Maximum number of tokens that are predicted; a quarter for a large model (`fewer`)."""
LEAST_SEGMENTS = 8
"""Number of segments that are read after the memory is full, even if filling a long memory takes most of the work."""
MOST_BINS = 64
"""Maximum number of bins into which the positions of a segment are grouped."""
CAPPED = (
    "The weights were trained with one memory length. Here the same weights run with fewer memory rows, which is not "
    "the same as a model that was trained with so few."
)
"""Note beside losses with fewer memory rows."""
FRAGMENTS = (
    "Without memory the model sees the tokens of its own segment alone, so the first tokens of a segment have hardly "
    "any context; the gain says what carrying the memory over is worth, this among it."
)
"""Note beside losses without memory."""
JOINT = "This model's sequences influence one another; pieces of the text were read side by side, so they did here."
"""Note for a model whose sequences influence one another."""


def measure_text(
    model: Model,
    ids: ArrayLike,
    listener: Listener | None = None,
    *,
    most: int | None = None,
) -> TextMeasures | Missing:
    """Measure a model's losses on a text.

    The text is cut into whole segments of the largest length. For every memory length, a stream of its own reads the
    same segments in the same order, so that losses differ only by the memory. Segments at the start that only fill the
    memory are not counted. For example, ids [100000] with B 4 are 4 pieces of 25,000.

    Args:
        model: a model of any bundle.
        ids: int [T], the text as token ids.
        listener: is told the number of segments that are read.
        most: maximum number of tokens of the text that are used; None for `most_tokens`.

    Returns:
        The losses, or the reason why none can be measured.

    Raises:
        UsageError: the ids do not fit this model.
    """
    listener, text_ids = listener or Silent(), checked_ids(model, ids)
    length, rows = model.segment_lengths[0], model.memory_length
    reason, pieces = refusal(model.manifest, "score"), None
    if not reason:
        used = most_tokens(model) if most is None else max(most, 2)
        pieces = cut_pieces(model, text_ids[:used], -(-(rows or 0) // length))
        if pieces is None:
            reason = _too_short(model, len(text_ids))
    if pieces is None:
        return Missing(reason)
    lengths, why = _memory_lengths(model, pieces)
    losses = _read(model, pieces, lengths, listener)
    whole = losses[-1]
    by_memory = passing = gain = None
    notes = [] if model.manifest.can.run_fewer else [JOINT]
    notes += _unknown(model.vocabulary, pieces.tokens[:, pieces.warm_up * pieces.length + 1 :])
    if len(lengths) > 1:
        notes += [CAPPED, FRAGMENTS]
        by_memory = tuple(_memory_loss(rows, loss, whole) for rows, loss in zip(lengths, losses, strict=True))
        passing = passage_of(pieces, text_ids, whole, losses[0], model.vocabulary)
        gain = gain_of(whole, losses[0])
    elif rows and not pieces.warm_up:
        notes += ["The memory was still filling while the losses were measured, because the text is short."]
    return TextMeasures(
        given=len(text_ids),
        used=len(pieces.tokens) * pieces.segments * pieces.length + 1,
        warm_up=pieces.warm_up * pieces.length,
        sequences=len(pieces.tokens),
        segment_length=pieces.length,
        memory_length=rows,
        loss=loss_of(whole),
        by_position=_by_position(whole, losses[0] if len(lengths) > 1 else None),
        by_memory=by_memory,
        passage=passing,
        gain=gain,
        reason=why,
        notes=tuple(notes),
        of_bytes=isinstance(model.vocabulary, Bytes),
    )


def most_tokens(model: Model) -> int:
    """Return the maximum number of tokens of a text that are used; it depends only on the model's sizes."""
    length = model.segment_lengths[0]
    segments = -(-(model.memory_length or 0) // length) + LEAST_SEGMENTS
    least = segments * length * _together(model)
    return max(fewer(model.manifest, MOST_TOKENS), least) + 1


def _together(model: Model) -> int:
    """Return the number of sequences that must be read at the same time."""
    return 1 if model.manifest.can.run_fewer else model.batch_size


def _too_short(model: Model, tokens: int) -> str:
    """Return the message for a text that is too short to be read."""
    if model.manifest.can.run_ragged and model.manifest.can.run_fewer:
        return f"A loss needs a text of at least 2 tokens, this one has {tokens:,}."
    needed = model.segment_lengths[0] * _together(model) + 1
    return f"A whole segment needs a text of at least {needed:,} tokens, this one has {tokens:,}."


def _unknown(vocabulary: Vocabulary | None, counting: Ids) -> list[str]:
    """Return a note if some of the counted tokens are the vocabulary's id for unknown words, else []."""
    word = vocabulary.unknown if isinstance(vocabulary, Words) else None
    count = 0 if word is None else int((counting == word).sum())
    if not count:
        return []
    return [
        f"{count:,} of the {counting.size:,} tokens that count are the vocabulary's unknown "
        "word: what stood there is not told from any other such word, and their loss is that of no particular one."
    ]


def _memory_lengths(model: Model, pieces: TextPieces) -> tuple[list[int], str]:
    """Return the memory lengths to compare, fewest rows first, and the reason if there is only one, else ""."""
    rows = model.memory_length
    if rows is None:
        names = ", ".join(dict.fromkeys(state.name for state in model.manifest.states))
        named = names if len(names) <= 100 else names[:100] + " …"
        return [0], f"This model counts no memory rows (it carries {named or 'nothing'}), so none can be left out."
    if not rows:
        return [0], "This model has no memory (M = 0), so there is nothing to leave out."
    if not pieces.warm_up:
        length = model.segment_lengths[0]
        needed = (-(-rows // length) + 1) * length * _together(model) + 1
        return [rows], (
            f"The text is too short for a memory of {counted(rows, 'row')}; give one of at least {needed:,} tokens."
        )
    return sorted({0, rows // 4, rows // 2, rows}), ""


def _read(model: Model, pieces: TextPieces, lengths: list[int], listener: Listener) -> list[Values]:
    """Measure losses [sequences, segments after warm-up, positions] for each memory length, the whole memory last."""
    sequences, size = len(pieces.tokens), pieces.length
    streams = [model.stream(sequences, memory_length=rows) for rows in lengths[:-1]] + [model.stream(sequences)]
    listener.stage("measuring losses", pieces.segments)
    losses_read: list[list[Values]] = [[] for _ in lengths]
    for segment in range(pieces.segments):
        tokens = pieces.tokens[:, segment * size : (segment + 1) * size + 1]
        for stream, losses in zip(streams, losses_read, strict=True):
            nll = stream.score(tokens)
            if segment >= pieces.warm_up:
                losses.append(nll.astype(np.float64))
        listener.advance()
    return [np.stack(losses, axis=1) for losses in losses_read]


def _by_position(losses: Values, without: Values | None) -> tuple[PositionLoss, ...]:
    size = losses.shape[2]
    width = -(-size // MOST_BINS)
    bins = [(first, min(first + width, size)) for first in range(0, size, width)]
    return tuple(
        PositionLoss(
            first,
            last - 1,
            loss_of(losses[:, :, first:last], size),
            None if without is None else loss_of(without[:, :, first:last], size),
        )
        for first, last in bins
    )


def _memory_loss(rows: int, losses: Values, whole: Values) -> MemoryLoss:
    more = losses - whole
    return MemoryLoss(rows, loss_of(losses), float(more.mean()), error_of(more))
