"""Cut a text into pieces that are read side by side, and limit the part of the text that is read."""

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
"""Number of parameters above which only a quarter of the tokens is measured, because the model is slow."""


@dataclass(frozen=True)
class TextPieces:
    """A text cut into consecutive pieces of equal length, which are read side by side.

    Attributes:
        tokens: int32 [sequences, segments × length + 1]; the last token of a piece is the first one of the next.
        length: length of a segment, in tokens.
        warm_up: number of segments at the start of each piece that only fill the memory.
    """

    tokens: Ids
    length: int
    warm_up: int

    @property
    def segments(self) -> int:
        """Return the number of segments in a piece."""
        return int(self.tokens.shape[1] - 1) // self.length

    def place(self, sequence: int, position: int) -> int:
        """Return the index, in the text, of the token that is predicted at a position of a piece."""
        return sequence * self.segments * self.length + position + 1


def fewer(manifest: Manifest, most: int) -> int:
    """Return the number of tokens to measure: `most`, or a quarter of it for a large model.

    The number depends only on the model, never on time, so that a page has the same numbers on every machine.
    """
    return most if manifest.parameters <= LARGE else most // 4


def checked_ids(model: Model, ids: ArrayLike) -> Ids:
    """Return the token ids of a text as int32 [T].

    For example, int64 [[5, 9]] is refused, and [5, 9] becomes int32.

    Raises:
        UsageError: the array is not one row of ids of this model.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise UsageError(f"the text is {array.dtype} {list(array.shape)}, expected token ids in one row")
    vocab_size = model.manifest.vocab_size
    if array.size and vocab_size and not 0 <= int(array.min()) <= int(array.max()) < vocab_size:
        raise UsageError(
            f"the text has ids {int(array.min())} … {int(array.max())}, expected 0 … {vocab_size - 1}; check the "
            "vocabulary the ids come from"
        )
    return array.astype(np.int32)


def cut_pieces(model: Model, ids: Ids, warm_up: int) -> TextPieces | None:
    """Cut a text into as many pieces as the batch size, or into fewer so that warm-up takes less than half of each.

    For example, ids [100000] with B 4 become 4 pieces of at most 25,000.

    Args:
        model: a model whose tokens have losses.
        ids: int32 [T].
        warm_up: wanted number of warm-up segments of each piece; if the text is too short, there is no warm-up.

    Returns:
        The pieces; None if the text is shorter than a segment and the model reads only whole segments.
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
