"""From what a segment program returns to log-probabilities: all of them, those of targets, or as few as a draw needs.

A program of kind "logprobs" returns them itself. One of kind "hidden" returns what the softmax takes, and the softmax
is programs of its own: the head (words of the first cluster, and the further clusters) and one tail per further
cluster, log p(word) = head[cluster] + tail[word]. Then nothing has to be computed that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Output
from txl_runtime.types import Array, Arrays, Floats, Ids

if TYPE_CHECKING:
    from txl_runtime.streaming.best_words import BestWords


class StreamSoftmax(Protocol):
    """The softmax of a stream; F is the width of what segment programs return, a "feature" row per position.

    Attributes:
        name: what the table calls its log-probabilities.
        clusters: first and one past the last word of each cluster; the head's own words are the first.
    """

    name: str
    clusters: tuple[tuple[int, int], ...]

    def logprobs(self, features: Floats, out: Floats) -> None:
        """Log-probabilities of the vocabulary, [n, F] → out [n, V], which may be a strided view."""

    def counted(self, features: Floats, counts: Ids, out: Floats) -> None:
        """Log-probabilities of the positions that count, [b, T, F] → out [b, T, V]; the others stay what they are."""
        for row, count in enumerate(counts.tolist()):
            if count:
                self.logprobs(features[row, :count], out[row, :count])

    def nll(self, features: Floats, targets: Ids) -> Floats:
        """Negative log-likelihoods of one target per row, [n, F] and [n] → [n]."""

    def head(self, features: Floats) -> Floats:
        """[n, F] → [n, words of cluster 0 + further clusters]; good until the next call."""

    def tail(self, features: Floats, cluster: int) -> Floats:
        """[n, F] → [n, words of the cluster], given the cluster."""


class WholeSoftmax(StreamSoftmax):
    """For programs that return log-probabilities: there is nothing left to compute."""

    def __init__(self, manifest: Manifest) -> None:
        found = manifest.logprobs
        self.name, columns = ("", 0) if found is None else (found.name, int(found.shape[-1]))
        self.clusters = ((0, columns),)

    def logprobs(self, features: Floats, out: Floats) -> None:
        np.copyto(out, features)

    def counted(self, features: Floats, counts: Ids, out: Floats) -> None:
        if counts.tolist().count(features.shape[1]) == len(counts):  # faster than to compare so few in NumPy
            out[...] = features
        else:
            super().counted(features, counts, out)

    def nll(self, features: Floats, targets: Ids) -> Floats:
        return -np.take_along_axis(features, targets[:, None], axis=1)[:, 0]

    def head(self, features: Floats) -> Floats:
        return features

    def tail(self, features: Floats, cluster: int) -> Floats:
        """See `StreamSoftmax`; there are no further clusters."""
        raise IndexError(cluster)


@dataclass
class DrawCount:
    """How much of the softmax draws needed.

    Attributes:
        tokens: drawn so far.
        tails: clusters beyond the head that had to be computed for them, in all.
    """

    tokens: int = 0
    tails: int = 0


class SegmentResult:
    """What a segment gave. See `loop.Result`.

    Args:
        rows: what the program returned for the softmax, a feature row per position, [b, T, F]; None where the model has
            no log-probabilities.
        counts: int32 [b].
        columns: T.
        targets: [b, T], where the nll will be asked for.
        table: the outputs of the bundle.
        given: those of them that the program returned, with b and T; the log-probabilities may be missing.
    """

    __slots__ = ("_columns", "_counts", "_given", "_output", "_rows", "_table", "_targets")

    def __init__(
        self,
        rows: Floats | None,
        counts: Ids,
        columns: int,
        targets: Ids | None,
        output: StreamSoftmax,
        table: Sequence[Output] = (),
        given: Arrays | None = None,
    ) -> None:
        self._rows, self._counts, self._columns = rows, counts, columns
        self._targets, self._output = targets, output
        self._table, self._given = table, given

    def rows(self) -> Floats:
        """See `loop.Result`."""
        assert self._rows is not None, "a stream asks for log-probabilities where there are any"
        return self._rows

    def given(self) -> Arrays:
        """Those outputs that the program returned; a result that is on its way still is waited for here."""
        return self._given or {}

    def last(self) -> Floats:
        """See `loop.Result`."""
        rows = self.rows()
        if rows.shape[1] == 1:
            return rows[:, 0]
        last: Floats = rows[np.arange(len(rows)), np.maximum(self._counts, 1) - 1]
        return last

    def parts(self) -> BestWords | None:
        """See `loop.Result`; there are rows alone."""
        return None

    def nll(self) -> Floats:
        """See `loop.Result`."""
        rows, targets = self.rows(), self._targets
        assert targets is not None, "targets are among the inputs of a segment whose nll is asked for"
        return self._output.nll(rows.reshape(targets.size, -1), targets.ravel()).reshape(targets.shape)

    def outputs(self) -> dict[str, Array]:
        """See `loop.Result`."""
        given = self.given()
        results: dict[str, Array] = {}
        partly = self._counts.tolist().count(self._columns) < len(self._counts)
        for entry in self._table:
            if (array := given.get(entry.name)) is not None:
                results[entry.name] = array.copy()
                if partly:
                    entry.axes.clear_uncounted(results[entry.name], self._counts)
            else:
                rows = self.rows()
                results[entry.name] = np.zeros((*rows.shape[:2], self._output.clusters[-1][1]), np.float32)
                self._output.counted(rows, self._counts, results[entry.name])
        return results


def idle_result(
    manifest: Manifest, output: StreamSoftmax, width: int, counts: Ids, columns: int, targets: Ids | None
) -> SegmentResult:
    """The result of a segment in which nothing counts, so that nothing was run: zeros, feature rows of some width."""
    b = len(counts)
    given = {entry.name: np.zeros(entry.sizes(b, columns), np.dtype(entry.dtype)) for entry in manifest.outputs}
    rows = np.zeros((b, columns, width), np.float32)
    return SegmentResult(rows, counts, columns, targets, output, manifest.outputs, given)
