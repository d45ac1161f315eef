"""ONNX Runtime with a foreign graph, in a bounded process: the program that `running.Runner` starts.

Whatever the graph does to the engine happens here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from txl_runtime.errors import one_line
from txl_runtime.guard.forms import FORMS

MOST_ANSWER = 2**27
"""Bytes of the outputs of a run."""
MOST_PARTS = 2**16
"""Nodes, initializers and functions of a model, with those of nested graphs."""
OPSET = 18
"""To which a folded graph of an older opset is converted: the oldest that a bundle's graphs may have."""
FOLDED = "folded.onnx"
"""The file that ONNX Runtime writes where it folds."""
Numbers = tuple[str, tuple[int, ...], bytes]
"""An array: its type as NumPy writes it, its shape, its bytes."""
OPENED: dict[int, Any] = {}
"""Sessions by number."""


class Request(Struct, frozen=True):
    """A request: to open a graph, to fold one, to run the one that is open as a session, or to close that.

    Attributes:
        graph: its bytes, to open or fold; b"" for a session.
        folder: where its larger tensors lie; "" where they are in the bytes.
        place: of folding, an empty folder.
        session: its number.
        feeds: inputs by name, as `packed` writes them; None to close the session.
    """

    graph: bytes = b""
    folder: str = ""
    place: str = ""
    session: int = 0
    feeds: dict[str, Numbers] | None = None


class Answer(Struct):
    """The result of a request.

    Attributes:
        error: what ONNX Runtime said; "" where it did what was asked.
        session: number of the session that was opened.
        graph: what was folded; its larger tensors may still lie in the folder.
        outputs: of a run, by name, as `packed` writes them.
        seconds: of processor time that the process took so far.
    """

    error: str = ""
    session: int = 0
    graph: bytes = b""
    outputs: dict[str, Numbers] = {}
    seconds: float = 0.0


def graphs(*given: Any) -> Iterator[Any]:
    """Graphs and functions of onnx, and the graphs that their nodes hold."""
    for graph in given:
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                yield from graphs(*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)


def parts(model: Any) -> int:
    """The number of nodes, initializers and functions in a model of onnx, counted until it passes `MOST_PARTS`."""
    count = len(model.functions)
    for graph in graphs(model.graph, *model.functions):
        count += len(graph.node) + len(getattr(graph, "initializer", ()))
        if count > MOST_PARTS:
            break
    return count


def packed(arrays: Mapping[str, Any]) -> dict[str, Numbers]:
    """Arrays as they are sent.

    Raises:
        ValueError: one holds no numbers.
    """
    given = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: (_kind(one.dtype).str, one.shape, one.tobytes()) for name, one in given.items()}


def unpacked(arrays: Mapping[str, Numbers]) -> dict[str, Any]:
    """Arrays that `packed` wrote.

    Raises:
        ValueError, TypeError: bytes are no array of numbers.
    """
    sent = arrays.items()
    return {name: np.frombuffer(data, _kind(kind)).reshape(shape).copy() for name, (kind, shape, data) in sent}


def _kind(dtype: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(dtype)
    if found.kind not in "biufc":
        raise ValueError(f"{found}, expected numbers")
    return found


def answer(request: bytes) -> bytes:
    """Do one request of `sandbox.process.Bounded`: a `Request` as MessagePack gives an `Answer`."""
    asked = msgspec.msgpack.decode(request, type=Request)
    try:
        found = _answer(asked)
    except Exception as error:  # ONNX Runtime raises its own kinds, one per status code; ONNX and NumPy theirs
        found = Answer(error=one_line(error))
    found.seconds = time.process_time()
    return msgspec.msgpack.encode(found)


def _answer(asked: Request) -> Answer:
    if asked.graph and asked.place:
        return _fold(asked.graph, Path(asked.place), asked.folder)
    if asked.graph:
        number = max(OPENED, default=0) + 1
        OPENED[number] = _session(asked.graph, asked.folder)
        return Answer(session=number)
    if asked.feeds is None:
        del OPENED[asked.session]
        return Answer()
    return _run(OPENED[asked.session], unpacked(asked.feeds))


def _session(graph: bytes, folder: str, optimised: Path | None = None) -> Any:
    import onnxruntime

    if folder:
        os.chdir(folder)  # where ONNX Runtime looks for the tensors of a graph that is no file
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if optimised is not None:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(optimised)
    opened = partial(
        onnxruntime.InferenceSession,
        graph,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["EliminateDropout"],  # it takes away what was left in training mode, too
    )
    # On x86 without VNNI sums of uint8 by int8 are exact only where that is asked for, and a QLinearMatMul of int8 by
    # int8, whose sums are exact anyway, opens only where it is not.
    options.add_session_config_entry("session.x64quantprecision", "1")
    with contextlib.suppress(Exception):
        return opened()
    options.add_session_config_entry("session.x64quantprecision", "0")
    return opened()


def _fold(data: bytes, place: Path, folder: str) -> Answer:
    """Compute what is always the same, and take away an If that always goes one way.

    onnxscript resolves an If that holds others, which ONNX Runtime stumbles over; ONNX Runtime follows sizes further.
    """
    import onnx
    import onnx.inliner
    import onnx.version_converter
    import onnx_ir as ir

    graph = onnx.load_model_from_string(data)
    if any(node.op_type == "If" for node in graph.graph.node):
        from onnxscript import optimizer

        with contextlib.suppress(Exception):  # then ONNX Runtime alone has to do
            model = ir.from_proto(graph)
            ir.external_data.set_base_dir(model.graph, folder)
            optimizer.fold_constants(model)
            data = ir.to_proto(model).SerializeToString()
    _session(data, folder, place / FOLDED)
    graph = onnx.load(place / FOLDED, load_external_data=False)
    if next((entry.version for entry in graph.opset_import if entry.domain == ""), OPSET) < OPSET:
        graph = onnx.version_converter.convert_version(graph, OPSET)
    other = {(node.domain, node.op_type) for node in graph.graph.node if node.op_type not in FORMS[""]}
    if other:  # what the standard defines by other operators is taken apart
        graph = onnx.inliner.inline_selected_functions(graph, sorted(other), inline_schema_functions=True)
    if (count := parts(graph)) > MOST_PARTS:
        return Answer(error=f"becomes {count} nodes and tensors, expected at most {MOST_PARTS}")
    return Answer(graph=graph.SerializeToString())


def _run(session: Any, feeds: dict[str, Any]) -> Answer:
    names = [value.name for value in session.get_outputs()]
    found = zip(names, session.run(names, feeds), strict=True)
    arrays = {name: array for name, array in found if isinstance(array, np.ndarray)}
    if (size := sum(array.nbytes for array in arrays.values())) > MOST_ANSWER:
        return Answer(error=f"returned {size} bytes, expected at most {MOST_ANSWER}")
    return Answer(outputs=packed(arrays))
