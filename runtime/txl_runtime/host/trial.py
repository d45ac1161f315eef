"""Trials of a stranger's bundle on the CPU: each combination of sizes first runs in a process with limits.

A combination is a program with the shapes of its arrays, e.g. `step` with tokens [2, 64] and a state [2, 8, 32]. A
graph may take more memory or time than there is, or crash ONNX Runtime. If so, only the limited process ends, and this
process raises an error of one line.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program, TensorSpec
from txl_runtime.errors import BackendError, BundleError, UsageError, brief, some
from txl_runtime.host import trial_child
from txl_runtime.host.engine import Engine
from txl_runtime.host.trial_child import Answer, Combination, Opening, Request, Tensor
from txl_runtime.sandbox.process import Bounded, Bounds, EndedError
from txl_runtime.types import Array, Arrays, Call

MEMORY, EACH = 2**29, 64
"""Default memory limit of a trial in bytes: 512 MiB, plus 64 for each byte of the weight file."""
SEQUENCE = 128
"""Number of bytes reserved for a stream's counters per sequence, which take about 79."""
SMALL = 2**16
"""Maximum size in bytes of an integer input whose real values a trial gets: e.g. counts, by which a graph
may divide.
"""
Key = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]
"""A combination: (program's name, ((name, shape) of each input and output))."""


