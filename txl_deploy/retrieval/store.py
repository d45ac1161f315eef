"""Open a datastore, which a stream asks for neighbours by `txl_runtime.streaming.datastore.Datastore`."""

from __future__ import annotations

import bisect
import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from txl_runtime.errors import UsageError
from txl_runtime.model import Model
from txl_runtime.streaming.datastore import Entropies, Shares
from txl_runtime.types import Floats, Ids

from txl_deploy.retrieval import KNN, KNN_TEMPERATURE, KNN_WEIGHT, Mixture
from txl_deploy.retrieval.folder import (
    AGAIN,
    Feature,
    Header,
    Part,
    check_files,
    first_unusable,
    hash_of,
    mapped,
    read_header,
    read_parts,
)
from txl_deploy.retrieval.gate import Gate, open_gate
from txl_deploy.retrieval.searching import Clustered, Exact, Hidden, Rows, Search, nearest


class Found(NamedTuple):
    """The neighbours of n positions.

    Attributes:
        asked: True for positions that were searched, bool [n].
        rows, tokens: indices of the nearest rows, int64 [n, K], and the token after each row, int32 [n, K].
        far: squared distances [n, K], infinite for missing rows.
        shares: shares of the probability [n, K], 0 for missing rows.
    """

    asked: NDArray[np.bool_]
    rows: Rows
    tokens: Ids
    far: NDArray[np.float64]
    shares: Shares


class Passage(NamedTuple):
    """The tokens around one token of a text.

    Attributes:
        name: the text's name.
        tokens: the tokens, int32 [n].
        at, position: index of the one token in `tokens`, and in the text.
    """

    name: str
    tokens: Ids
    at: int
    position: int


