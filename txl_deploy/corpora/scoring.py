"""Scores units on one model: as many beside each other as it has rows, each from fresh memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import TxlError
from txl_runtime.model import Model
from txl_runtime.streaming.inputs import require_tokens

from txl_deploy.corpora.documents import Outcome, Unit

SEGMENTS_PER_CALL = 16
"""Of the longest, per call: what is held does not depend on a document's length."""


def rows_of(manifest: Manifest) -> int:
    """How many documents of different lengths one stream of a model takes.

    Only independent sequences whose segments may hold any number of tokens can differ in length; other models take one
    document at a time.
    """
    return manifest.batch_size if manifest.can.run_apart and manifest.can.run_ragged else 1


class Scorer:
    """A model with one stream.

    Raises:
        UsageError: the model cannot score.
    """

    def __init__(self, model: Model) -> None:
        require_tokens(model.manifest, "score")
        self.rows = rows_of(model.manifest)
        self._stream = model.stream(self.rows)
        self._chunk = model.segment_lengths[0] * SEGMENTS_PER_CALL

    def score(self, units: Sequence[Unit], told: Callable[[float], None] = lambda share: None) -> list[Outcome]:
        """Score at most `rows` units beside each other; `told` hears which share is done.

        Returns:
            An outcome for each: what cannot be computed says why, and the others are not touched by it: where the
            engine fails, the units are repeated one by one.
        """
        try:
            totals = self._totals(units, told)
        except TxlError as error:
            if len(units) > 1:
                return [outcome for unit in units for outcome in self.score([unit])]
            return [Outcome(None, str(error)) for _ in units]
        return [Outcome(total) if math.isfinite(total) else Outcome(None, _no_number(total)) for total in totals]

    def _totals(self, units: Sequence[Unit], told: Callable[[float], None]) -> list[float]:
        """The sum of every unit's results that count, in float64."""
        stream, ids = self._stream, [unit.ids for unit in units]
        stream.reset()
        totals = [0.0] * len(units)
        most = max((len(each) for each in ids), default=0)
        for first in range(0, most - 1, self._chunk):
            columns = min(self._chunk, most - 1 - first) + 1
            tokens, lengths = np.zeros((self.rows, columns), np.int32), np.zeros(self.rows, np.int32)
            for row, each in enumerate(ids):
                piece = each[first : first + columns]
                tokens[row, : len(piece)], lengths[row] = piece, len(piece)
            nll = stream.score(tokens) if self.rows == 1 else stream.score(tokens, lengths)
            for row, unit in enumerate(units):
                ahead = min(max(unit.skipped - first, 0), columns - 1)
                totals[row] += float(nll[row, ahead : max(int(lengths[row]) - 1, 0)].sum(dtype=np.float64))
            told(min((first + columns) / most, 1))
        return totals


def _no_number(total: float) -> str:
    return (
        f"log-probabilities add up to {total}, expected a number; `txl-deploy verify` the bundle, and export fp16 "
        "again in fp32 or bf16"
    )
