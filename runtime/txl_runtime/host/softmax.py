"""The softmax on the CPU, which runs apart from the layers: for some rows at a time, and only for needed clusters."""

from __future__ import annotations

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.host.engine import Engine
from txl_runtime.streaming.outputs import StreamSoftmax, WholeSoftmax
from txl_runtime.types import Call, Floats, Ids

CHUNK = 2**22
"""Maximum number of log-probabilities computed at a time: 16 MiB of float32, e.g. 15 rows of 267,735 words."""


class _Rows:
    """A softmax program for any number of rows; it is bound once for each number, to the first rows of shared arrays.

    A row's result does not depend on other rows: with at least `Engine.least_rows` rows, ONNX Runtime computes a row to
    the same bits at any number of rows (tested); fewer rows are padded with rows of earlier calls. So sequences stay
    independent although they are computed together.
    """

    KEPT = 8
    """Maximum number of different row counts that stay bound; the oldest count is dropped first."""

    def __init__(self, engine: Engine, program: Program) -> None:
        self._engine, self._program, self._least = engine, program, engine.least_rows
        self._widths = tuple(int(spec.shape[1]) for spec in (program.inputs[0], program.outputs[0]))
        self._arrays = tuple(np.zeros((0, width), np.float32) for width in self._widths)
        self._bound: dict[int, tuple[Floats, Floats, Call]] = {}

    def __call__(self, features: Floats) -> Floats:
        """Run the program, [n, F] → [n, columns]; the result is valid until the next call."""
        binding = self._bound.get(len(features))
        inputs, outputs, call = self._bind(len(features)) if binding is None else binding
        inputs[: len(features)] = features
        call()
        return outputs[: len(features)]

    def _bind(self, rows: int) -> tuple[Floats, Floats, Call]:
        count = max(rows, self._least)
        if count > len(self._arrays[0]):
            self._bound.clear()
            self._arrays = tuple(np.zeros((count, width), np.float32) for width in self._widths)
        while len(self._bound) >= self.KEPT:
            del self._bound[next(iter(self._bound))]
        inputs_of_rows, outputs_of_rows = (array[:count] for array in self._arrays)
        inputs, outputs = (
            {self._program.inputs[0].name: inputs_of_rows},
            {self._program.outputs[0].name: outputs_of_rows},
        )
        self._bound[rows] = inputs_of_rows, outputs_of_rows, self._engine.bind(self._program, inputs, outputs)
        return self._bound[rows]


class SplitSoftmax(StreamSoftmax):
    """A softmax for programs that return feature rows: a head and one tail for each further cluster."""

    def __init__(self, manifest: Manifest, engine: Engine) -> None:
        assert manifest.logprobs is not None
        self.name, self.clusters = manifest.logprobs.name, manifest.clusters
        programs = {program.kind: program for program in manifest.programs}
        self._head = _Rows(engine, programs["head"])
        self._tails = {c: _Rows(engine, programs[f"tail.{c}"]) for c in range(1, len(self.clusters))}

    def logprobs(self, features: Floats, out: Floats) -> None:
        """See `StreamSoftmax`. Compute at most `CHUNK` values at a time, so that a long result is not held twice."""
        words, rows = self.clusters[0][1], max(1, CHUNK // self.clusters[-1][1])
        for start in range(0, len(features), rows):
            some, into = features[start : start + rows], out[start : start + rows]
            head = self._head(some)
            into[:, :words] = head[:, :words]
            for cluster in self._tails:
                first, last = self.clusters[cluster]
                np.add(self.tail(some, cluster), head[:, words + cluster - 1, None], out=into[:, first:last])

    def nll(self, features: Floats, targets: Ids) -> Floats:
        """See `StreamSoftmax`; tails of clusters without targets are not computed."""
        head, words = self._head(features), self.clusters[0][1]
        which = np.searchsorted([last for _, last in self.clusters], targets, side="right")
        columns = np.where(which == 0, targets, words + which - 1)
        logprobs = np.take_along_axis(head, columns[:, None], axis=1)[:, 0]
        for cluster in np.unique(which[which > 0]).tolist():
            rows = np.flatnonzero(which == cluster)
            inside = targets[rows] - self.clusters[cluster][0]
            logprobs[rows] += np.take_along_axis(self.tail(features[rows], cluster), inside[:, None], axis=1)[:, 0]
        return -logprobs

    def head(self, features: Floats) -> Floats:
        return self._head(features)

    def tail(self, features: Floats, cluster: int) -> Floats:
        return self._tails[cluster](features)


def open_output(kind: str, manifest: Manifest, engine: Engine) -> StreamSoftmax:
    """Return the softmax for the results of segment programs of this kind."""
    return SplitSoftmax(manifest, engine) if kind == "hidden" else WholeSoftmax(manifest)
