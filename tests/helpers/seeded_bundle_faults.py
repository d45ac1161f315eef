"""Faults that a bundle could have, each put into a copy: graphs are edited, weights changed, files sealed again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.reading import MANIFEST, WEIGHTS
from txl_runtime.bundle.weight_header import read_header

Fault = Callable[[Path], None]
"""Changes a bundle's folder."""
NUMPY = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "U8": np.uint8}


def seal(folder: Path) -> None:
    """Write the sizes and hashes of the files as they now are into the manifest."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def edit_graphs(folder: Path, output: str, change: Callable[[onnx.GraphProto], None], files: str = "*.onnx") -> None:
    """Change the graphs that have an output of that name."""
    edited = []
    for path in folder.glob(files):
        model = onnx.load(path, load_external_data=False)
        if output in {value.name for value in model.graph.output}:
            change(model.graph)
            path.write_bytes(model.SerializeToString())
            edited.append(path)
    assert edited
    seal(folder)


def change_weight(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change one tensor of the weight file, where it lies."""
    stored = read_header(folder / WEIGHTS)[name]
    data = bytearray((folder / WEIGHTS).read_bytes())
    kind = np.dtype(NUMPY[stored.dtype])
    values = np.frombuffer(data, kind, stored.length // kind.itemsize, stored.offset).reshape(stored.shape)
    data[stored.offset : stored.offset + stored.length] = change(values).astype(kind).tobytes()
    (folder / WEIGHTS).write_bytes(data)
    seal(folder)


def scale_weight(folder: Path, name: str, factor: float) -> None:
    """Multiply one tensor of the weight file."""
    change_weight(folder, name, lambda values: values * values.dtype.type(factor))


def set_aside(graph: onnx.GraphProto, name: str) -> str:
    """Call an output by another name, within the graph too: a ring is attended to as it is written."""
    before = f"{name}.before"
    for node in graph.node:
        node.output[:] = [before if output == name else output for output in node.output]
        node.input[:] = [before if given == name else given for given in node.input]
    return before


def replace_output(graph: onnx.GraphProto, name: str, operator: str, *more: str) -> None:
    """Let the output `name` be `operator` of what it was."""
    graph.node.append(helper.make_node(operator, [set_aside(graph, name), *more], [name]))


def dtype_of(graph: onnx.GraphProto, name: str) -> np.dtype:
    """Return an output's dtype."""
    (kind,) = (one.type.tensor_type.elem_type for one in graph.output if one.name == name)
    return helper.tensor_dtype_to_np_dtype(kind)


def rank_of(graph: onnx.GraphProto, name: str) -> int:
    """Return an output's number of axes."""
    (shape,) = (one.type.tensor_type.shape for one in graph.output if one.name == name)
    return len(shape.dim)


def constant(graph: onnx.GraphProto, name: str, values: object, kind: object) -> str:
    """Add a constant."""
    graph.initializer.append(numpy_helper.from_array(np.array(values, kind), name))
    return name


# --- of outputs and states, whatever the model -----------------------------------------------------------------------


def with_constant(output: str, operator: str, value: object, files: str = "*.onnx") -> Fault:
    """An output or state is `operator` of itself and a constant."""

    def change(graph: onnx.GraphProto) -> None:
        replace_output(graph, output, operator, constant(graph, "fault", value, dtype_of(graph, output)))

    return partial(_edit, output, change, files)


def _edit(output: str, change: Callable[[onnx.GraphProto], None], files: str, folder: Path) -> None:
    edit_graphs(folder, output, change, files)


def swapped(one: str, other: str, files: str = "*.onnx") -> Fault:
    """Two outputs or states take each other's place."""

    def change(graph: onnx.GraphProto) -> None:
        aside = [set_aside(graph, name) for name in (one, other)]
        for name, before in zip((one, other), reversed(aside), strict=True):
            graph.node.append(helper.make_node("Identity", [before], [name]))

    return partial(_edit, one, change, files)


def stale(output: str, given: str, files: str = "*.onnx") -> Fault:
    """A state is what it was before the step."""

    def change(graph: onnx.GraphProto) -> None:
        set_aside(graph, output)
        graph.node.append(helper.make_node("Identity", [given], [output]))

    return partial(_edit, output, change, files)


def leaking(output: str, amount: float, axis: int = 0, files: str = "*.onnx") -> Fault:
    """A little of the next sequence is added to every sequence."""

    def change(graph: onnx.GraphProto) -> None:
        before, kind = set_aside(graph, output), dtype_of(graph, output)
        for name, value in (("zero", [0]), ("one", [1]), ("end", [2**31 - 1]), ("axis", [axis])):
            constant(graph, f"leak {name}", value, np.int64)
        constant(graph, "leak amount", amount, kind)
        for operator, inputs, name in (
            ("Slice", [before, "leak one", "leak end", "leak axis"], "leak others"),
            ("Slice", [before, "leak zero", "leak one", "leak axis"], "leak first"),
        ):
            graph.node.append(helper.make_node(operator, inputs, [name]))
        graph.node.append(helper.make_node("Concat", ["leak others", "leak first"], ["leak rolled"], axis=axis))
        graph.node.append(helper.make_node("Mul", ["leak rolled", "leak amount"], ["leaked"]))
        graph.node.append(helper.make_node("Add", [before, "leaked"], [output]))

    return partial(_edit, output, change, files)


def idle_moves(output: str, amount: float, axis: int = 0, files: str = "*.onnx") -> Fault:
    """A state of sequences that are idle moves."""

    def change(graph: onnx.GraphProto) -> None:
        before, kind = set_aside(graph, output), helper.np_dtype_to_tensor_dtype(dtype_of(graph, output))
        shape = [-1 if place == axis else 1 for place in range(rank_of(graph, output))]
        constant(graph, "idle none", 0, np.int32)
        constant(graph, "idle shape", shape, np.int64)
        constant(graph, "idle amount", amount, dtype_of(graph, output))
        for operator, inputs, name, more in (
            ("Equal", ["valid", "idle none"], "idle", {}),
            ("Cast", ["idle"], "idle number", {"to": kind}),
            ("Reshape", ["idle number", "idle shape"], "idle each", {}),
            ("Mul", ["idle each", "idle amount"], "idle moved", {}),
            ("Add", [before, "idle moved"], output, {}),
        ):
            graph.node.append(helper.make_node(operator, inputs, [name], **more))

    return partial(_edit, output, change, files)


def input_as(given: str, output: str, steps: Sequence[tuple[str, int]], files: str = "*.onnx") -> Fault:
    """A whole-numbered input is read as some operators with constants make it, one after the other."""

    def change(graph: onnx.GraphProto) -> None:
        names = [given, *(f"{given} after {number}" for number in range(len(steps)))]
        for node in graph.node:
            node.input[:] = [names[-1] if name == given else name for name in node.input]
        made = []
        for number, (operator, value) in enumerate(steps):
            value_name = constant(graph, f"{given} constant {number}", value, np.int32)
            made.append(helper.make_node(operator, [names[number], value_name], [names[number + 1]]))
        nodes = [*made, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)

    def put(folder: Path) -> None:
        for path in folder.glob(files):
            model = onnx.load(path, load_external_data=False)
            names = {value.name for value in model.graph.output}
            if output in names and given in {value.name for value in model.graph.input}:
                change(model.graph)
                path.write_bytes(model.SerializeToString())
        seal(folder)

    return put


# --- of a Transformer-XL with keys and values of two layers ----------------------------------------------------------


def forget_oldest(graph: onnx.GraphProto) -> None:
    """Zero the oldest row of a state, of M = 7 and a ring of 11 slots; within a window of M keys no query sees it."""
    name = "new_memory.layers.01.key"
    if "head" not in {value.name for value in graph.input}:
        mask = np.ones((1, 1, 7, 1), np.float32)
        mask[:, :, 0] = 0
        graph.initializer.append(numpy_helper.from_array(mask, "mask"))
        replace_output(graph, name, "Mul", "mask")
        return
    constants = {
        "seven": np.array(7, np.int32),
        "eleven": np.array(11, np.int32),
        "slot": np.arange(15, dtype=np.int32).reshape(1, 1, 15, 1),
        "per stream": np.array([-1, 1, 1, 1], np.int64),
        "nothing": np.zeros((), np.float32),
    }
    graph.initializer.extend(numpy_helper.from_array(array, own) for own, array in constants.items())
    before = set_aside(graph, name)
    for operator, inputs, output in (
        ("Add", ["head", "valid"], "next"),
        ("Sub", ["next", "seven"], "behind"),
        ("Mod", ["behind", "eleven"], "oldest"),
        ("Reshape", ["oldest", "per stream"], "oldest of each"),
        ("Equal", ["slot", "oldest of each"], "forgotten"),
        ("Where", ["forgotten", "nothing", before], name),
    ):
        graph.node.append(helper.make_node(operator, inputs, [output]))


def transformer_xl_faults(vocab_size: int, small: float, quantised: bool = False) -> dict[str, Fault]:
    """By title, of a bundle with the layers 00 and 01, keys and values, and B of more than 1.

    Args:
        vocab_size: V.
        small: what is much in this precision.
        quantised: whether matrices are codes, so that they are not scaled.
    """
    key, value = "new_memory.layers.00.key", "new_memory.layers.01.value"
    column = np.zeros(vocab_size)
    column[7] = 4 * small
    pair = np.zeros(vocab_size)
    pair[[3, 5]] = 8 * small, -8 * small
    first = [("Sub", 1), ("Max", 0)]
    faults = {
        "keys of two layers swapped": swapped(key, "new_memory.layers.01.key"),
        "keys and values of a layer swapped": swapped(key, "new_memory.layers.00.value"),
        "keys and values swapped in the ring alone": swapped(key, "new_memory.layers.00.value", "hidden-ring.onnx"),
        "a stale state": stale(value, "memory.layers.01.value"),
        "a stale state in the rolled form alone": stale(value, "memory.layers.01.value", "logprobs-*.onnx"),
        "one wrong column": with_constant("logprobs", "Add", column),
        "two columns wrong against each other": with_constant("logprobs", "Add", pair),
        "log-probabilities not normalised": with_constant("logprobs", "Add", 20 * small),
        "log-probabilities scaled": with_constant("logprobs", "Mul", 1 + 10 * small),
        "NaN in log-probabilities": with_constant("logprobs", "Add", np.nan),
        "NaN in the memory": with_constant(value, "Add", np.nan),
        "the memory scaled": with_constant(value, "Mul", 1 + 10 * small),
        "the memory drifts": with_constant(value, "Add", small / 10),
        "the memory drifts in the rolled form alone": with_constant(value, "Add", small / 10, "logprobs-*.onnx"),
        "a neighbour leaks into the memory": leaking(value, small),
        "a neighbour leaks a last digit": leaking(value, small / 100),
        "idle rows move": idle_moves(value, small),
        "idle rows move in the rolled form alone": idle_moves(value, small, files="logprobs-*.onnx"),
        "the memory is one row shorter": input_as("fill", value, first),
        "one row too many is seen": input_as("fill", value, [("Add", 1), ("Min", 7)]),
        "tokens are off by one": input_as("tokens", value, [("Add", 1), ("Min", vocab_size - 1)]),
        "a segment counts one row less": input_as("valid", value, first),
        "a segment counts whole": input_as("valid", value, [("Min", 1), ("Mul", 4)]),
        "positions off by one": _positions_off_by_one,
    }
    if not quantised:
        for name in ("layers.01.attention.query_key_value.weight", "layers.00.feed_forward.inner.weight"):
            faults[f"{name} is 1 + {50 * small:g} times as large"] = partial(_scaled, name, 1 + 50 * small)
    return faults


def _scaled(name: str, factor: float, folder: Path) -> None:
    scale_weight(folder, name, factor)


def _positions_off_by_one(folder: Path) -> None:
    for name in read_header(folder / WEIGHTS):
        if ".position.table." in name:
            change_weight(folder, name, lambda values: np.roll(values, 1, axis=-1))


# --- of a step of one's own ------------------------------------------------------------------------------------------


def step_faults(outputs: Sequence[str], states: Sequence[tuple[str, str, int]], small: float) -> dict[str, Fault]:
    """By title, of a bundle with these float outputs, and states as output, input and axis of sequences."""
    faults: dict[str, Fault] = {}
    for name in outputs:
        faults[f"{name} is off"] = with_constant(name, "Add", 20 * small)
        faults[f"{name} is scaled"] = with_constant(name, "Mul", 1 + 100 * small)
        faults[f"{name} is NaN"] = with_constant(name, "Add", np.nan)
        faults[f"{name} is bounded where inputs are large"] = with_constant(name, "Min", 30.0)
    for name, given, axis in states:
        faults[f"{name} is off"] = with_constant(name, "Add", 20 * small)
        faults[f"{name} drifts"] = with_constant(name, "Mul", 1 + small / 20)
        faults[f"{name} is stale"] = stale(name, given)
        faults[f"{name} is NaN"] = with_constant(name, "Add", np.nan)
        faults[f"a neighbour leaks into {name}"] = leaking(name, small / 100, axis)
    return faults
