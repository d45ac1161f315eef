"""Writes the files of the shared corpus of bad bundles that no short change can say: `python -m fuzz.bad_bundles`.

They are the same, byte for byte, each time they are written: a test holds that. What packs `bomb.npz` differs from
machine to machine, so that file is kept as it is. The cases are in `index.json`.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from conformance.spoiling import CORPUS
from fuzz.edits import parsed, written

STEP = CORPUS / "bases" / "step"
WEIGHTS, GRAPH, VECTORS = "weights.safetensors", "step-1.onnx", "selftest.npz"
MANY_AXES = [2, *[1] * 14, 2]


def write(folder: Path) -> None:
    """All of them."""
    folder.mkdir(parents=True, exist_ok=True)
    hostile = {f"{name}.onnx": data for name, data in {**graphs(), **fitting()}.items()}
    for name, data in {**hostile, **archives(), **weights()}.items():
        (folder / name).write_bytes(data)


# --- graphs ---------------------------------------------------------------------------------------------------------

FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64


def graphs() -> dict[str, bytes]:
    """One step that fits the manifest, and what is hostile in it, by name."""
    found: dict[str, onnx.ModelProto | bytes] = {"good": _good_graph()}
    values = helper.make_node("MatMul", ["features", "weight"], ["product"])

    def add(name: str, *nodes: onnx.NodeProto, tensors: Any = (), **more: Any) -> onnx.ModelProto:
        """`product` plus what the nodes make, `hostile`, is what the step returns."""
        last = helper.make_node("Add", ["product", "hostile"], ["values"])
        model = _graph([values, *nodes, last], [_weight(), *tensors], **more)
        found[name] = model
        return model

    def constant(name: str, data: Any, kind: int = INT64) -> onnx.TensorProto:
        return helper.make_tensor(name, kind, np.shape(data), np.ravel(data))

    def body(inputs: Any, outputs: Any, *nodes: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(list(nodes), "body", inputs, outputs)

    value = helper.make_tensor_value_info
    state = [value("i", INT64, []), value("c", TensorProto.BOOL, []), value("x", FLOAT, [2, 2])]
    same = [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Identity", ["x"], ["x2"])]
    endless = body(state, [value("c2", TensorProto.BOOL, []), value("x2", FLOAT, [2, 2])], *same)
    start = [constant("many", np.int64(2**62)), constant("true", np.True_, TensorProto.BOOL)]
    add("loop", helper.make_node("Loop", ["many", "true", "product"], ["hostile"], body=endless), tensors=start)
    branch = body([], [value("b", FLOAT, [2, 2])], helper.make_node("Identity", ["product"], ["b"]))
    branches = {"then_branch": branch, "else_branch": branch}
    add("if", helper.make_node("If", ["true"], ["hostile"], **branches), tensors=start[1:])
    one = body([value("x", FLOAT, [2])], [value("y", FLOAT, [2])], helper.make_node("Identity", ["x"], ["y"]))
    add("scan", helper.make_node("Scan", ["product"], ["hostile"], body=one, num_scan_inputs=1))

    def large(name: str, node: onnx.NodeProto, *tensors: onnx.TensorProto) -> None:
        reduce = helper.make_node("ReduceMax", ["large"], ["hostile"], keepdims=0)
        add(name, node, reduce, tensors=tensors)

    three = constant("size", [3 << 28])
    large("constant_of_shape", helper.make_node("ConstantOfShape", ["size"], ["large"]), three)
    large("expand", helper.make_node("Expand", ["product", "size"], ["large"]), constant("size", [1 << 28, 2, 2]))
    large("tile", helper.make_node("Tile", ["product", "size"], ["large"]), constant("size", [1 << 15, 1 << 15]))
    limits = [constant("zero", np.float32(0), FLOAT), constant("end", np.float32(2**31), FLOAT)]
    limits += [constant("one", np.float32(1), FLOAT)]
    large("range", helper.make_node("Range", ["zero", "end", "one"], ["large"]), *limits)
    function = helper.make_function("own", "F", ["x"], ["y"], [helper.make_node("Identity", ["x"], ["y"])],
                                    [helper.make_opsetid("", 18)])  # fmt: skip
    own = helper.make_node("F", ["product"], ["hostile"], domain="own")
    add("function", own, domains=["own"]).functions.append(function)
    add("custom_domain", helper.make_node("Gelu", ["product"], ["hostile"], domain="com.other"), domains=["com.other"])
    add("unknown_operator", helper.make_node("Shellcode", ["product"], ["hostile"]))
    add("forbidden_operator", helper.make_node("SequenceMap", ["product"], ["hostile"], body=branch))
    add("subgraph_attribute", helper.make_node("Identity", ["product"], ["hostile"], body=branch))
    for name, location, offset, length, shape in (
        ("external_parent", "../outside.bin", 0, 16, [2, 2]),
        ("external_root", "/etc/hostname", 0, 16, [2, 2]),
        ("external_unlisted", "other.bin", 0, 16, [2, 2]),
        ("external_beyond", WEIGHTS, 3190, 16, [2, 2]),
        ("external_negative", WEIGHTS, -16, 16, [2, 2]),
        ("external_long", WEIGHTS, 120, 3072, [2, 2]),
        ("external_huge", WEIGHTS, 120, 4 << 40, [1 << 20, 1 << 20]),
    ):
        tensor = TensorProto(name="hostile", data_type=FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, text in {"location": location, "offset": str(offset), "length": str(length)}.items():
            tensor.external_data.add(key=key, value=text)
        add(name, tensors=[tensor])
    identity = helper.make_node("Identity", ["product"], ["hostile"])
    add("false_shape", identity).graph.value_info.append(value("hostile", FLOAT, [2, 7]))
    add("huge_shape", identity).graph.value_info.append(value("hostile", FLOAT, [1 << 31, 1 << 31]))
    del add("missing_output", identity).graph.output[-1]
    add("other_dtype", identity).graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    add("surplus_input", identity).graph.input.append(value("more", FLOAT, [1]))
    add("huge_initializer", tensors=[TensorProto(name="hostile", data_type=FLOAT, dims=[1 << 20, 1 << 20])])
    short = TensorProto(name="hostile", data_type=FLOAT, dims=[2, 2], raw_data=b"\0" * 4)
    add("short_initializer", tensors=[short])
    texts = helper.make_tensor("texts", TensorProto.STRING, [2], [b"a", b"b"])
    add("string_tensor", identity, tensors=[texts])
    sparse = helper.make_sparse_tensor(constant("s", [1.0], FLOAT), constant("s.at", [0]), [1 << 40])
    add("sparse_initializer", identity).graph.sparse_initializer.append(sparse)
    made = [helper.make_node("SequenceConstruct", ["product"], ["list"])]
    add("sequence", *made, helper.make_node("ConcatFromSequence", ["list"], ["hostile"], axis=0))
    add("opset", identity).opset_import[0].version = 9999
    add("training", identity).training_info.add().algorithm.CopyFrom(branch)
    add("cycle", helper.make_node("Add", ["hostile", "product"], ["hostile"]))
    add("missing_input", helper.make_node("Add", ["nobody", "product"], ["hostile"]))
    named = add("name_bytes", identity)
    found["name_bytes"] = named.SerializeToString(deterministic=True).replace(b"hostile", b"hos\xff\xfele")
    add("shadow", identity, tensors=[helper.make_tensor("features", FLOAT, [2, 3], [0.0] * 6)])
    add("random", helper.make_node("RandomNormalLike", ["product"], ["hostile"]))
    found["two_graphs"] = _serialised(_good_graph()) + _serialised(found["loop"])
    node = level = written([[1, 2, b"product"], [2, 2, b"hostile"], [4, 2, b"Identity"]])
    for _ in range(400):  # more than the library that writes messages has
        inner = written([[1, 2, b"g"], [20, 0, onnx.AttributeProto.GRAPH], [6, 2, [[1, 2, level]]]])
        level = node + written([[5, 2, inner]])
    plain = parsed(_serialised(add("deep_attribute", identity)))
    next(value for number, _, value in plain if number == 7).insert(1, [1, 2, level])
    found["deep_attribute"] = written(plain)
    add("split", helper.make_node("Split", ["product"], ["hostile", "more"], axis=1, num_outputs=1))
    add("missing_operand", helper.make_node("Max", ["product", "", "product"], ["hostile"]))
    sums = helper.make_node("Einsum", ["row", "product"], ["hostile"], equation="...i,...i->...i")
    add("dots", sums, tensors=[constant("row", [1.0, 1.0], FLOAT)])
    return {name: _serialised(model) for name, model in found.items()}


def fitting() -> dict[str, bytes]:
    """Graphs that are right for a manifest that is changed with them."""
    axes = onnx.load(STEP / GRAPH, load_external_data=False)
    for node in axes.graph.node:
        node.output[:] = ["flat" if name == "values" else name for name in node.output]
    axes.graph.node.append(helper.make_node("Reshape", ["flat", "axes"], ["values"]))
    axes.graph.initializer.append(helper.make_tensor("axes", INT64, [len(MANY_AXES)], MANY_AXES))
    axes.graph.output[0].CopyFrom(helper.make_tensor_value_info("values", FLOAT, MANY_AXES))
    shared = _good_graph()
    del shared.graph.input[1]
    return {"axes": _serialised(axes), "shared": _serialised(shared)}


def _good_graph() -> onnx.ModelProto:
    return _graph([helper.make_node("MatMul", ["features", "weight"], ["values"])], [_weight()])


def _weight() -> onnx.TensorProto:
    return helper.make_tensor("weight", FLOAT, [3, 2], [0.5] * 6)


def _graph(nodes: Any, tensors: Any, domains: Any = ()) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    carried = [("hidden", FLOAT, [2, 16]), ("count", INT32, [2])]
    states = [helper.make_node("Identity", [f"state.{name}.in"], [f"state.{name}.out"]) for name, _, _ in carried]
    inputs = [value("features", FLOAT, [2, 3]), value("valid", INT32, [2])]
    inputs += [value(f"state.{name}.in", kind, shape) for name, kind, shape in carried]
    outputs = [value("values", FLOAT, [2, 2]), *(value(f"state.{name}.out", kind, s) for name, kind, s in carried)]
    graph = helper.make_graph([*nodes, *states], "step", inputs, outputs, list(tensors))
    opsets = [helper.make_opsetid("", 18), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _serialised(model: onnx.ModelProto | bytes) -> bytes:
    return model if isinstance(model, bytes) else model.SerializeToString(deterministic=True)


# --- archives and weight files --------------------------------------------------------------------------------------


def weights() -> dict[str, bytes]:
    """Weight files of the step's bundle that are hashed and wrong."""
    data = (STEP / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]

    def made(changed: bytes) -> bytes:
        return length.to_bytes(8, "little") + changed.ljust(length) + rest

    other = bytearray(data)
    other[-2] ^= 0x40
    return {
        "length.safetensors": (2**63).to_bytes(8, "little") + data[8:],
        "header.safetensors": made(header.replace(b"{", b"[", 1)),
        "beyond.safetensors": data[:-64],
        "backwards.safetensors": made(header.replace(b"[0,", b"[9,").replace(b",3072]", b",3]")),
        "short.safetensors": data[:3],
        "other_numbers.safetensors": bytes(other),
    }


