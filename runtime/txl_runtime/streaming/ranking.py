"""Costs of hypotheses that continue one context, e.g. an n-best list of a speech recogniser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import as_array, check_tokens, shown
from txl_runtime.streaming.inputs import require_tokens
from txl_runtime.streaming.texts import encoded, padded
from txl_runtime.types import Ids

if TYPE_CHECKING:
    from txl_runtime.streaming.snapshot import StreamState
    from txl_runtime.streaming.state import RowState
    from txl_runtime.streaming.stream import Stream


def rank(
    open_stream: Callable[[int], Stream],
    manifest: Manifest,
    context: ArrayLike,
    hypotheses: Sequence[ArrayLike],
    state: RowState | StreamState | None,
) -> NDArray[np.float64]:
    """Return the negative log-likelihood of each hypothesis in nats, float64 [n]; see `Model.rank`. `open_stream(b)`
    opens a stream of b sequences.

    For example, context [5, 9] and hypotheses [[2], [3, 1]] give [1.2, 4.5].
    """
    require_tokens(manifest, "score")
    if not isinstance(hypotheses, list | tuple | np.ndarray) or not len(hypotheses):
        raise UsageError(f"hypotheses are {shown(hypotheses)}, expected a list of them, at least one")
    alone = open_stream(1)

    def read(tokens: ArrayLike, what: str) -> Ids:
        if isinstance(tokens, str | bytes):
            ids: ArrayLike = encoded(tokens, None, alone._vocabulary(), 1)[0]
        else:
            ids = as_array(tokens, what)[None]
        return check_tokens(ids, 1, manifest.vocab_size, None, what)[0][0] if np.size(ids) else np.zeros(0, np.int32)

    context_ids = read(context, "context tokens")
    hypothesis_ids = [read(hypothesis, f"tokens of hypothesis {index}") for index, hypothesis in enumerate(hypotheses)]
    if not len(context_ids):
        raise UsageError("the context is empty, expected at least one token for the hypotheses to go on from")
    if state is not None:
        alone.put(0, state)
    if len(context_ids) > 1:
        alone.feed(context_ids[None, :-1], last=True)
    start, most = alone.take(0), manifest.batch_size if manifest.can.run_apart else 1
    costs, stream = np.zeros(len(hypothesis_ids)), open_stream(min(most, len(hypothesis_ids)))
    # sequences of similar length run together, which needs less padding
    order = sorted(range(len(hypothesis_ids)), key=lambda index: len(hypothesis_ids[index]))
    for first in range(0, len(order), stream.batch_size):
        some = order[first : first + stream.batch_size]
        rows = [np.concatenate([context_ids[-1:], hypothesis_ids[index]]) for index in some]
        for row in range(len(rows)):
            stream.put(row, start)
        tokens, lengths = padded([*rows, *[context_ids[:0]] * (stream.batch_size - len(rows))])
        costs[some] = stream.score(tokens, lengths)[: len(some)].sum(axis=1, dtype=np.float64)
    return costs