class Store:
    """A datastore's rows, with the numbers of the mixture log(W · p_neighbours + (1 - W) · p_model).

    p_neighbours is the softmax of -distance² / T over the K nearest rows, summed by token.

    Args:
        search: the search that finds candidates among the features.
        features: float16 [rows, F].
        tokens: int32 [rows], the token after each row's position.
        texts: for the hash of each text's token ids, the text's first row and its end.
        neighbours: K.
        temperature: T.
        weight: W, or the gate that computes it for each position.
        columns: the feature's columns in the rows that the model's programs return.

    Attributes:
        feature: the kind of feature in the store's rows.
        parts: the texts, in the order of their rows.
        identity: a text that identifies the rows and the numbers of the mixture, for files of results.
        searches: a counter of all positions, and of positions at which a search was made.
    """

    def __init__(
        self,
        search: Search,
        features: NDArray[np.floating],
        tokens: Ids,
        texts: dict[str, Hidden],
        neighbours: int,
        temperature: float,
        weight: float | Gate,
        columns: slice = slice(None),
    ) -> None:
        self._search, self._features, self._tokens, self._texts = search, features, np.asarray(tokens), texts
        self._neighbours, self._temperature, self._weight = neighbours, temperature, weight
        self._hidden: Hidden = 0, 0
        self._columns = columns
        self.identity, self.searches = "", Searches()
        self.feature: Feature = "softmax"
        self.parts: list[Part] = []

    def excluding(self, ids: Ids) -> Store:
        """Return the store without the rows of the text with these token ids, if the store has read this text.

        For example, int32 [10000] of a text that is now measured. Copies of the text inside other texts stay.
        """
        store = copy.copy(self)
        store._hidden = self._texts.get(hash_of(ids), (0, 0))
        return store

    @property
    def hidden(self) -> int:
        """Return the number of rows that `excluding` has hidden."""
        return self._hidden[1] - self._hidden[0]

    def shares(self, features: Floats, entropies: Entropies) -> tuple[Ids, Shares]:
        """Return the tokens of the neighbours and their shares, both [n, K], as `Datastore` describes.

        All shares of a position are 0 if no row was found, or no search was made.

        Raises:
            UsageError: the features are not as wide as the store's.
        """
        neighbours = self.look(features, entropies)
        return neighbours.tokens, neighbours.shares

    def look(self, features: Floats, entropies: Entropies) -> Found:
        """Return the neighbours of the rows that the model's programs return, float32 [n, columns], and their shares.

        For example, 2 positions with 8 neighbours: tokens [2, 8].

        Raises:
            UsageError: the features are not as wide as the store's.
        """
        gate, features = self._weight, self.own(features)
        if not isinstance(gate, Gate):
            self.searches.add(len(features), len(features))
            rows, far = self._nearest(features)
            shares = gate * softmax(far, self._temperature)
            return Found(np.ones(len(features), np.bool_), rows, self._tokens[rows], far, shares)
        entropy = entropies()
        asked = gate.worthwhile(features, entropy)
        self.searches.add(len(features), int(asked.sum()))
        rows = np.zeros((len(features), self._neighbours), np.int64)
        far, shares = np.full(rows.shape, np.inf), np.zeros(rows.shape)
        if asked.any():
            rows_found, distances = self._nearest(features[asked])
            inside = asked, slice(rows_found.shape[1])
            rows[inside], far[inside] = rows_found, distances
            weights = gate.weights(features[asked], entropy[asked], distances)[:, None]
            shares[inside] = weights * softmax(distances, self._temperature)
        return Found(asked, rows, self._tokens[rows], far, shares)

    def passage(self, row: int, before: int, after: int) -> Passage:
        """Return a row's token with at most `before` tokens before it and `after` tokens after it in its text."""
        part = self.parts[bisect.bisect_right(self.parts, row, key=lambda each: each.first) - 1]
        first, end = max(part.first, row - before), min(part.first + part.rows, row + 1 + after)
        return Passage(part.name, self._tokens[first:end], row - first, row - part.first + 1)

    def seen(self, vocab_size: int) -> Rows:
        """Return the number of times that each token occurs in rows that are not hidden, int64 [V]."""
        first, end = self._hidden
        shown = np.concatenate([self._tokens[:first], self._tokens[end:]])
        counts: Rows = np.bincount(shown, minlength=vocab_size).astype(np.int64)
        return counts

    def own(self, rows: Floats) -> Floats:
        """Return the feature's columns, float32 [n, F], of rows that the model's programs return.

        For example, [2, 1024] → [2, 512].
        """
        return rows[:, self._columns]

    def nearest(self, features: Floats) -> tuple[Ids, NDArray[np.float64]]:
        """Return the tokens after the nearest rows, int32 [n, K], and squared distances [n, K], infinite without a row.

        For example, ([[5, 9]], [[0.5, 2.0]]) for one row and K 2.

        Raises:
            UsageError: the features are not as wide as the store's.
        """
        rows, far = self._nearest(features)
        return self._tokens[rows], far

    def _nearest(self, features: Floats) -> tuple[Rows, NDArray[np.float64]]:
        """Return the nearest rows, int64 [n, K], and squared distances.

        Raises:
            UsageError: the features are not as wide as the store's.
        """
        if features.shape[1] != self._features.shape[1]:
            raise UsageError(
                f"features have {features.shape[1]} numbers, expected {self._features.shape[1]}; use the store's model"
            )
        return nearest(self._search, self._features, features, self._neighbours, self._hidden)


class Searches:
    """A counter of positions, which threads share.

    Attributes:
        positions: number of all positions.
        made: number of positions at which a search was made.
    """

    def __init__(self) -> None:
        self.positions, self.made, self._lock = 0, 0, threading.Lock()

    def add(self, positions: int, made: int) -> None:
        """Count positions, and the number of them at which a search was made."""
        with self._lock:
            self.positions, self.made = self.positions + positions, self.made + made

    @property
    def told(self) -> str:
        """Return a phrase about the share of searches that the gate saved; "" if it saved none."""
        saved = self.positions - self.made
        if not saved:
            return ""
        return f"the gate saved {saved:,} of {self.positions:,} searches, {saved / self.positions:.0%}"


def softmax(far: NDArray[np.float64], temperature: float) -> Shares:
    """Return the softmax of -distance² / T over squared distances, float64 [n, K]; 0 at infinite distances.

    For example, [[0, inf]] gives [[1, 0]].
    """
    with np.errstate(invalid="ignore", over="ignore"):  # for positions without a row, and for a T near 0
        weights = np.exp((far.min(axis=1, keepdims=True) - far) / temperature)
    weights[~np.isfinite(far)] = 0
    shares: Shares = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    return shares