class TrialEngine(Engine):
    """An engine that first tries each combination of sizes in a process with limits. See `Engine`.

    The limited process opens all graphs at once. This process opens a graph only after a combination of its program has
    passed, so a graph that fails costs nothing here. Afterwards the real engine binds and runs: a step of known sizes
    costs nothing more, and a step with open rows costs a look-up in `tried`.

    Args:
        lean, forms: see `txl_runtime.load`.
        bounds: limits of the trial; True for the defaults.
        opener: a function that opens programs in this process.

    Attributes:
        opened: the trial's answer to the request that opens the programs.
        tried: the trial's answer for each combination.
        opener: the argument.

    Raises:
        UsageError: `bounds` has a wrong type.
        BundleError: the programs declare more bytes than the limit, or the trial ended while it opened them.
        BackendError: the engine is not installed or cannot run the bundle.
    """

    def __init__(
        self,
        bundle: Bundle,
        programs: Sequence[Program],
        lean: bool,
        forms: str,
        bounds: bool | Bounds,
        opener: Callable[[Sequence[Program]], Engine],
    ) -> None:
        if bounds is True:
            bounds = default_bounds(bundle.manifest)
        if not isinstance(bounds, Bounds):
            shown_bounds = brief(repr(bounds))
            raise UsageError(
                f"trial is {shown_bounds}, expected True, False or txl_runtime.sandbox.process.Bounds; give that"
            )
        self._bundle, self._programs, self.opener, self._bounds = bundle, programs, opener, bounds
        self._states = {state.input for state in bundle.manifest.states}
        self._engines: dict[str, Engine] = {}
        self._lock = threading.Lock()
        self.tried: dict[Key, Answer] = {}
        self._check_declared()
        self._process, self._ended = Bounded(trial_child.__file__, bounds), ""
        names = tuple(program.name for program in programs)
        self.opened = self._asked(Opening(str(bundle.folder.place), names, lean, forms), "opening its graphs")
        if self.opened.manifest != trial_child.digest(bundle.manifest):
            raise self._replaced()
        self.description = f"{self.opened.description}, each size after a trial"
        self.least_rows = self.opened.least_rows

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        self._try(program, inputs, outputs)
        return self._engine(program).bind(program, inputs, outputs)

    def kept(self, program: Program) -> Collection[str]:
        return self._engine(program).kept(program)

    def run(self, program: Program, inputs: Arrays) -> Arrays:
        self._try(program, inputs, None)
        return self._engine(program).run(program, inputs)

    def release_pages(self) -> None:
        for engine in tuple(self._engines.values()):
            engine.release_pages()

    def _engine(self, program: Program) -> Engine:
        """Return the engine that opened the program's graph in this process, opening it at the first call."""
        if program.file not in self._engines:
            with self._lock:
                if program.file not in self._engines:
                    engine = self.opener([other for other in self._programs if other.file == program.file])
                    if self._bundle.folder.replaced:
                        raise self._replaced()
                    self._engines[program.file] = engine
        return self._engines[program.file]

    def _try(self, program: Program, inputs: Arrays, outputs: Arrays | None) -> None:
        """Run a combination in the limited process, if it is new.

        Raises:
            BundleError: the trial ended, or the engine refused the combination.
        """
        if (key := key_of(program, inputs, outputs)) not in self.tried:
            tensors = {name: self._tensor(name, array) for name, array in inputs.items()}
            zeros = None if outputs is None else {name: _zeros(array) for name, array in outputs.items()}
            sizes = some([f"{name} {list(array.shape)}" for name, array in inputs.items()])
            asked = Combination(program.name, tensors, zeros)
            self.tried[key] = self._asked(asked, f"program {program.name} with {sizes}")

    def _tensor(self, name: str, array: Array) -> Tensor:
        sent = array.dtype.kind == "i" and array.nbytes <= SMALL and name not in self._states
        return msgspec.structs.replace(_zeros(array), data=array.tobytes() if sent else b"")

    def _asked(self, request: Request, what: str) -> Answer:
        try:
            answer = msgspec.msgpack.decode(self._process.ask(msgspec.msgpack.encode(request)), type=Answer)
        except KeyboardInterrupt:
            self._ended = f"{what}: was interrupted"
            raise
        except (EndedError, msgspec.DecodeError) as error:
            if self._ended:
                message = f"its trial ended before ({self._ended}), expected one that can go on; load it again"
                raise BundleError(f"{self._bundle.path}: {message}") from None
            self._ended = f"{what}: {error}"
            raise self._refused(f"in a trial, {self._ended}") from None
        if answer.kind and isinstance(request, Opening):
            reason = answer.error.replace(str(self._bundle.folder.place), str(self._bundle.path))
            raise (BackendError if answer.kind == "BackendError" else BundleError)(reason)
        if answer.kind:
            raise self._refused(f"in a trial, {what}: {answer.error}")
        return answer

    def _check_declared(self) -> None:
        """Raise BundleError if the declared inputs and outputs are too large, before this process allocates them.

        Their size includes the states that have rows from the beginning.
        """
        manifest, most = self._bundle.manifest, self._bounds.memory
        for program in self._programs:
            size = sum(map(_bytes, (*program.inputs, *program.outputs))) + SEQUENCE * manifest.batch_size
            if size > most:
                raise self._refused(f"program {program.name} declares {size} bytes of inputs and outputs")

    def _replaced(self) -> BundleError:
        path = self._bundle.path
        return BundleError(f"{path}: was replaced since its trial began, expected the same bundle; load it again")

    def _refused(self, fault: str) -> BundleError:
        """Return a BundleError; if a limit was reached, e.g. "Failed to allocate memory", its advice is to raise the
        limits.
        """
        b = self._bounds
        if any(word in fault for word in ("took more", "needed more", "declares", "allocat")):
            most = f"{b.memory} bytes, {b.processor_seconds} s of processor time, {b.seconds:g} s"
            wanted = (
                f"expected at most {most}; if you trust it, give larger bounds: `load(path, trial=Bounds(...))`, or "
                "`inspect BUNDLE --check --memory BYTES --processor-seconds N`"
            )
        else:
            wanted = "expected programs that run on zeros; do not use this bundle"
        return BundleError(f"{self._bundle.path}: {fault}, {wanted}")


def key_of(program: Program, inputs: Arrays, outputs: Arrays | None) -> Key:
    """Return the key of a program together with the shapes of its arrays.

    For example, two segments of [1, 5] have the same key, and a segment of [1, 6] has a different key.
    """
    return program.name, tuple((name, array.shape) for name, array in [*inputs.items(), *(outputs or {}).items()])


def default_bounds(manifest: Manifest) -> Bounds:
    """Return the limits that `load(trial=True)` uses."""
    return Bounds(MEMORY + EACH * manifest.weight_bytes)


def _zeros(array: Array) -> Tensor:
    return Tensor(array.dtype.str, array.shape)


def _bytes(spec: TensorSpec) -> int:
    """Return the number of bytes of a tensor, counting an open number of rows as 1."""
    sizes = (size for size in spec.shape if size != "rows")
    return math.prod(map(int, sizes)) * np.dtype(spec.dtype).itemsize
