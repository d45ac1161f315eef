"""Runs ONNX Runtime on an ONNX graph in a bounded process: the program that `running.Helper` starts.

A graph that crashes the engine ends only this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from txl_runtime.errors import one_line
from txl_runtime.guard.forms import FORMS

MOST_ANSWER = 2**27
"""Maximum number of bytes of the outputs of a run, 128 MiB."""
MOST_PARTS = 2**16
"""Maximum number of nodes, initializers and functions of a model, including nested graphs."""
OPSET = 18
"""Opset to which folded graphs of older opsets are converted: the oldest that a bundle's graphs may have."""
WHOLE = frozenset(("LinearAttention", "CausalConvWithState"))
"""Operators that `graphs.linear_attention` rewrites. Folding must not see them: ONNX Runtime 1.32 turns such an
operator into a Scan."""
FOLDED = "folded.onnx"
"""Name of the file to which ONNX Runtime writes a folded graph."""
Numbers = tuple[str, tuple[int, ...], bytes]
"""An array: NumPy's dtype string, its shape, its bytes."""
OPENED: dict[int, Any] = {}
"""The sessions of ONNX Runtime that are open, by number."""


class Request(Struct, frozen=True):
    """A request to open a graph, fold a graph, run a session, or close a session.

    Attributes:
        graph: the bytes of a graph to open or fold; b"" for a request about a session.
        folder: the folder with the graph's larger tensors; "" if the bytes contain them.
        place: an empty folder, for folding.
        session: the session's number.
        feeds: inputs by name, in the form of `packed`; None closes the session.
    """

    graph: bytes = b""
    folder: str = ""
    place: str = ""
    session: int = 0
    feeds: dict[str, Numbers] | None = None


class Answer(Struct):
    """The result of a request.

    Attributes:
        error: ONNX Runtime's message; "" for success.
        session: the number of the session that was opened.
        graph: the bytes of the folded graph; larger tensors may still be in the folder.
        outputs: the outputs of a run by name, in the form of `packed`.
        seconds: processor time that the process has taken so far.
    """

    error: str = ""
    session: int = 0
    graph: bytes = b""
    outputs: dict[str, Numbers] = {}
    seconds: float = 0.0


def graphs(*given: Any) -> Iterator[Any]:
    """Yield graphs and functions of onnx, and all graphs nested in their nodes."""
    for graph in given:
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                yield from graphs(*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)


def parts(model: Any) -> int:
    """Return the number of nodes, initializers and functions in a model; counting stops above `MOST_PARTS`."""
    count = len(model.functions)
    for graph in graphs(model.graph, *model.functions):
        count += len(graph.node) + len(getattr(graph, "initializer", ()))
        if count > MOST_PARTS:
            break
    return count


def packed(arrays: Mapping[str, Any]) -> dict[str, Numbers]:
    """Return arrays in the form in which they are sent.

    For example, a float32 array [2, 8] is sent as ("<f4", (2, 8), 64 bytes).

    Raises:
        ValueError: an array holds no numbers.
    """
    numbers = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: (_kind(one.dtype).str, one.shape, one.tobytes()) for name, one in numbers.items()}


def unpacked(arrays: Mapping[str, Numbers]) -> dict[str, Any]:
    """Return the arrays that `packed` encoded.

    For example, ("<f4", (2, 8), 64 bytes) becomes a float32 array [2, 8].

    Raises:
        ValueError, TypeError: the bytes are no array of numbers.
    """
    sent = arrays.items()
    return {name: np.frombuffer(data, _kind(kind)).reshape(shape).copy() for name, (kind, shape, data) in sent}


def _kind(dtype: Any) -> np.dtype[Any]:
    kind: np.dtype[Any] = np.dtype(dtype)
    if kind.kind not in "biufc":
        raise ValueError(f"{kind}, expected numbers")
    return kind


def answer(request: bytes) -> bytes:
    """Answer one request of `sandbox.process.Bounded`: a `Request` in MessagePack gives an `Answer`."""
    asked = msgspec.msgpack.decode(request, type=Request)
    try:
        reply = _answer(asked)
    except Exception as error:  # ONNX Runtime has an error type per status code; onnx and NumPy raise others
        reply = Answer(error=one_line(error))
    reply.seconds = time.process_time()
    return msgspec.msgpack.encode(reply)


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
        os.chdir(folder)  # ONNX Runtime looks for external tensors in the current folder
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
        # EliminateDropout would also remove Dropouts in training mode, which change values
        disabled_optimizers=["EliminateDropout"],
    )
    # On x86 without VNNI, sums of uint8 by int8 are exact only with "1". A QLinearMatMul of int8 by int8, whose sums
    # are always exact, opens only with "0".
    options.add_session_config_entry("session.x64quantprecision", "1")
    with contextlib.suppress(Exception):
        return opened()
    options.add_session_config_entry("session.x64quantprecision", "0")
    try:
        return opened()
    except Exception as error:  # ONNX Runtime has an error type per status code, see `answer`
        raise ValueError(_too_new(str(error), onnxruntime.__version__) or one_line(error)) from None


