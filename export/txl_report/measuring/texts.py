"""A text as pieces that are read side by side, and how much of it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from txl_runtime.errors import UsageError
from txl_runtime.types import Ids

if TYPE_CHECKING:
    from txl_runtime.bundle.manifest import Manifest
    from txl_runtime.model import Model


LARGE = 50_000_000
"""Parameters: a model that has more takes so long for a token that a quarter of the tokens are measured."""


@dataclass(frozen=True)
class TextPieces:
    """A text that is cut into pieces of equal length, which follow each other and are read side by side.

    Attributes:
        tokens: int32 [sequences, segments × length + 1]; the last token of a piece is the first one of the next.
        length: of a segment.
        warm_up: segments at the start of each piece that only fill the memory.
    """

    tokens: Ids
    length: int
    warm_up: int

    @property
    def segments(self) -> int:
        """How many there are in a piece."""
        return int(self.tokens.shape[1] - 1) // self.length

    def place(self, sequence: int, position: int) -> int:
        """Which token of the text the target of a piece's position is."""
        return sequence * self.segments * self.length + position + 1


def fewer(manifest: Manifest, most: int) -> int:
    """How many tokens of `most` are measured: all of them, or a quarter where the model is a large one.

    It depends on the model alone and never on the time: a page has the same numbers on every machine, busy or not.
    """
    return most if manifest.parameters <= LARGE else most // 4


def checked_ids(model: Model, ids: ArrayLike) -> Ids:
    """Token ids int32 [T] of a text.

    Raises:
        UsageError: they are no row of ids of this model.
    """
    found = np.asarray(ids)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise UsageError(f"the text is {found.dtype} {list(found.shape)}, expected token ids in one row")
    vocab_size = model.manifest.vocab_size
    if found.size and vocab_size and not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
        raise UsageError(
            f"the text has ids {int(found.min())} … {int(found.max())}, expected 0 … {vocab_size - 1}; check the "
            "vocabulary the ids come from"
        )
    return found.astype(np.int32)


def cut_pieces(model: Model, ids: Ids, warm_up: int) -> TextPieces | None:
    """A text as pieces: as many as the model reads side by side, as long as warming up takes less than half of each.

    Args:
        model: a model whose tokens have losses.
        ids: int32 [T].
        warm_up: segments that each piece is warmed up with, if the text is long enough; else none are.

    Returns:
        The pieces; None for a text that is shorter than a segment of a model that takes whole ones.
    """
    length = model.segment_lengths[0]
    if len(ids) <= length and len(ids) > 1 and model.manifest.can.run_ragged and model.manifest.can.run_fewer:
        return TextPieces(ids[None], len(ids) - 1, 0)
    whole = (len(ids) - 1) // length
    sequences = model.batch_size
    while sequences > 1 and whole // sequences < 2 * warm_up + 1 and model.manifest.can.run_fewer:
        sequences -= 1
    segments = whole // sequences
    if segments < 1:
        return None
    size = segments * length
    tokens = np.stack([ids[first : first + size + 1] for first in range(0, sequences * size, size)])
    return TextPieces(tokens, length, warm_up if segments > warm_up else 0)
