"""`txl-deploy inspect BUNDLE --check`: try a bundle in a limited process, with all its sequences and with one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import txl_runtime
from msgspec import Struct
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import UsageError
from txl_runtime.host.backend import HostBackend
from txl_runtime.host.engine import Engine
from txl_runtime.host.trial import TrialEngine, key_of
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.sandbox.process import Bounds
from txl_runtime.types import Arrays, Call
from txl_runtime.update_rules import usable_updates

OPENING = "(opening)"
"""Text in place of a program's name, for the trial that opens all graphs of an update rule."""


class TriedProgram(Struct, frozen=True):
    """The trials of one program.

    Attributes:
        program: the program's name, or `OPENING`.
        update: the update rule that was loaded.
        combinations: number of combinations of sizes that were tried; 0 if no stream of zeros ran the program.
        seconds: processor time of the longest trial, in seconds.
        memory: peak memory of the process after the last trial, in bytes; 0 if the system does not report it.
    """

    program: str
    update: str
    combinations: int
    seconds: float
    memory: int


def try_bundle(path: Path, manifest: Manifest, bounds: Bounds, listener: Listener) -> list[TriedProgram]:
    """Run streams of zeros, with all sequences and with one, in a limited process; no graph runs in this process.

    For each length, a stream begins with segments of that length until no new sizes appear, and runs segments of every
    other length afterwards. The softmax runs only for the last positions, so other numbers of rows are not tried.

    Raises:
        BundleError: a trial ended the process; the message names program, sizes and cause.
        BackendError: the engine is not installed or cannot run the bundle.
    """
    results: list[TriedProgram] = []
    for update in usable_updates(manifest.updates):
        listener.stage(f"try to open the graphs of {update}")
        with txl_runtime.load(path, "cpu", threads=1, update=update, trial=bounds) as model:
            assert isinstance(model.backend, HostBackend)
            tried = model.backend.engine
            assert isinstance(tried, TrialEngine)
            tried.opener = partial(Nothing, tried)
            for sequences in sorted({model.batch_size, 1 if manifest.can.run_fewer else model.batch_size}):
                listener.stage(f"try {update} with B {sequences}")
                for first in manifest.segment_lengths:
                    others = [length for length in manifest.segment_lengths if length != first]
                    _run(model, sequences, [first, *others], tried)
            results += _summed(tried, model)
    return results


class Nothing(Engine):
    """An engine that runs no graph: a stream's results are uninitialised, or zeros in the sizes that the trial had."""

    description, least_rows = "", 1

    def __init__(self, tried: TrialEngine, _: Sequence[Program]) -> None:
        self._tried = tried

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        return lambda: None

    def kept(self, program: Program) -> Collection[str]:
        return ()

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        returned = self._tried.tried[key_of(program, inputs, None)].returned
        return {name: np.zeros(array.shape, array.dtype) for name, array in returned.items()}

    def release_pages(self) -> None:
        pass


def _run(model: Model, sequences: int, lengths: list[int], tried: TrialEngine) -> None:
    """Run segments of each length in turn; repeat a length until no new sizes appear, because states may grow."""
    manifest, stream = model.manifest, model.stream(sequences)
    for length in lengths:
        inputs = {entry.name: np.zeros(entry.sizes(sequences, length), entry.dtype) for entry in manifest.given}
        counts, before = np.full(sequences, length, np.int32), -1
        with contextlib.suppress(UsageError):  # no program accepts this length with the present size of the state
            while before < (before := len(tried.tried)):
                result = stream.loop.run(inputs, counts)
                if manifest.clusters:
                    stream.loop.output.logprobs(result.last(), np.zeros((sequences, manifest.vocab_size), np.float32))


def _summed(tried: TrialEngine, model: Model) -> Iterator[TriedProgram]:
    """Yield one row for opening the graphs, and one row for each program."""
    yield TriedProgram(OPENING, model.update, 1, tried.opened.seconds, tried.opened.memory)
    ran = [name for name, _ in tried.tried]
    for name in dict.fromkeys([program.name for program in model.backend.programs] + ran):
        answers = [answer for (program, _), answer in tried.tried.items() if program == name]
        seconds = max((answer.seconds for answer in answers), default=0.0)
        memory = max((answer.memory for answer in answers), default=0)
        yield TriedProgram(name, model.update, len(answers), seconds, memory)
