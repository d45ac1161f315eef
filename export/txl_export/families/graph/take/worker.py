"""ONNX Runtime with a foreign graph, in a bounded process: the program that `running.Runner` starts.

Whatever the graph does to the engine happens here.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
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
OPENED: dict[str, Any] = {}
"""The one session that this process has."""


class Request(Struct, frozen=True):
    """A request: to open a graph, to run the one that is open, or to fold one.

    Attributes:
        opened: the path of the graph to open; "" for a run or a folding.
        feeds: of a run, inputs by name, as `packed` writes them.
        graph: of folding, the path of the graph; "" for a run.
        place: of folding, the folder that is written into.
    """

    opened: str = ""
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


def answer(request: bytes) -> bytes:
    """Do one request of `sandbox.process.Bounded`: a `Request` as MessagePack gives an `Answer`."""
    asked = msgspec.msgpack.decode(request, type=Request)
    try:
        if asked.opened:
            OPENED["session"] = _session(asked.opened)
            found = Answer()
        elif asked.graph:
            found = _fold(Path(asked.graph), Path(asked.place))
        else:
            found = _run(OPENED["session"], unpacked(asked.feeds))
    except Exception as error:  # ONNX Runtime raises its own kinds, one per status code; ONNX and NumPy theirs
        found = Answer(error=one_line(error))
    return msgspec.msgpack.encode(found)


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
    return Answer()


def _run(session: Any, feeds: dict[str, Any]) -> Answer:
    names = [value.name for value in session.get_outputs()]
    found = zip(names, session.run(names, feeds), strict=True)
    arrays = {name: array for name, array in found if isinstance(array, np.ndarray)}
    if (size := sum(array.nbytes for array in arrays.values())) > MOST_ANSWER:
        return Answer(error=f"returned {size} bytes, expected at most {MOST_ANSWER}")
    return Answer(outputs=packed(arrays))
