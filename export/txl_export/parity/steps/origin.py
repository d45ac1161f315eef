"""Which operator of a graph is the first to lose a number: its result is infinite or NaN, and what it reads is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx
import onnxruntime
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.host.onnxruntime_cpu import WEIGHTS_FOLDER
from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays


def origin(model: Model, length: int, tensor: str, usual: Arrays, far: Arrays) -> str:
    """The operator, what it computes from, and the inputs that it depends on, in words; "" where nothing is lost.

    Args:
        model: whose graph is run in ONNX Runtime.
        length: L of the segment.
        tensor: the graph's output that is wrong.
        usual, far: arguments by the names of the graph's inputs. What is lost with usual ones as well is no fault.
    """
    for program in model.manifest.programs:
        feeds = [_fed(program, given) for given in (usual, far)]
        if program.segment_length == length and all(feeds):
            break
    else:
        return ""
    nodes, before, lost = _lost(model.bundle, program, feeds)
    behind = _behind(nodes, [tensor])
    for node in nodes:
        if behind & set(node.output) & (lost - before) and not lost & set(node.input):
            read = _behind(nodes, node.input)
            makers = ", ".join(maker.op_type for maker in nodes if set(maker.output) & set(node.input))
            changed = [name for name in far if name in read and not np.array_equal(usual[name], far[name])]
            return f"{node.op_type}{f' (of {makers})' * bool(makers)}, which depends on {', '.join(changed)}"
    return ""


def _fed(program: Program, given: Arrays) -> dict[str, Array]:
    """A program's inputs, sequences repeated up to its batch size; none where the program takes other shapes."""
    found: dict[str, Array] = {}
    for spec in program.inputs:
        values = given.get(spec.name)
        if values is None or values.ndim != len(spec.shape):
            return {}
        missing = [0 if size == "rows" else size - have for size, have in zip(spec.shape, values.shape, strict=True)]
        if min(missing, default=0) < 0 or sum(map(bool, missing)) > 1:
            return {}
        found[spec.name] = np.pad(values, [(0, size) for size in missing], mode="wrap").astype(spec.dtype)
    return found


def _lost(
    bundle: Bundle, program: Program, feeds: Iterable[Arrays]
) -> tuple[Sequence[onnx.NodeProto], set[str], set[str]]:
    """The graph's nodes, and which of its values are infinite or NaN anywhere with each of two feeds."""
    model = onnx.load_model_from_string(bundle.file(program.file).read_bytes())
    names = [name for node in model.graph.node for name in node.output if name]
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.path))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    before, lost = (
        {name for name, values in zip(names, session.run(names, fed), strict=True) if not np.isfinite(values).all()}
        for fed in feeds
    )
    return model.graph.node, before, lost


def _behind(nodes: Sequence[onnx.NodeProto], names: Iterable[str]) -> set[str]:
    """All values that some values are made of, these included."""
    found = set(names)
    for node in reversed(nodes):
        if found & set(node.output):
            found |= set(node.input)
    return found
