"""A bundle beside an ONNX file that somebody else made: both stream the same segments, each with its own states.

What a bundle is usually compared with was made of the same weights as the bundle. Only a file from elsewhere tells that
these are not the weights that were meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from txl_report.schema.verification import Gate
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import CheckpointError, UsageError, some
from txl_runtime.ladder import BISECT
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Array

from txl_export.families.graph.naming import likeness, most_alike
from txl_export.families.graph.reading import Foreign, read_foreign
from txl_export.families.graph.running import EndedError, RunError, Runner
from txl_export.proof.input_source import InputSource
from txl_export.proof.parity import Parity

SEGMENTS = 200
SECONDS = 600.0
"""That all runs of the file may take, with the bundle's between them."""


def verify_against(
    open_model: Callable[[], Model],
    path: Path,
    arrays: Mapping[str, Array],
    pairs: Mapping[str, str],
    segments: int | None,
    heard: Listener,
) -> Parity:
    """Stream both, from an empty state; states of the file begin as zeros.

    Args:
        open_model: opens the bundle.
        path: the ONNX file. ONNX Runtime runs it in a process of its own, within bounds of time and memory.
        arrays: real inputs of the bundle by name; and by the file's names what every call of it is given besides, or
            first where it is a state.
        pairs: inputs of the file, and the outputs that are their next values.
        segments: how many; `SEGMENTS` without.
        heard: hears of progress.

    Raises:
        UsageError: the file does not run, or its inputs and outputs cannot be matched with the bundle's.
    """
    model = open_model()
    manifest, count = model.manifest, segments or SEGMENTS
    known = {entry.name for entry in manifest.given}
    samples = {name: values for name, values in arrays.items() if name in known}
    _check(samples, manifest)
    others = {name: values for name, values in arrays.items() if name not in known}
    try:
        foreign = read_foreign(path)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    opened = False
    try:
        with Runner(foreign, SECONDS) as runner:
            opened = True
            file = _File(foreign, runner, manifest, others, pairs)
            return _compared(model, file, samples, count, heard)
    except EndedError as error:
        raise UsageError(f"{path}: {error}; give a smaller file, or fewer --segments") from None
    except RunError as error:
        if opened:
            raise UsageError(f"{path}: does not run: {error}; see the shapes that it takes") from None
        raise UsageError(f"{path}: ONNX Runtime does not open it: {error}; give an ONNX file") from None


def _compared(model: Model, file: _File, samples: Mapping[str, Array], count: int, heard: Listener) -> Parity:
    """What both return, segment by segment."""
    manifest, path = model.manifest, file.path
    source, stream = InputSource(manifest, samples, np.random.default_rng(0)), model.stream()
    worst, limit, first = dict.fromkeys(file.returned, 0.0), BISECT[manifest.precision], ""
    heard.stage(f"stream beside {path.name}", count)
    for segment in range(count):
        inputs = source.take(manifest.batch_size, manifest.segment_lengths[0])
        found, theirs = stream.run(inputs), file.run(inputs)
        for name in worst:
            try:
                apart = relative_difference(found[name], theirs[name].reshape(found[name].shape))
            except ValueError:
                raise UsageError(
                    f"{path}: {file.returned[name]} has the shape {list(theirs[name].shape)}, the bundle's {name} has "
                    f"{list(found[name].shape)}; export with as many sequences as the file takes (--batch-size)"
                ) from None
            worst[name] = max(worst[name], apart)
            first = first or (f"{name} in segment {segment + 1} of {count}" if apart > limit else "")
        heard.advance()
    gates = tuple(Gate(f"{name} max abs (relative)", value, limit, value <= limit) for name, value in worst.items())
    advice = f"they part first at {first}: in the first segment other weights or inputs, later other states"
    what = f"{path.name}, {count} segments of {manifest.segment_lengths[0]}"
    return Parity(
        model.backend.description, manifest.precision, what, (), None, gates, advice=advice, model_id=manifest.model_id
    )


