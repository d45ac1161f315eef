"""ONNX Runtime with a foreign graph, in a process of its own: `python -m txl_export.families.graph.worker`.

Whatever the graph does to the engine happens here: the process may die, and it may not take more memory and processor
time than it was given. Its arguments are the number of a connection, the path of the graph, bytes of memory and seconds
of processor time. It answers once when the graph is open, then each request, until the connection ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from txl_runtime.errors import one_line
from txl_runtime.guard.forms import FORMS

MOST_ANSWER = 2**27
"""Bytes of an answer."""


OPSET = 18
"""To which a folded graph of an older opset is converted: the oldest that a bundle's graphs may have."""
FOLDED, DATA = "folded.onnx", "folded.data"
"""What folding writes: the graph, and beside it its larger tensors."""


class Request(Struct, frozen=True):
    """What is to be done: a run, or to fold a graph.

    Attributes:
        feeds: of a run, inputs by name, as `packed` writes them.
        graph: of folding, the path of the graph; "" for a run.
        place: of folding, the folder that is written into.
    """

    feeds: dict[str, bytes] = {}
    graph: str = ""
    place: str = ""


class Answer(Struct, frozen=True):
    """How a request ended.

    Attributes:
        error: what ONNX Runtime said; "" where it did what was asked.
        outputs: of a run, by name, as `packed` writes them.
    """

    error: str = ""
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
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        _serve(connection, path, int(memory), int(seconds))
    os._exit(0)


def _end_with(connection: Connection) -> None:
    """End as soon as the other end is closed, as it is when whoever started this is killed, whatever runs here."""
    watched = select.poll()
    watched.register(connection.fileno(), 0)  # which tells of the end alone
    watched.poll()
    os._exit(0)


def _serve(connection: Connection, path: str, memory: int, seconds: int) -> None:
    _bound(memory, seconds)
    try:
        session = _session(path)
    except Exception as error:  # ONNX Runtime raises its own kinds, one per status code
        _send(connection, Answer(error=one_line(error)))
        return
    _send(connection, Answer())
    names = [value.name for value in session.get_outputs()]
    while True:
        request = msgspec.msgpack.decode(connection.recv_bytes(), type=Request)
        if request.graph:
            _send(connection, _fold(Path(request.graph), Path(request.place)))
        else:
            _send(connection, _run(session, names, unpacked(request.feeds)))


def _session(path: str, optimised: Path | None = None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", DATA)
    return onnxruntime.InferenceSession(
        path,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["EliminateDropout"],  # it takes away what was left in training mode, too
    )


def _fold(path: Path, place: Path) -> Answer:
    """Write the graph with everything computed that is always the same, and without an If that always goes one way.

    onnxscript resolves an If that holds others, which ONNX Runtime stumbles over; ONNX Runtime follows sizes further.
    """
    import onnx
    import onnx.inliner
    import onnx.version_converter
    import onnx_ir as ir

    between, folded = place / "between.onnx", place / FOLDED
    try:
        model = ir.load(path)
        if any(node.op_type == "If" for node in model.graph):
            from onnxscript import optimizer

            with contextlib.suppress(Exception):  # then ONNX Runtime alone has to do
                optimizer.fold_constants(model)
        ir.save(model, between, external_data="between.data")
        _session(str(between), folded)
        graph = onnx.load(folded, load_external_data=False)
        if next((entry.version for entry in graph.opset_import if entry.domain == ""), OPSET) < OPSET:
            graph = onnx.version_converter.convert_version(graph, OPSET)
        other = {(node.domain, node.op_type) for node in graph.graph.node if node.op_type not in FORMS[""]}
        if other:  # what the standard defines by other operators is taken apart
            graph = onnx.inliner.inline_selected_functions(graph, sorted(other), inline_schema_functions=True)
        folded.write_bytes(graph.SerializeToString())
    except Exception as error:  # ONNX and ONNX Runtime raise many kinds
        return Answer(error=one_line(error))
    return Answer()


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
