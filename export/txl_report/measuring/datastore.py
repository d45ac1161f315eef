"""Measure losses on a text with and without a datastore, grouped by how often the store has read each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from txl_runtime.bundle.vocabulary import Bytes
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener, Silent

from txl_report.measuring.averages import error_of, loss_of
from txl_report.measuring.results import DatastoreMeasures, FrequencyLoss
from txl_report.measuring.texts import checked_ids

if TYPE_CHECKING:
    from txl_runtime.model import Model
    from txl_runtime.streaming.datastore import Datastore

MOST_TOKENS = 4096
"""Maximum number of tokens that are predicted: a search takes milliseconds, maybe a thousand times a token's time."""
FIRSTS = (0, 1, 10, 100, 1000, 10_000)
"""The least number of times that a token was read, for each group of tokens."""


@dataclass(frozen=True)
class Searched:
    """A datastore to measure with.

    Attributes:
        name: the store's name on the page.
        store: the store, without the rows of the text.
        seen: for each token, how often the store has read it, int64 [V].
    """

    name: str
    store: Datastore
    seen: NDArray[np.int64]


def measure_datastore(
    model: Model, ids: ArrayLike, searched: Searched, listener: Listener | None = None
) -> DatastoreMeasures:
    """Measure a model's losses on a text, alone and with a datastore; the text is read from empty memory.

    The text is token ids int [T], e.g. [100000].

    Raises:
        UsageError: the text has fewer than two tokens, or ids of a different model; or the store cannot be searched.
    """
    listener, text_ids = listener or Silent(), checked_ids(model, ids)
    if len(text_ids) < 2:
        raise UsageError(f"a loss needs a text of at least 2 tokens, this one has {len(text_ids)}; give a longer one")
    used, chunk = text_ids[: MOST_TOKENS + 1], 16 * model.segment_lengths[0]
    streams, losses = (model.stream(1), model.stream(1)), list[NDArray[np.float64]]()
    listener.stage("search the datastore", len(used) - 1)
    for first in range(0, len(used) - 1, chunk):
        some = used[None, first : first + chunk + 1]
        pair = streams[0].score(some), streams[1].score(some, datastore=searched.store)
        losses.append(np.stack([nll[0].astype(np.float64) for nll in pair]))
        listener.advance(some.shape[1] - 1)
    alone, mixed = np.concatenate(losses, axis=1)
    seen, groups = searched.seen[used[1:]], list[FrequencyLoss]()
    for first, after in zip(FIRSTS, (*FIRSTS[1:], None), strict=True):
        inside = (seen >= first) & (seen < (np.inf if after is None else after))
        if inside.any():
            last = None if after is None else after - 1
            groups.append(FrequencyLoss(first, last, *(loss_of(nll[inside][None, None]) for nll in (alone, mixed))))
    return DatastoreMeasures(
        name=searched.name,
        rows=int(searched.seen.sum()),
        given=len(text_ids),
        without=loss_of(alone[None, :, None]),
        mixed=loss_of(mixed[None, :, None]),
        gain_error=error_of((alone - mixed)[None, :, None]),
        by_frequency=tuple(groups),
        of_bytes=isinstance(model.vocabulary, Bytes),
    )
