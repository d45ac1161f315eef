"""Log-probabilities from a segment's result: of all words, of targets, or only of the words that a draw needs.

A program of kind "logprobs" returns log-probabilities. A program of kind "hidden" returns feature rows for the softmax,
which consists of further programs: a head (words of cluster 0, and one column for each further cluster) and one tail
for each further cluster, log p(word) = head[cluster] + tail[word]. A tail is computed only if a caller needs its words.
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
    """The softmax of a stream; F is the width of the rows that segment programs return, one per position.

    Attributes:
        name: name of the log-probabilities in the output table.
        clusters: token ids [first, last) of each cluster; cluster 0 is the head's own words.
    """

    name: str
    clusters: tuple[tuple[int, int], ...]

    def logprobs(self, features: Floats, out: Floats) -> None:
        """Compute log-probabilities of all V words from n feature rows, [n, F] → out [n, V], which may be a strided
        view.

        For example, [3, 64] → [3, 256].
        """

    def counted(self, features: Floats, counts: Ids, out: Floats) -> None:
        """Compute log-probabilities at the positions that count, [b, T, F] → out [b, T, V]; elsewhere `out` stays.

        For example, counts [5, 3] are 8 positions.
        """
        for row, count in enumerate(counts.tolist()):
            if count:
                self.logprobs(features[row, :count], out[row, :count])

    def nll(self, features: Floats, targets: Ids) -> Floats:
        """Return negative log-likelihoods of one target per row, [n, F] and [n] → [n].

        For example, [3, 64] and [17, 4, 9] → [2.3, 0.1, 4.0].
        """

    def head(self, features: Floats) -> Floats:
        """Return the head's values, [n, F] → [n, words of cluster 0 + further clusters]; valid until the next call."""

    def tail(self, features: Floats, cluster: int) -> Floats:
        """Return log p(word | cluster) of a further cluster, [n, F] → [n, words of the cluster].

        For example, a cluster of 200 words: [3, 64] → [3, 200].
        """


class WholeSoftmax(StreamSoftmax):
    """A softmax for programs that return log-probabilities: a feature row already is the row of log-probabilities."""

    def __init__(self, manifest: Manifest) -> None:
        logprobs = manifest.logprobs
        self.name, columns = ("", 0) if logprobs is None else (logprobs.name, int(logprobs.shape[-1]))
        self.clusters = ((0, columns),)

    def logprobs(self, features: Floats, out: Floats) -> None:
        np.copyto(out, features)

    def counted(self, features: Floats, counts: Ids, out: Floats) -> None:
        # a shortcut if all positions count; for a few numbers, a list is faster than NumPy
        if counts.tolist().count(features.shape[1]) == len(counts):
            out[...] = features
        else:
            super().counted(features, counts, out)

    def nll(self, features: Floats, targets: Ids) -> Floats:
        return -np.take_along_axis(features, targets[:, None], axis=1)[:, 0]

    def head(self, features: Floats) -> Floats:
        return features

    def tail(self, features: Floats, cluster: int) -> Floats:
        """Raise IndexError: there are no further clusters."""
        raise IndexError(cluster)


@dataclass
class DrawCount:
    """Counters of drawn tokens, of the softmax tails that were computed for them, and of drafts.

    Attributes:
        tokens: number of tokens drawn so far.
        tails: number of tails that were computed to draw the tokens.
        drafts: number of segments that tried drafts.
        drafted: number of tokens in the drafts of all sequences.
        kept: number of drafted tokens that were drawn as predicted; each saved its sequence a step.
    """

    tokens: int = 0
    tails: int = 0
    drafts: int = 0
    drafted: int = 0
    kept: int = 0


class SegmentResult:
    """The result of a segment, in arrays on the host. See `loop.Result`.

    Args:
        rows: the program's feature rows for the softmax, [b, T, F]; None if the model has no log-probabilities.
        counts: int32 [b], number of positions that count.
        columns: number of positions T.
        targets: [b, T], if `nll` will be called.
        table: the bundle's outputs.
        given: the outputs that the program returned, e.g. [b, T, F]; without log-probabilities if it returned rows.
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
        """Return the feature rows; see `loop.Result.rows`."""
        assert self._rows is not None, "a stream asks for log-probabilities where there are any"
        return self._rows

    def given(self) -> Arrays:
        """Return the outputs that the program returned; a subclass first waits for a device to copy them.

        For example, {"logprobs": [2, 5, 256]}.
        """
        return self._given or {}

    def last(self) -> Floats:
        """Return each sequence's last row; see `loop.Result.last`."""
        rows = self.rows()
        if rows.shape[1] == 1:
            return rows[:, 0]
        last: Floats = rows[np.arange(len(rows)), np.maximum(self._counts, 1) - 1]
        return last

    def parts(self) -> BestWords | None:
        """Return None: this result has only whole rows."""
        return None

    def nll(self) -> Floats:
        """Return negative log-likelihoods; see `loop.Result.nll`."""
        rows, targets = self.rows(), self._targets
        assert targets is not None, "targets are among the inputs of a segment whose nll is asked for"
        return self._output.nll(rows.reshape(targets.size, -1), targets.ravel()).reshape(targets.shape)

    def outputs(self) -> dict[str, Array]:
        """Return copies of all outputs; see `loop.Result.outputs`."""
        arrays = self.given()
        results: dict[str, Array] = {}
        partly = self._counts.tolist().count(self._columns) < len(self._counts)
        for entry in self._table:
            if (array := arrays.get(entry.name)) is not None:
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
    """Return the result of a segment in which all sequences are idle: zeros, with rows [b, T, width].

    For example, counts [0, 0] and 5 columns give rows [2, 5, 64].
    """
    b = len(counts)
    zeros = {entry.name: np.zeros(entry.sizes(b, columns), np.dtype(entry.dtype)) for entry in manifest.outputs}
    rows = np.zeros((b, columns, width), np.float32)
    return SegmentResult(rows, counts, columns, targets, output, manifest.outputs, zeros)
