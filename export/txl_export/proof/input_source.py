"""Supplies the inputs of chains: the user's samples, repeated endlessly, or random values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Input
from txl_runtime.errors import UsageError, one_line
from txl_runtime.types import Array, Arrays, Ids

POISON = np.nan
"""Value of features that no result may depend on: NaN spreads into every result that reads it."""
DISTINCT_IDS, RUN = 4096, 16
"""Number of distinct random ids from a large vocabulary, in runs of 16 neighbours. Every id loads a page of the
embedding into memory, per open program; neighbours share pages."""


class InputSource:
    """An endless source of the inputs of segments.

    Each sequence reads a sample from a random position to its end and on from its beginning, then the next sample.

    Args:
        manifest: the bundle's tables.
        samples: real inputs by name; without them inputs are random.
        draws: the generator of random inputs and of the order of samples.
        segments: number of segments of the chain times its sequences; each sample is left early enough that all are
            begun. With 0, each sample is read completely.
        few: whether to draw only `DISTINCT_IDS` ids of a larger vocabulary.
        below, flags: see `Reference`.

    Attributes:
        begun: numbers of the samples that were begun so far.
        drawn: the random ids, as (input name, id).
    """

    def __init__(
        self,
        manifest: Manifest,
        samples: Mapping[str, Any] | None,
        draws: np.random.Generator,
        segments: int = 0,
        few: bool = False,
        below: Mapping[str, int] | None = None,
        flags: Mapping[str, bool] | None = None,
    ) -> None:
        self._read = manifest.given
        large = {entry.vocab for entry in self._read if few and (entry.vocab or 0) > DISTINCT_IDS}
        self._ids = {size: _few_ids(size, draws) for size in large if size}
        self._below, self.drawn = below or {}, set[tuple[str, int]]()
        self._samples = {name: np.asarray(values) for name, values in (samples or {}).items()}
        self._draws, self._flags = draws, flags or {}
        self._held = extent(manifest, self._samples)
        self._stay = max(1, segments // self._held[0]) if segments else self._held[1]
        self._places: dict[int, tuple[int, int, int]] = {}
        self._waiting: list[int] = []
        self.begun: set[int] = set()

    def take(self, count: int, length: int, quiet: bool = False) -> dict[str, Array]:
        """Return the next segment of `count` sequences by input name: `length` positions and the lookahead after them.

        With `quiet`, random flags of the first sequence, and flags that all sequences share, do not end its episode.
        For example, `take(2, 5)` with a lookahead of 3 is {"x": [2, 8, 8]}.
        """
        if self._samples:
            return self._sampled(count, length)
        arrays = {entry.name: self._random(entry, count, length) for entry in self._read}
        for entry in self._read if quiet else ():
            if entry.name in self._flags:
                arrays[entry.name][entry.axes.at(0)] = self._flags[entry.name]
        self.drawn.update((one.name, each) for one in self._read if one.vocab for each in arrays[one.name].flat)
        return arrays

    def _random(self, entry: Input, count: int, length: int) -> Array:
        sizes = entry.sizes(count, length)
        if entry.dtype == "bool":
            return np.asarray(self._draws.random(sizes) < 0.5)  # of no axes, the comparison gives a scalar
        if entry.vocab in self._ids:
            return self._draws.choice(self._ids[entry.vocab], sizes)
        if entry.dtype == "int32":
            return self._draws.integers(0, entry.vocab or self._below.get(entry.name, 2), sizes).astype(np.int32)
        return self._draws.standard_normal(sizes).astype(np.float32)

    def _sampled(self, count: int, length: int) -> dict[str, Array]:
        """Return the next piece of a sample for each sequence, joined, in the declared dtypes."""
        rows = [self._sequence(row, length) for row in range(count)]
        arrays = {}
        for entry in self._read:
            joined = entry.axes.concatenated([row[entry.name] for row in rows])
            arrays[entry.name] = joined.astype(entry.dtype)
        return arrays

    def _sequence(self, row: int, length: int) -> dict[str, Array]:
        sample, place, left = self._places.get(row, (0, 0, 0))
        if left <= 0:
            self._waiting = self._waiting or self._draws.permutation(self._held[0]).tolist()
            sample, place = self._waiting.pop(), int(self._draws.integers(self._held[1]))
            left = min(self._held[1], self._stay * length)
            self.begun.add(sample)
        self._places[row] = sample, (place + length) % self._held[1], left - length
        arrays = {}
        for entry in self._read:
            values, batch = self._samples[entry.name], entry.axes.batch
            if batch is not None:
                values = np.take(values, [sample % values.shape[batch]], batch)
            for axis in entry.axes.positions:
                positions = np.arange(place, place + length + entry.lookahead)
                values = np.take(values, positions, axis, mode="wrap")
            arrays[entry.name] = values
        return arrays


def read_samples(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz file by name, e.g. {"x": [8, 1000, 3]}.

    Raises:
        UsageError: the file is missing, or is no .npz file.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file, expected arrays by input name; check the path") from None
    except Exception as error:  # numpy, zipfile and zlib raise errors of their own types
        reason = one_line(error)
        raise UsageError(f"{path}: {reason}; expected arrays by input name, as numpy.savez writes them") from None


def _few_ids(vocab: int, draws: np.random.Generator) -> Ids:
    """Return random ids [n], n ≤ `DISTINCT_IDS`, in runs of `RUN` neighbours, spread over the vocabulary."""
    starts = draws.permutation(-(-vocab // RUN))[: DISTINCT_IDS // RUN] * RUN
    ids = (starts[:, None] + np.arange(RUN)).ravel()
    return ids[ids < vocab].astype(np.int32)


def fitting(shape: Sequence[int], axes: Axes, length: int) -> bool:
    """Return whether samples of a shape have at least one sequence, and `length` positions plus the lookahead."""
    least = axes.sizes(1, length)
    return len(shape) == len(least) and all(
        size >= low if isinstance(letter, str) else size == low
        for size, low, letter in zip(shape, least, axes.shape, strict=True)
    )


def extent(manifest: Manifest, samples: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of sequences and the number of positions of samples, each the smallest of all inputs."""
    read = [(entry.axes, np.shape(samples[entry.name])) for entry in manifest.inputs if entry.name in samples]
    sequences = min((shape[axes.batch] for axes, shape in read if axes.batch is not None), default=1)
    return sequences, min((shape[axes.positions[0]] for axes, shape in read if axes.positions), default=1)


def poisoned(manifest: Manifest, inputs: Arrays, counts: Ids) -> dict[str, Array]:
    """Return inputs with NaN in features of idle sequences and after each sequence's valid positions, counts [b].

    With counts [5, 0], sequence 1 becomes NaN.
    """
    arrays = {}
    for entry in manifest.inputs:
        if entry.name not in inputs:
            continue
        values = inputs[entry.name].copy()
        if np.issubdtype(values.dtype, np.floating):
            entry.axes.clear_uncounted(values, counts, POISON)
        arrays[entry.name] = values
    return arrays
