"""Which operator of a graph is the first to lose a number: its result is infinite or NaN, and what it reads is not."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from txl_runtime.bundle.tables import Program
from txl_runtime.host.onnxruntime_cpu import WEIGHTS_FOLDER
from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays


def origin(model: Model, length: int, usual: Arrays, far: Arrays) -> str:
    """The operator and what it computes from, in words; "" where nothing is lost.

    Args:
        model: whose graph of that segment length is run in ONNX Runtime.
        length: L.
        usual, far: arguments by the names of the graph's inputs. What is lost with usual ones as well is no fault.
    """
    for program in model.manifest.programs:
        feeds = [_fed(program, given) for given in (usual, far)]
        if program.segment_length == length and all(feeds):
            break
    else:
        return ""
    bundle = model.bundle
    graph = onnx.load_model_from_string(bundle.file(program.file).read_bytes())
    nodes = list(graph.graph.node)
    names = sorted({name for node in nodes for name in node.output if name})
    del graph.graph.output[:]
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.path))
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    before, lost = (
        {name for name, values in zip(names, session.run(names, fed), strict=True) if not np.isfinite(values).all()}
        for fed in feeds
    )
    for node in nodes:
        if set(node.output) & (lost - before) and not set(node.input) & lost:
            makers = " and ".join(maker.op_type for maker in nodes if set(maker.output) & set(node.input))
            return f"{node.op_type}{f' of {makers}' if makers else ''}"
    return ""


def _fed(program: Program, given: Arrays) -> dict[str, Array]:
    """A program's inputs, sequences repeated up to its batch size; none where it takes other shapes."""
    found: dict[str, Array] = {}
    for spec in program.inputs:
        values = given.get(spec.name, np.zeros(()))
        sizes = [have if size == "rows" else size for size, have in zip(spec.shape, values.shape, strict=False)]
        missing = [int(size) - have for size, have in zip(sizes, values.shape, strict=True)]
        if len(sizes) != len(spec.shape) or min(missing, default=0) < 0 or sum(map(bool, missing)) > 1:
            return {}
        found[spec.name] = np.pad(values, [(0, size) for size in missing], mode="wrap").astype(spec.dtype)
    return found