def open_store(model: Model, mixture: Mixture | None) -> Store | None:
    """Check every file of a datastore, and open it for a model; return None for no mixture, or a weight of 0.

    Raises:
        UsageError: the folder is missing, damaged, not complete or of a different model; the model's programs return no
            features; or the gate is missing, or was fitted for a different K or T.
        BackendError: the store is large, and faiss is not installed.
    """
    if mixture is None:
        return None
    folder, manifest = mixture.folder, model.manifest
    columns, header = feature_columns(model), read_header(folder, manifest.model_id)
    require_feature(folder, header, columns)
    mine = columns[header.feature]
    width = mine.stop - mine.start
    check_files(folder, header)
    parts = read_parts(folder, header)
    texts = {part.sha256: (part.first, part.first + part.rows) for part in parts}
    features, tokens = mapped(folder, header)
    if header.width != width or int(tokens.min()) < 0 or int(tokens.max()) >= manifest.vocab_size:
        raise UsageError(
            f"{folder}: features of {header.width} and tokens {tokens.min()} … {tokens.max()}, expected {width} and "
            f"0 … {manifest.vocab_size - 1}; {AGAIN}"
        )
    if (wrong := first_unusable(features)) is not None:
        raise UsageError(f"{folder}: row {wrong:,} holds NaN or infinity, expected numbers; {AGAIN}")
    neighbours, temperature, weight = mixture.neighbours, mixture.temperature, mixture.weight
    chosen: float | Gate = KNN_WEIGHT if weight is None or weight == "gate" else weight
    if weight == "gate":
        chosen = open_gate(folder, header)
        fitted = chosen.about.neighbours, chosen.about.temperature
        settings = neighbours or fitted[0], temperature or fitted[1]
        if settings != fitted:
            raise UsageError(
                f"--knn and --knn-temperature are {settings[0]} and {settings[1]}, expected those of the gate, "
                f"{fitted[0]} and {fitted[1]}; leave them out, or fit again"
            )
        neighbours, temperature = fitted
    if not chosen:
        return None
    neighbours, temperature = neighbours or KNN, temperature or KNN_TEMPERATURE
    search: Search = Clustered(folder, features.shape) if header.clustered else Exact(features)
    own = mine if len(columns) > 1 else slice(None)
    store = Store(search, features, tokens, texts, neighbours, temperature, chosen, own)
    named = f"gate {chosen.about.gate_id} from {chosen.about.bound}" if isinstance(chosen, Gate) else chosen
    store.feature, store.parts = header.feature, parts
    store.identity = f"{header.files['parts.jsonl'].sha256}, K {neighbours}, T {temperature}, W {named}"
    return store


def feature_columns(model: Model) -> dict[Feature, slice]:
    """Return the columns of each feature in the rows that the model's programs return; the last feature is the best.

    Raises:
        UsageError: the model's programs return only log-probabilities.
    """
    manifest, logprobs = model.manifest, model.manifest.logprobs
    if logprobs is None or not logprobs.width or all(each.kind != "hidden" for each in model.backend.programs):
        raise UsageError(
            "a datastore needs what enters the softmax, and this model's programs return log-probabilities alone, "
            "expected a Transformer-XL with a ring; export it with K/V memory"
        )
    width = manifest.config.d_model if manifest.has_config else logprobs.width
    columns: dict[Feature, slice] = {"softmax": slice(0, width)}
    if logprobs.width == 2 * width:
        columns["feed-forward"] = slice(width, 2 * width)
    return columns


def require_feature(folder: Path, header: Header, columns: Mapping[Feature, slice]) -> None:
    """Raise UsageError if a model's programs do not return the feature that a datastore holds."""
    if header.feature not in columns:
        raise UsageError(
            f"{folder}: holds what enters the last feed-forward layer, which this bundle's programs do not return, "
            "expected one of `export --features`; use that"
        )