def _check(samples: Mapping[str, Array], manifest: Manifest) -> None:
    """Refuse samples of some inputs alone, or of another form."""
    if lacking := [entry.name for entry in manifest.given if samples and entry.name not in samples]:
        raise UsageError(f"--inputs has no {some(lacking)}, expected all inputs of the bundle or none; add it")
    for entry in manifest.given if samples else ():
        shape, least = samples[entry.name].shape, entry.sizes(1, manifest.segment_lengths[0])
        fitting = len(shape) == len(least) and all(
            size >= low if isinstance(said, str) else size == low
            for size, low, said in zip(shape, least, entry.shape, strict=True)
        )
        if not fitting:
            raise UsageError(f"--inputs has {entry.name} of {list(shape)}, expected {list(entry.shape)}; check it")


class _File:
    """An ONNX file that streams: its states are kept here.

    Attributes:
        path: of the file.
        returned: the bundle's outputs, and the file's names for them.
    """

    def __init__(
        self,
        foreign: Foreign,
        runner: Runner,
        manifest: Manifest,
        given: Mapping[str, Array],
        pairs: Mapping[str, str],
    ) -> None:
        self.path, self._runner = foreign.path, runner
        self._takes = {port.name: port for port in foreign.inputs}
        may_take = self._takes | {port.name: port for port in foreign.optional if port.name in {*given, *pairs}}
        gives = [port.name for port in foreign.outputs]
        inputs, outputs = [entry.name for entry in manifest.given], [entry.name for entry in manifest.outputs]
        if wrong := [*(set(given) | set(pairs)) - set(may_take), *set(pairs.values()) - set(gives)]:
            raise UsageError(
                f"{self.path}: has no {some(wrong)}, it takes {some([*self._takes], 9)} and gives {some(gives, 9)}; "
                "check --state and --inputs"
            )
        self._takes = may_take
        self._pairs = dict(pairs)
        earlier = [name for name in self._takes if name not in {*pairs, *inputs}]
        later = [name for name in gives if name not in {*pairs.values(), *outputs}]
        scores = {(name, other): likeness(name, other) for name in earlier for other in later}
        while found := most_alike(scores):
            self._pairs[found[0]] = found[1]
            scores = {pair: how for pair, how in scores.items() if not {*pair} & {*found}}
        takes = [name for name in self._takes if name not in {*given, *self._pairs}]
        returns = [name for name in gives if name in outputs or name not in self._pairs.values()]
        self._reads = self._matched(takes, inputs, set(takes) <= set(inputs), "takes")
        self.returned = self._matched(returns, outputs, set(outputs) <= set(returns), "gives")
        self._given = {name: self._as_taken(name, values) for name, values in given.items()}
        for name in set(self._pairs) - set(given):
            sizes = [size if isinstance(size, int) else manifest.batch_size for size in self._takes[name].shape]
            self._given[name] = self._as_taken(name, np.zeros(sizes))

    def _matched(self, theirs: list[str], ours: list[str], equal: bool, verb: str) -> dict[str, str]:
        """The bundle's names, and the file's for the same: equal ones, or the only one on each side."""
        if len(theirs) == len(ours) == 1:
            return {ours[0]: theirs[0]}
        if not equal:
            raise UsageError(
                f"{self.path}: {verb} {some(theirs, 9) or 'nothing'} beside states, the bundle has {some(ours, 9)}, "
                "expected the same names; give --state IN=OUT for each other state, and constants by --inputs FILE.npz"
            )
        return {name: name for name in ours if name in theirs}

    def _as_taken(self, name: str, values: Array) -> Array:
        kind = self._takes[name].dtype
        try:
            return np.asarray(values).astype(kind)
        except (TypeError, ValueError):
            raise UsageError(f"{self.path}: {name} is {kind}, which no array is made of {values.dtype}") from None

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of one segment, by the bundle's names."""
        found = self._runner.run(
            self._given | {other: self._as_taken(other, inputs[name]) for name, other in self._reads.items()}
        )
        self._given |= {name: found[other] for name, other in self._pairs.items()}
        return {name: found[other] for name, other in self.returned.items()}
