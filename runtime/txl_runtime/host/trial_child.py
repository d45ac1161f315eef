"""The child process of a trial, which `sandbox.process.Bounded` starts and `trial.TrialEngine` asks.

The child opens a bundle's programs with the same engine as its parent, but on one thread. It runs combinations of sizes
on zeros and on the states' first values. The check of graphs guarantees that sizes follow only from shapes and
constants, so zeros take the same memory as any other numbers.
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
    """An array for the child to allocate; if `data` is empty, all its values are 0."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""


class Opening(Struct, frozen=True, tag=True):
    """The first request: a bundle's folder, the names of the programs to open, and the options `lean` and `forms` of
    `load`.
    """

    path: str
    programs: tuple[str, ...]
    lean: bool
    forms: str


class Combination(Struct, frozen=True, tag=True):
    """A request to run a program on arrays; `outputs` is None if the program leaves the sizes of outputs open."""

    program: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] | None


class Answer(Struct, frozen=True):
    """The answer to a request.

    Attributes:
        kind, error: the class of the error and its message; "" without an error.
        manifest: `digest` of the opened bundle's manifest.
        description, least_rows: attributes of the engine that opened the bundle.
        memory: peak memory of this process so far, in bytes; 0 on systems other than Linux.
        seconds: processor time that the request took, in seconds.
        returned: types and shapes of the program's outputs, if the request gave no arrays for them.
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
"""A request from the parent process."""
OLDEST = (1, 25)
"""The first safe version of ONNX Runtime. In older versions, a reflecting `Pad` that is wider than its input returns
memory of other arrays.
"""
OPENED: dict[str, tuple[Bundle, OnnxRuntimeCpu]] = {}
"""The bundle and engine of this process, under the key ""; empty until the request `Opening` is answered."""
STARTS: dict[str, Array] = {}
"""First values of the states, by the names of the inputs that read them."""


def digest(manifest: Manifest) -> str:
    """Return a SHA-256 of a manifest's content, which includes the hashes of the bundle's files."""
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()


def answer(request: bytes) -> bytes:
    """Answer one request: the argument is a `Request`, the result an `Answer`, both encoded as MessagePack."""
    asked = msgspec.msgpack.decode(request, type=Request)
    begun = time.process_time()
    try:
        reply = _open(asked) if isinstance(asked, Opening) else _run(asked)
    except (BackendError, BundleError) as error:
        reply = Answer("BackendError" if isinstance(error, BackendError) else "BundleError", str(error))
    except MemoryError:
        raise  # this ends the process, and the parent reports it
    except Exception as error:  # ONNX Runtime and NumPy have their own classes of errors
        reply = Answer("BundleError", one_line(error))
    spent = msgspec.structs.replace(reply, memory=_peak(), seconds=time.process_time() - begun)
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
        results = engine.run(program, inputs)
        return Answer(returned={name: Tensor(array.dtype.str, array.shape) for name, array in results.items()})
    outputs = {name: _array(name, tensor) for name, tensor in asked.outputs.items()}
    engine.bind(program, inputs, outputs)()
    return Answer()


def _array(name: str, tensor: Tensor) -> Array:
    if tensor.data:
        return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
    array = np.zeros(tensor.shape, tensor.dtype)
    with contextlib.suppress(ValueError):  # a state that has grown does not have its first value's shape
        np.copyto(array, STARTS.get(name, array), casting="unsafe")
    return array


def _peak() -> int:
    if sys.platform != "linux":
        return 0
    # getrusage would include the memory of the process before exec
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
