"""Which operator of a graph is the first to lose a number: its result is infinite or NaN, and what it reads is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import UsageError
from txl_runtime.host.onnxruntime_cpu import WEIGHTS_FOLDER
from txl_runtime.model import Model
from txl_runtime.streaming.programs import Programs
from txl_runtime.types import Arrays


def origin(model: Model, length: int, usual: Arrays, far: Arrays) -> str:
    """The operator and what it computes from, in words; "" where nothing is lost.

    Args:
        model: whose graph of that segment length is run in ONNX Runtime.
        length: L.
        usual, far: arguments by the names of the graph's inputs. What is lost with usual ones as well is no fault.
    """
    shapes = tuple(far[state.input].shape if state.input in far else None for state in model.manifest.states)
    try:
        program = Programs(model.manifest, model.manifest.programs).find("rows", length, shapes)
    except UsageError:
        return ""
    graph = onnx.load_model_from_string(model.bundle.file(program.file).read_bytes())
    nodes = list(graph.graph.node)
    names = sorted({name for node in nodes for name in node.output if name})
    del graph.graph.output[:]
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    engine, before, lost = session(model.bundle, graph.SerializeToString()), set[str](), set[str]()
    for given, found in ((usual, before), (far, lost)):
        fed = {spec.name: given[spec.name].astype(spec.dtype) for spec in program.inputs}
        results = zip(names, engine.run(names, fed), strict=True)
        found |= {name for name, values in results if not np.isfinite(values).all()}
    for node in nodes:
        if set(node.output) & (lost - before) and not set(node.input) & lost:
            makers = " and ".join(maker.op_type for maker in nodes if set(maker.output) & set(node.input))
            return f"{node.op_type}{f' of {makers}' if makers else ''}"
    return ""


def session(bundle: Bundle, graph: bytes) -> Any:
    """One of ONNX Runtime on the CPU, for a graph with the bundle's weights."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.path))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
