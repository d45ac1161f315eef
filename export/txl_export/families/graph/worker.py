"""ONNX Runtime with a foreign graph, in a process of its own: `python -m txl_export.families.graph.worker`.

Whatever the graph does to the engine happens here: the process may die, and it may not take more memory and processor
time than it was given. Its arguments are the number of a connection, the path of the graph, bytes of memory and seconds
of processor time. It answers once when the graph is open, then each message with inputs, until the connection ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from txl_runtime.errors import one_line

MOST_ANSWER = 2**27
"""Bytes of an answer."""


class Answer(Struct, frozen=True):
    """How a request ended.

    Attributes:
        error: what ONNX Runtime said; "" where it did what was asked.
        folded: of the first answer, the graph with everything computed that is always the same; empty where it is too
            large.
        outputs: of a run, by name, as `packed` writes them.
    """

    error: str = ""
    folded: bytes = b""
    outputs: dict[str, bytes] = {}


def packed(arrays: Mapping[str, Any]) -> dict[str, bytes]:
    """Arrays as files of NumPy.

    Raises:
        ValueError: one holds objects.
    """
    files = {name: io.BytesIO() for name in arrays}
    for name, array in arrays.items():
        np.save(files[name], array, allow_pickle=False)
    return {name: file.getvalue() for name, file in files.items()}


def unpacked(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Arrays that `packed` wrote.

    Raises:
        ValueError, EOFError: bytes are no array of numbers.
    """
    return {name: np.load(io.BytesIO(data), allow_pickle=False) for name, data in files.items()}


def main(number: str, path: str, memory: str, seconds: str) -> None:
    """Serve until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started it, and who ends it
    connection = Connection(int(number))
    with contextlib.suppress(EOFError, OSError):
        _serve(connection, path, int(memory), int(seconds))
    os._exit(0)


def _serve(connection: Connection, path: str, memory: int, seconds: int) -> None:
    import onnxruntime

    _bound(memory, seconds)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory(prefix="txl-deploy-inspect-") as place:
        folded = Path(place) / "folded.onnx"
        options.optimized_model_filepath = str(folded)
        try:
            session = onnxruntime.InferenceSession(
                path,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=["EliminateDropout"],  # it takes away what was left in training mode, too
            )
        except Exception as error:  # ONNX Runtime raises its own kinds, one per status code
            _send(connection, Answer(error=one_line(error)))
            return
        small = folded.is_file() and folded.stat().st_size < MOST_ANSWER
        _send(connection, Answer(folded=folded.read_bytes() if small else b""))
    names = [value.name for value in session.get_outputs()]
    while True:
        feeds = msgspec.msgpack.decode(connection.recv_bytes(), type=dict[str, bytes])
        _send(connection, _run(session, names, unpacked(feeds)))


def _send(connection: Connection, answer: Answer) -> None:
    connection.send_bytes(msgspec.msgpack.encode(answer))


def _run(session: Any, names: list[str], feeds: dict[str, Any]) -> Answer:
    try:
        found = session.run(names, feeds)
        arrays = {name: array for name, array in zip(names, found, strict=True) if isinstance(array, np.ndarray)}
        if (size := sum(array.nbytes for array in arrays.values())) > MOST_ANSWER:
            return Answer(error=f"returned {size} bytes, expected at most {MOST_ANSWER}")
        return Answer(outputs=packed(arrays))
    except Exception as error:  # as above; NumPy's for texts and other objects
        return Answer(error=one_line(error))


def _bound(memory: int, seconds: int) -> None:
    """Allow so many bytes of address space beside those that are held, and seconds of processor time."""
    if sys.platform == "linux":
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + memory,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