def archives() -> dict[str, bytes]:
    """Archives of stored vectors that are hashed and wrong."""
    with np.load(STEP / VECTORS) as stored:
        good = dict(stored)

    def array(descr: str, shape: Any, data: bytes) -> bytes:
        text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".ljust(117).encode() + b"\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data

    def archive(members: Any) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as written:
            for name, content in members:
                written.writestr(zipfile.ZipInfo(name), content)
        return file.getvalue()

    def npz(arrays: dict[str, Any]) -> bytes:
        return archive((f"{name}.npy", array(a.dtype.str, a.shape, a.tobytes())) for name, a in arrays.items())

    wrong = good | {"output/values": good["output/values"] + np.float32(1)}
    pickled = bytes.fromhex("80025d7100286301") + b"o"
    return {
        "lying.npz": archive([("length.npy", array("<i4", (1 << 28,), b""))]),
        "objects.npz": archive([("length.npy", array("|O", (1,), pickled))]),
        "text.npz": b"no archive",
        "empty.npz": archive([]),
        "member.npz": archive([("length", b"no array"), ("counts.npy", b"no array either")]),
        "shapes.npz": npz(good | {"counts": good["counts"][:, :1], "length": good["length"][:, None]}),
        "twice.npz": _doubled(npz({"length": good["length"], "lengtj": good["length"][:1]})),
        "wrong_numbers.npz": npz(wrong),
    }


def _doubled(data: bytes) -> bytes:
    return data.replace(b"lengtj.npy", b"length.npy")


if __name__ == "__main__":
    write(CORPUS / "files")
