"""The child's side of a trial: the program of `sandbox.process.Bounded` that `trial.Tried` asks.

It opens a bundle's programs with the same engine as its starter, with one thread, and runs combinations of sizes on
zeros and on the states' first values. The check of graphs guarantees that sizes follow from shapes and constants alone,
so zeros take the same memory as any other numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from txl_runtime.bundle.folder import undisturbed
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle, read_bundle
from txl_runtime.errors import BackendError, BundleError, one_line
from txl_runtime.host.onnxruntime_cpu import OnnxRuntimeCpu
from txl_runtime.streaming.state import initial_values, start_of
from txl_runtime.types import Array


class Tensor(Struct, frozen=True):
    """An array to allocate; zeros without data."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""


class Opening(Struct, frozen=True, tag=True):
    """The first request: the bundle's folder, the names of programs to open, and `lean` and `forms` of `load`."""

    path: str
    programs: tuple[str, ...]
    lean: bool
    forms: str


class Combination(Struct, frozen=True, tag=True):
    """A program with arrays to run it on; outputs are None if the program leaves their sizes open."""

    program: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] | None


class Answer(Struct, frozen=True):
    """The outcome of a request.

    Attributes:
        kind, error: the class of the error and its message; "" without an error.
        manifest: `digest` of the opened bundle's manifest.
        description, least_rows: attributes of the engine that opened it.
        memory: peak memory of this process so far, in bytes; 0 except on Linux.
        seconds: processor time of the request.
        returned: types and shapes of a program's outputs, if the request had none.
    """

    kind: Literal["", "BundleError", "BackendError"] = ""
    error: str = ""
    manifest: str = ""
    description: str = ""
    least_rows: int = 1
    memory: int = 0
    seconds: float = 0.0
    returned: dict[str, Tensor] = {}


Request: TypeAlias = Opening | Combination
OLDEST = (1, 25)
"""First safe ONNX Runtime: before it, a reflecting `Pad` wider than its input returns memory outside the model's."""
OPENED: dict[str, tuple[Bundle, OnnxRuntimeCpu]] = {}
"""The bundle and engine of this process, under the key ""."""
STARTS: dict[str, Array] = {}
"""First values of its states, by the inputs that read them."""


def digest(manifest: Manifest) -> str:
    """Return a SHA-256 of a manifest's content, which includes the hashes of all files."""
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()


def answer(request: bytes) -> bytes:
    """Answer one request; the bytes are MessagePack of a `Request`, the result of an `Answer`."""
    asked = msgspec.msgpack.decode(request, type=Request)
    begun = time.process_time()
    try:
        found = _open(asked) if isinstance(asked, Opening) else _run(asked)
    except (BackendError, BundleError) as error:
        found = Answer("BackendError" if isinstance(error, BackendError) else "BundleError", str(error))
    except MemoryError:
        raise  # ends the process, and the starter reports it
    except Exception as error:  # ONNX Runtime and NumPy have their own classes of errors
        found = Answer("BundleError", one_line(error))
    spent = msgspec.structs.replace(found, memory=_peak(), seconds=time.process_time() - begun)
    return msgspec.msgpack.encode(spent)


def _open(asked: Opening) -> Answer:
    import onnxruntime

    if tuple(map(int, (version := onnxruntime.__version__).split(".")[:2])) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise BackendError(f"ONNX Runtime {version}, expected {wanted} or newer for a trial; install that")
    bundle = undisturbed(Path(asked.path), lambda folder: read_bundle(folder, verify_files=False))
    programs = [program for program in bundle.manifest.programs if program.name in asked.programs]
    engine = OnnxRuntimeCpu(bundle, programs, 1, asked.lean, asked.forms)
    OPENED[""], initial = (bundle, engine), initial_values(bundle)
    for state in bundle.manifest.states_of("replace"):
        STARTS[state.input] = start_of(state, initial[state.name])
    return Answer("", "", digest(bundle.manifest), engine.description, engine.least_rows)


def _run(asked: Combination) -> Answer:
    bundle, engine = OPENED[""]
    program = next(program for program in bundle.manifest.programs if program.name == asked.program)
    inputs = {name: _array(name, tensor) for name, tensor in asked.inputs.items()}
    if asked.outputs is None:
        found = engine.run(program, inputs)
        return Answer(returned={name: Tensor(array.dtype.str, array.shape) for name, array in found.items()})
    outputs = {name: _array(name, tensor) for name, tensor in asked.outputs.items()}
    engine.bind(program, inputs, outputs)()
    return Answer()


def _array(name: str, tensor: Tensor) -> Array:
    if tensor.data:
        return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
    array = np.zeros(tensor.shape, tensor.dtype)
    with contextlib.suppress(ValueError):  # a state that has grown has not the shape of its first value
        np.copyto(array, STARTS.get(name, array), casting="unsafe")
    return array


def _peak() -> int:
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage would include the memory before exec
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
