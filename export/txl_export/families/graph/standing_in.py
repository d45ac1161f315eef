"""A foreign graph in the place of a bundle: what a proof asks of a loaded model, answered by the file.

Its states are fed back here. A sequence that is idle keeps its state, whatever the file returns for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from operator import gt
from weakref import WeakSet

import numpy as np
from txl_runtime.bundle.manifest import FORMAT, FORMAT_VERSION, Manifest
from txl_runtime.bundle.tables import Program, StateTensor
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.host.backend import HostBackend
from txl_runtime.host.engine import Engine
from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays, Call

from txl_export.families.graph.matching import Wiring
from txl_export.families.graph.reading import Foreign
from txl_export.families.graph.running import RunError, Runner
from txl_export.families.own_module.identity import parameter_count
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.spec import VALID


class Wired:
    """A foreign graph with inputs and outputs by a step's names.

    Args:
        foreign: the graph.
        runner: that has opened it.
    """

    def __init__(self, foreign: Foreign, runner: Runner) -> None:
        self.path, self._runner = foreign.path, runner
        self._types = {port.name: np.dtype(port.dtype) for port in (*foreign.inputs, *foreign.optional) if port.dtype}

    def run(self, wiring: Wiring, values: Mapping[str, Array]) -> dict[str, Array]:
        """What the graph returns, by its own names, for inputs and states by the step's, cast to its types.

        Raises:
            RunError, EndedError: see `Runner.run`.
            UsageError: it takes something that no numbers can be cast to, or is given such a thing.
        """
        feeds = {**wiring.given, **{port: values[name] for name, port in wiring.takes.items()}}
        try:
            with np.errstate(all="ignore"):  # NaN is no whole number, and half precision has no large ones
                cast = {name: np.asarray(one).astype(self._types[name]) for name, one in feeds.items()}
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{self.path}: takes other types than numbers, expected numbers; see --inputs") from None
        return self._runner.run(cast)

    def stopped(self, wiring: Wiring, values: Mapping[str, Array], error: RunError) -> CheckError:
        """What to say where the graph does not run what the module runs."""
        shapes = ", ".join(f"{port} {list(values[name].shape)}" for name, port in wiring.takes.items())
        return CheckError(
            f"{self.path}: does not run with {shapes}, expected a run, because the module takes that ({error}); look "
            "whether a size was fixed when it was exported"
        )


class FileEngine(Engine):
    """See `Engine`: it runs the file, whatever the program.

    Attributes:
        still: states that came back as they went in, in all runs so far.
    """

    least_rows = 1

    def __init__(self, file: Wired, wiring: Wiring, manifest: Manifest) -> None:
        self._file, self._wiring, self._manifest = file, wiring, manifest
        self.description = f"{file.path.name}, by ONNX Runtime on the CPU"
        self.still = {state.name for state in manifest.states}

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        def call() -> None:
            for name, values in self.run(program, inputs).items():
                if values.shape != outputs[name].shape:
                    raise self._cut_wrong(program, name, values, list(outputs[name].shape))
                outputs[name][...] = values

        return call

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        states = self._manifest.states
        held = {state.name: inputs[state.input] for state in states}
        values = {**inputs, **held}
        try:
            found = self._file.run(self._wiring, values)
        except RunError as error:
            raise self._file.stopped(self._wiring, values, error) from None
        with np.errstate(all="ignore"):
            returned = {
                one.name: found[self._wiring.returns[f"output {one.name}"]].astype(one.dtype)
                for one in self._manifest.outputs
            }
            returned |= {
                state.output: self._next(state, held[state.name], found, inputs.get(VALID)) for state in states
            }
        for state in states:
            after, most = returned[state.output], state.shape
            if state.rows and (after.ndim != len(most) or any(map(gt, after.shape, most))):
                raise self._cut_wrong(program, state.output, after, f"at most {list(most)}")
        return returned

    def _next(self, state: StateTensor, before: Array, found: Arrays, valid: Array | None) -> Array:
        """The state after a run, that before it of idle sequences; the same of all where the file returns none."""
        after = found.get(self._wiring.returns.get(f"state {state.name}", ""), before)
        if after.shape != before.shape or not np.array_equal(after, before):
            self.still.discard(state.name)
        if valid is not None and state.batch_axis is not None and after.shape == before.shape:
            runs = np.expand_dims(valid > 0, [axis for axis in range(before.ndim) if axis != state.batch_axis])
            after = np.where(runs, after, before)
        return after.astype(before.dtype)

    def _cut_wrong(self, program: Program, name: str, values: Array, expected: object) -> CheckError:
        keys = {state.output: f"state {state.name}" for state in self._manifest.states}
        port = self._wiring.returns.get(keys.get(name, f"output {name}"), name)
        return CheckError(
            f"{self._file.path}: gives {port} of the shape {list(values.shape)} in a segment of "
            f"{program.segment_length}, expected the module's {expected}; look whether a size was fixed when it was "
            "exported, or is not cut off"
        )

    def release_pages(self) -> None:
        """See `Engine`; no pages are mapped here."""


class FileModel(Model):
    """The file as a loaded bundle.

    Attributes:
        engine: that runs it.
    """

    def __init__(self, plan: Plan, file: Wired, wiring: Wiring) -> None:
        self._manifest = _manifest(plan, file, wiring)
        self.engine = FileEngine(file, wiring, self._manifest)
        self.backend = HostBackend(self.engine, "replace", self._manifest.programs, self.engine.description)
        tensors = {name.removeprefix("initial."): value.numpy() for name, value in plan.initial_tensors.items()}
        numbers = {state.name: np.asarray(state.initial or 0.0) for state in plan.states if state.name not in tensors}
        self._initial, self._streams = tensors | numbers, WeakSet()

    @property
    def manifest(self) -> Manifest:
        return self._manifest


def _manifest(plan: Plan, file: Wired, wiring: Wiring) -> Manifest:
    """The tables of a bundle of the module, whose programs are all the file's graph."""
    programs: dict[str, Program] = {}
    for transition in plan.transitions:
        network, name = StepNetwork(plan, transition, open_rows=True), f"step-{transition.length}"
        programs[name] = Program(
            name=name,
            kind="step",
            segment_length=transition.length,
            update="replace",
            file=file.path.name,
            inputs=network.inputs,
            outputs=network.outputs,
            open_batch=wiring.batch is None and plan.streams == "independent",
        )
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        model_id=hashlib.sha256(file.path.read_bytes()).hexdigest(),
        batch_size=plan.batch_size,
        precision="fp32",
        inputs=plan.inputs,
        outputs=plan.results,
        states=plan.states,
        programs=tuple(programs.values()),
        streams=plan.streams,
        joint=plan.joint,
        lengths="valid" if plan.spec.lengths else "exact",
        commits="rows" if plan.spec.lengths or 1 in plan.segment_lengths else "segment",
        family={"name": "graph"},
        weights="",
        files={},
        parameters=parameter_count(plan.spec.module),
    )
