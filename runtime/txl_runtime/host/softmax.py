"""The softmax on the CPU, apart from the layers: some rows at a time, and only the clusters that are asked for."""

from __future__ import annotations

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.host.engine import Engine
from txl_runtime.streaming.outputs import StreamSoftmax, WholeSoftmax
from txl_runtime.types import Call, Floats, Ids

CHUNK = 2**22
"""Log-probabilities computed at a time, 16 MiB: 15 rows of 267,735 words."""


class _Rows:
    """One softmax program on any number of rows: arrays for the most there were, bound once per number of rows.

    What a row gets does not depend on the others: ONNX Runtime's products and softmax give the same bits for a row
    whatever their number (tested), or from `Engine.least_rows` on; fewer are filled up with older ones. So sequences
    stay independent though they are computed together.
    """

    KEPT = 8

    def __init__(self, engine: Engine, program: Program) -> None:
        self._engine, self._program, self._least = engine, program, engine.least_rows
        self._widths = tuple(int(spec.shape[1]) for spec in (program.inputs[0], program.outputs[0]))
        self._arrays = tuple(np.zeros((0, width), np.float32) for width in self._widths)
        self._bound: dict[int, tuple[Floats, Floats, Call]] = {}

    def __call__(self, features: Floats) -> Floats:
        """[n, F] → [n, columns]; good until the next call."""
        found = self._bound.get(len(features))
        taken, given, call = self._bind(len(features)) if found is None else found
        taken[: len(features)] = features
        call()
        return given[: len(features)]

    def _bind(self, rows: int) -> tuple[Floats, Floats, Call]:
        count = max(rows, self._least)
        if count > len(self._arrays[0]):
            self._bound.clear()
            self._arrays = tuple(np.zeros((count, width), np.float32) for width in self._widths)
        while len(self._bound) >= self.KEPT:
            del self._bound[next(iter(self._bound))]
        taken, given = (array[:count] for array in self._arrays)
        inputs, outputs = {self._program.inputs[0].name: taken}, {self._program.outputs[0].name: given}
        self._bound[rows] = taken, given, self._engine.bind(self._program, inputs, outputs)
        return self._bound[rows]


class SplitSoftmax(StreamSoftmax):
    """For programs that return hidden rows."""

    def __init__(self, manifest: Manifest, engine: Engine) -> None:
        assert manifest.logprobs is not None
        self.name, self.clusters = manifest.logprobs.name, manifest.clusters
        programs = {program.kind: program for program in manifest.programs}
        self._head = _Rows(engine, programs["head"])
        self._tails = {c: _Rows(engine, programs[f"tail.{c}"]) for c in range(1, len(self.clusters))}

    def logprobs(self, features: Floats, out: Floats) -> None:
        """See `StreamSoftmax`; some rows at a time, so that besides the result no large part of it is held."""
        words, rows = self.clusters[0][1], max(1, CHUNK // self.clusters[-1][1])
        for start in range(0, len(features), rows):
            some, into = features[start : start + rows], out[start : start + rows]
            head = self._head(some)
            into[:, :words] = head[:, :words]
            for cluster in self._tails:
                first, last = self.clusters[cluster]
                np.add(self.tail(some, cluster), head[:, words + cluster - 1, None], out=into[:, first:last])

    def nll(self, features: Floats, targets: Ids) -> Floats:
        """See `StreamSoftmax`; a cluster that no target is in is not computed."""
        head, words = self._head(features), self.clusters[0][1]
        which = np.searchsorted([last for _, last in self.clusters], targets, side="right")
        columns = np.where(which == 0, targets, words + which - 1)
        found = np.take_along_axis(head, columns[:, None], axis=1)[:, 0]
        for cluster in np.unique(which[which > 0]).tolist():
            rows = np.flatnonzero(which == cluster)
            inside = targets[rows] - self.clusters[cluster][0]
            found[rows] += np.take_along_axis(self.tail(features[rows], cluster), inside[:, None], axis=1)[:, 0]
        return -found

    def head(self, features: Floats) -> Floats:
        return self._head(features)

    def tail(self, features: Floats, cluster: int) -> Floats:
        return self._tails[cluster](features)


def open_output(kind: str, manifest: Manifest, engine: Engine) -> StreamSoftmax:
    """The softmax behind segment programs of a kind."""
    return SplitSoftmax(manifest, engine) if kind == "hidden" else WholeSoftmax(manifest)
