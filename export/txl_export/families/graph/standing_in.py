"""Puts an ONNX graph in the place of a bundle: the proof's loaded model runs the file.

States are fed back here. An idle sequence keeps its state, whatever the file returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from operator import gt
from pathlib import Path
from weakref import WeakSet

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.errors import BackendError, CheckError, UsageError
from txl_runtime.host.backend import HostBackend
from txl_runtime.host.engine import Engine
from txl_runtime.model import Model
from txl_runtime.sandbox.process import EndedError
from txl_runtime.types import Array, Arrays, Call

from txl_export.families.graph.matching import Wiring
from txl_export.families.graph.take.reading import Foreign
from txl_export.families.graph.take.running import Helper, RunError
from txl_export.families.own_module.identity import parameter_count
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.spec import VALID

SECONDS = 600.0
"""Seconds of processor time for all runs of a file, and the same again for this process between the runs."""
Run = Callable[[Arrays], Arrays]


@contextmanager
def running(foreign: Foreign) -> Iterator[Run]:
    """Open an ONNX graph in a helper process; yield a function that runs the graph with arrays by name.

    The function casts the arrays to the graph's dtypes.

    Raises:
        UsageError: ONNX Runtime does not open it, or an array cannot be cast.
        CheckError: the graph does not run with the arrays.
        BackendError: the process died or ran out of time.
    """
    types = {port.name: port.dtype for port in (*foreign.inputs, *foreign.optional)}

    def run(feeds: Arrays) -> Arrays:
        cast = {name: _cast(foreign.path, name, np.asarray(one), types[name]) for name, one in feeds.items()}
        try:
            return runner.run(cast)
        except RunError as error:
            shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in cast.items())
            message = f"does not run with {shapes}, expected a run ({error})"
            raise CheckError(f"{foreign.path}: {message}; look whether a size was fixed when it was exported") from None

    try:
        with Helper(foreign, SECONDS) as helper:
            runner = helper.open(foreign.data)
            yield run
    except RunError as error:
        raise UsageError(f"{foreign.path}: ONNX Runtime does not open it: {error}; export it again") from None
    except EndedError as error:
        raise BackendError(f"{foreign.path}: {error}; try fewer --segments, or export it again") from None


def _cast(path: Path, name: str, values: Array, kind: str) -> Array:
    try:
        with np.errstate(all="ignore"):  # NumPy warns of NaN as an integer, and of large numbers in half precision
            return values.astype(kind)
    except (TypeError, ValueError):
        message = f"{name} is {kind or 'no tensor'}, which no array is made of {values.dtype}"
        raise UsageError(f"{path}: {message}; see --inputs") from None


class FileEngine(Engine):
    """An `Engine` that runs the file for every program.

    Attributes:
        still: states that have come back unchanged in all runs so far.
    """

    least_rows = 1

    def __init__(self, path: Path, run: Run, wiring: Wiring, manifest: Manifest) -> None:
        self._path, self._run, self._wiring, self._manifest = path, run, wiring, manifest
        self._ports = {one.name: wiring.returns[one.name] for one in manifest.outputs}
        self._ports |= {
            one.output: wiring.after.get(wiring.takes.get(one.name, one.name), "") for one in manifest.states
        }
        self.description = f"{path.name}, by ONNX Runtime on the CPU"
        self.still = {state.name for state in manifest.states}

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        def call() -> None:
            for name, values in self.run(program, inputs).items():
                if values.shape != outputs[name].shape:
                    raise self._cut_wrong(program, name, values, list(outputs[name].shape))
                outputs[name][...] = values

        return call

    def kept(self, program: Program) -> Collection[str]:
        return ()  # `_next` keeps idle sequences' states

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        states = self._manifest.states
        values = {**inputs, **{state.name: inputs[state.input] for state in states}}
        results = self._run(self._wiring.feeds(values))
        with np.errstate(all="ignore"):
            returned = {one.name: results[self._ports[one.name]].astype(one.dtype) for one in self._manifest.outputs}
            returned |= {state.output: self._next(state, results, values) for state in states}
        for state in states:
            after, most = returned[state.output], state.shape
            if state.rows and (after.ndim != len(most) or any(map(gt, after.shape, most))):
                raise self._cut_wrong(program, state.output, after, f"at most {list(most)}")
        return returned

    def _next(self, state: StateTensor, results: Arrays, values: Arrays) -> Array:
        """Return a state after a run: unchanged for idle sequences, and for all if the file does not return it."""
        before, valid = values[state.name], values.get(VALID)
        after = results.get(self._ports[state.output], before)
        if after.shape != before.shape or not np.array_equal(after, before):
            self.still.discard(state.name)
        if valid is not None and state.batch_axis is not None and after.shape == before.shape:
            runs = np.expand_dims(valid > 0, [axis for axis in range(before.ndim) if axis != state.batch_axis])
            after = np.where(runs, after, before)
        return after.astype(before.dtype)

    def _cut_wrong(self, program: Program, name: str, values: Array, expected: object) -> CheckError:
        return CheckError(
            f"{self._path}: gives {self._ports[name]} of the shape {list(values.shape)} in a segment of "
            f"{program.segment_length}, expected the module's {expected}; look whether a size was fixed when it was "
            "exported, or is not cut off"
        )

    def release_pages(self) -> None:
        """Do nothing: no pages are mapped here."""


class FileModel(Model):
    """The file in the place of a loaded bundle.

    Attributes:
        engine: runs the file.
    """

    def __init__(self, plan: Plan, foreign: Foreign, run: Run, wiring: Wiring, precision: str) -> None:
        self._manifest = _manifest(plan, foreign, wiring, precision)
        self.engine = FileEngine(foreign.path, run, wiring, self._manifest)
        self.backend = HostBackend(self.engine, "replace", self._manifest.programs, self.engine.description)
        tensors = {name.removeprefix("initial."): value.numpy() for name, value in plan.initial_tensors.items()}
        numbers = {state.name: np.asarray(state.initial or 0.0) for state in plan.states if state.name not in tensors}
        self._initial, self._streams = tensors | numbers, WeakSet()

    @property
    def manifest(self) -> Manifest:
        return self._manifest


def _manifest(plan: Plan, foreign: Foreign, wiring: Wiring, precision: str) -> Manifest:
    """Return the manifest of a bundle of the module; each program's graph is the file."""
    networks = {one.length: StepNetwork(plan, one, open_rows=True) for one in plan.transitions}
    programs = [
        Program(
            name=f"step-{length}",
            kind="step",
            segment_length=length,
            update="replace",
            file=foreign.path.name,
            inputs=network.inputs,
            outputs=network.outputs,
            open_batch="B" not in wiring.fixed and plan.streams == "independent",
        )
        for length, network in networks.items()
    ]
    return plan.manifest(
        programs,
        model_id=foreign.sha256,
        precision=precision,
        family={"name": "graph"},
        weights="",
        parameters=parameter_count(plan.spec.module),
    )
