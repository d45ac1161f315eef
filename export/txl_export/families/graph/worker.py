"""ONNX Runtime with a foreign graph, in a process of its own: `python -m txl_export.families.graph.worker`.

Whatever the graph does to the engine happens here: the process may die, and it may not take more memory and processor
time than it was given. It reads from stdin and writes to stdout messages of msgpack behind their length in 8 bytes,
little-endian. The first says what to open; each further one has the inputs of a run. When stdin ends, it ends.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from msgspec import Struct
from txl_runtime.errors import one_line

LENGTH = struct.Struct("<Q")
MOST_ANSWER = 2**27
"""Bytes of an answer."""


class Tensor(Struct, frozen=True, array_like=True):
    """An array: dtype as NumPy calls it, shape, and its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Open(Struct, frozen=True):
    """What to open, and what the process may take.

    Attributes:
        path: of the graph.
        memory: bytes of address space beside what the process has before it opens the graph.
        seconds: of processor time.
    """

    path: str
    memory: int
    seconds: int


class Answer(Struct, frozen=True):
    """How a request ended.

    Attributes:
        error: what ONNX Runtime said; "" where it did what was asked.
        folded: of the first request, the graph with everything computed that is always the same; empty where it is too
            large.
        outputs: of a run.
    """

    error: str = ""
    folded: bytes = b""
    outputs: dict[str, Tensor] = {}


def packed(arrays: dict[str, Any]) -> dict[str, Tensor]:
    """Arrays as a message has them."""
    return {
        name: Tensor(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())
        for name, array in arrays.items()
    }


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The arrays of a message.

    Raises:
        ValueError, TypeError: bytes, shape and dtype do not fit.
    """
    return {
        name: np.frombuffer(tensor.data, np.dtype(tensor.dtype)).reshape(tensor.shape)
        for name, tensor in tensors.items()
    }


def send(stream: IO[bytes], message: Struct | dict[str, Tensor]) -> None:
    """Write a message."""
    data = msgspec.msgpack.encode(message)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """Read a message, or nothing where there is no more; one that is too long ends what is read."""
    head = stream.read(LENGTH.size)
    length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
    return stream.read(length) if length <= 2 * MOST_ANSWER else b""


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started it, and who ends it
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what native code prints is no answer, and nobody's to read
        os.dup2(1, 2)
        asked = msgspec.msgpack.decode(receive(sys.stdin.buffer), type=Open)
        import onnxruntime

        _bound(asked)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        with tempfile.TemporaryDirectory(prefix="txl-deploy-inspect-") as place:
            folded = Path(place) / "folded.onnx"
            options.optimized_model_filepath = str(folded)
            try:
                session = onnxruntime.InferenceSession(
                    asked.path,
                    options,
                    providers=["CPUExecutionProvider"],
                    disabled_optimizers=["EliminateDropout"],  # it takes away what was left in training mode, too
                )
            except Exception as error:  # ONNX Runtime raises its own kinds, one per status code
                send(answers, Answer(error=one_line(error)))
                return
            small = folded.is_file() and folded.stat().st_size < MOST_ANSWER
            send(answers, Answer(folded=folded.read_bytes() if small else b""))
        names = [value.name for value in session.get_outputs()]
        while data := receive(sys.stdin.buffer):
            send(answers, _run(session, names, unpacked(msgspec.msgpack.decode(data, type=dict[str, Tensor]))))
    os._exit(0)


def _run(session: Any, names: list[str], feeds: dict[str, Any]) -> Answer:
    try:
        found = session.run(names, feeds)
        arrays = {name: array for name, array in zip(names, found, strict=True) if isinstance(array, np.ndarray)}
        if (size := sum(array.nbytes for array in arrays.values())) > MOST_ANSWER:
            return Answer(error=f"returned {size} bytes, expected at most {MOST_ANSWER}")
        return Answer(outputs=packed(arrays))
    except Exception as error:  # as above; NumPy's for texts and other objects
        return Answer(error=one_line(error))


def _bound(asked: Open) -> None:
    if sys.platform == "linux":
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + asked.memory,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (asked.seconds,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
