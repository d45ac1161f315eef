"""Search the nearest rows of a store: all rows of a small store, and with faiss the nearest clusters of a large store.

Both searches find more candidates than are asked for, by distances in float32 or of 8-bit codes. After that, the
distances of the candidates are computed in float64 from the float16 rows, and the nearest candidates are returned.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from txl_runtime.errors import UsageError
from txl_runtime.types import Floats

from txl_deploy.extras import require
from txl_deploy.retrieval.folder import BLOCK, INDEX, Halves

EXACT_ROWS = 1 << 17
"""Maximum number of rows for an exact search; their float32 copy, of 192 numbers a row, takes 100 MB."""
PROBES = 32
"""Number of clusters that are searched. There are about √rows clusters, so 32 have 8 % of 2^17 rows, 1 % of 10^7."""
SAMPLE = 64
"""Number of rows per cluster from which the centres of clusters are computed; faiss warns below 39."""
QUERIES = 16
"""Number of queries that are compared with all rows at a time: 16 × 2^17 distances are 8 MB."""
Rows = NDArray[np.int64]
Hidden = tuple[int, int]
"""First row and end of a text whose rows must not be found; (0, 0) if all rows may be found."""


class Search(Protocol):
    """The protocol of a search, which finds rows that are near queries; `nearest` ranks the rows that were found."""

    def candidates(self, queries: Floats, count: int, hidden: Hidden) -> Rows:
        """Return the indices of rows near queries float32 [n, F], as int64 [n, count]; -1 where no row is left.

        For example, [[812, 17, -1]] for one query and `count` 3.
        """


class Exact(Search):
    """A search that compares a query with every row."""

    def __init__(self, features: NDArray[np.floating]) -> None:
        self._rows = features.astype(np.float32)
        self._norms = np.einsum("nf,nf->n", self._rows, self._rows)

    def candidates(self, queries: Floats, count: int, hidden: Hidden) -> Rows:
        count = min(count, len(self._rows))
        rows = np.full((len(queries), count), -1, np.int64)
        for first in range(0, len(queries), QUERIES):
            far = self._norms - 2 * (queries[first : first + QUERIES] @ self._rows.T)
            far[:, slice(*hidden)] = np.inf
            for row, into in zip(far, rows[first : first + QUERIES], strict=True):
                some = np.flatnonzero(row <= np.partition(row, count - 1)[count - 1])
                # of rows at the same distance, take the first
                some = some[np.argsort(row[some], kind="stable")][:count]
                some = some[row[some] < np.inf]
                into[: len(some)] = some
        return rows


class Clustered(Search):
    """A search in faiss's index of clusters, which is mapped from its file and has 8 bits for each number of a row."""

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        faiss = _faiss("a datastore of this size")
        try:
            self._index, self._faiss = faiss.read_index(str(folder / INDEX), faiss.IO_FLAG_MMAP), faiss
        except RuntimeError:  # faiss's own message has addresses and line numbers of its source
            raise UsageError(f"{folder / INDEX}: faiss cannot read it, expected its index; build it again") from None
        if (self._index.ntotal, self._index.d) != shape:
            raise UsageError(
                f"{folder / INDEX}: has {self._index.ntotal} rows of {self._index.d} numbers, expected {shape[0]} of "
                f"{shape[1]}; build it again"
            )

    def candidates(self, queries: Floats, count: int, hidden: Hidden) -> Rows:
        faiss, chosen = self._faiss, None
        if hidden[1] > hidden[0]:
            text = faiss.IDSelectorRange(*hidden)
            chosen = faiss.IDSelectorNot(text)
        how = faiss.SearchParametersIVF(nprobe=PROBES, sel=chosen)
        rows: Rows = self._index.search(np.ascontiguousarray(queries, np.float32), count, params=how)[1]
        return rows


def nearest(
    search: Search, features: NDArray[np.floating], queries: Floats, count: int, hidden: Hidden
) -> tuple[Rows, NDArray[np.float64]]:
    """Return the nearest rows, int64 [n, count], and their squared distances, float64; infinite where no row is left.

    For example, [[812, 17]] and [[0.5, 2.0]]. If rows at the same distance are all found, the first of these rows is
    returned first.
    """
    candidates = search.candidates(queries, 2 * count + 16, hidden)
    candidates.sort(axis=1)
    far = np.full(candidates.shape, np.inf)
    for query, rows, into in zip(queries, candidates, far, strict=True):
        there = rows >= 0
        into[there] = np.square(features[rows[there]].astype(np.float64) - query).sum(axis=1)
    order = np.argsort(far, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(candidates, order, 1), np.take_along_axis(far, order, 1)


def write_index(
    place: Path, features: Halves, told: Callable[[int], object], held: tuple[Path, int] | None = None
) -> None:
    """Write the index of all rows to a file.

    Args:
        place: the file to write.
        features: the features of all rows, float16 [rows, F].
        told: a function that is called with the number of rows that were added since its last call.
        held: an index whose clusters are kept, and the number of its rows; None to compute new clusters.

    Raises:
        BackendError: faiss is not installed.
        OSError: the file cannot be written.
    """
    faiss = _faiss("a datastore of this size")
    rows, width = features.shape
    first = 0
    if held is not None:
        index, first = faiss.read_index(str(held[0])), held[1]
        told(first)
    else:
        lists = round(rows**0.5)
        index = faiss.index_factory(width, f"IVF{lists},SQ8")
        index.train(features[:: max(1, rows // (SAMPLE * lists))].astype(np.float32))
    for at in range(first, rows, BLOCK):
        some = features[at : at + BLOCK].astype(np.float32)
        index.add(some)
        told(len(some))
    try:
        faiss.write_index(index, str(place))
    except RuntimeError:  # e.g. a full disk; faiss's own message has line numbers of its source
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None


def require_faiss(rows: int) -> None:
    """Raise BackendError for a store that is too large for an exact search, if faiss is missing."""
    if rows > EXACT_ROWS:
        require("a datastore of this size", "knn", "faiss")


def _faiss(what: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - faiss has no types
    require(what, "knn", "faiss")
    import faiss

    return faiss