def _too_new(declared: str, installed: str) -> str:
    """Return a plain message for ONNX Runtime's error about a graph that is too new for it; "" for other errors."""
    opset = re.search(r"Opset (\d+) is under development.* ai\.onnx is till opset (\d+)", declared)
    version = re.search(r"model IR version: (\d+), max supported IR version: (\d+)", declared)
    if not (newer := opset or version):
        return ""
    return (
        f"{'opset' if opset else 'format version'} {newer[1]}, expected at most {newer[2]}, which is what the installed"
        f" ONNX Runtime {installed} opens; install a newer one, such as 1.32 for opset 27, or take opset 18 … 24"
    )


def _fold(data: bytes, place: Path, folder: str) -> Answer:
    """Compute a graph's constants, and replace an If whose condition is constant by the branch that it takes.

    onnxscript resolves nested Ifs, on which ONNX Runtime fails; ONNX Runtime then follows sizes further than
    onnxscript.
    """
    import onnx
    import onnx.inliner
    import onnx.version_converter
    import onnx_ir as ir

    graph = onnx.load_model_from_string(data)
    if any(node.op_type == "If" for node in graph.graph.node):
        from onnxscript import optimizer

        with contextlib.suppress(Exception):  # if this fails, only ONNX Runtime folds
            model = ir.from_proto(graph)
            ir.external_data.set_base_dir(model.graph, folder)
            optimizer.fold_constants(model)
            data = ir.to_proto(model).SerializeToString()
            graph = onnx.load_model_from_string(data)
    if graph.functions:  # inline bodies of ONNX Runtime's own operators, which a bundle lacks
        whole = [("com.microsoft", name) for name in sorted(WHOLE)]
        graph = onnx.inliner.inline_selected_functions(graph, whole, exclude=True)
    cut = any(node.op_type in WHOLE for node in graph.graph.node)
    mend = _cut(graph) if cut else None
    _session(graph.SerializeToString(), folder, place / FOLDED)
    graph = onnx.load(place / FOLDED, load_external_data=False)
    if mend is not None:
        mend(graph.graph)
        model = ir.from_proto(graph)
        model.graph.sort()
        graph = ir.to_proto(model)
    if next((entry.version for entry in graph.opset_import if entry.domain == ""), OPSET) < OPSET:
        graph = onnx.version_converter.convert_version(graph, OPSET)
    known = FORMS[""].keys() | WHOLE
    other = {(node.domain, node.op_type) for node in graph.graph.node if node.op_type not in known}
    if other:  # replace operators that the standard defines by simpler operators
        graph = onnx.inliner.inline_selected_functions(graph, sorted(other), inline_schema_functions=True)
    if (count := parts(graph)) > MOST_PARTS:
        return Answer(error=f"becomes {count} nodes and tensors, expected at most {MOST_PARTS}")
    return Answer(graph=graph.SerializeToString())


def _cut(model: Any) -> Callable[[Any], None]:
    """Take the nodes of `WHOLE` out of a graph, in place, so that folding does not change them.

    Their results become inputs of the graph, and their inputs become outputs. A node whose results have unknown types
    stays.

    Returns:
        A function that puts the nodes back into the folded graph, behind all its nodes.
    """
    import onnx

    graph, inferred = model.graph, onnx.ModelProto()
    inputs, outputs = [*graph.input], [*graph.output]
    inferred.CopyFrom(model)
    for node in inferred.graph.node:
        # ONNX Runtime's versions of these operators return the same types
        node.domain = "" if node.op_type in WHOLE else node.domain
    for entry in inferred.opset_import:
        entry.version = entry.version if entry.domain else max(entry.version, 27)
    inferred = onnx.shape_inference.infer_shapes(inferred, data_prop=True).graph
    types = {value.name: value for value in (*inferred.value_info, *inferred.output)}
    whole = [node for node in graph.node if node.op_type in WHOLE and {*node.output} <= {"", *types}]
    for node in whole:
        graph.node.remove(node)
    returned = {name: types[name] for node in whole for name in node.output if name}
    read = {name for node in whole for name in node.input}
    results = {name for node in graph.node for name in node.output} & read
    tensors = [tensor for tensor in graph.initializer if tensor.name in read]
    left = [value for value in outputs if value.name not in returned]
    graph.input.extend(returned.values())
    del graph.output[:]
    graph.output.extend(left)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(results - {value.name for value in left}))

    def mend(graph: Any) -> None:
        there = {tensor.name for tensor in graph.initializer}
        graph.initializer.extend(tensor for tensor in tensors if tensor.name not in there)
        graph.node.extend(whole)
        for ends, own in ((graph.input, inputs), (graph.output, outputs)):
            del ends[:]
            ends.extend(own)

    return mend


def _run(session: Any, feeds: dict[str, Any]) -> Answer:
    names = [value.name for value in session.get_outputs()]
    results = zip(names, session.run(names, feeds), strict=True)
    arrays = {name: array for name, array in results if isinstance(array, np.ndarray)}
    if (size := sum(array.nbytes for array in arrays.values())) > MOST_ANSWER:
        return Answer(error=f"returned {size} bytes, expected at most {MOST_ANSWER}")
    return Answer(outputs=packed(arrays))
