"""Graphs that ask for too much, or for what no graph needs, are refused before an engine sees them."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import step_models
import txl_runtime
from onnx import TensorProto, helper, numpy_helper
from resealing import copied, reseal
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import BundleError
from txl_runtime.guard.forms import FORMS, PLAIN
from txl_runtime.guard.graph_check import BASE, NODES, WORK, Budget, Walk, check_graph, check_positions
from txl_runtime.guard.protobuf import RefusedError, fields, table

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log-probabilities of tokens [3, 4], with a state [3, 11]."""
    return step_models.counting().write(tmp_path_factory.mktemp("graphs") / "step.txl")


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node of names that spaces divide; - is none."""
    sides = ([name.strip("-") for name in side.split()] for side in (inputs, outputs))
    return helper.make_node(operator, *sides, **attributes)


def insert(model: onnx.ModelProto, *nodes: onnx.NodeProto, **constants: Any) -> None:
    """Nodes behind those that are there; constants are int64 where they are no arrays."""
    model.graph.node.extend(nodes)
    for name, values in constants.items():
        array = values if isinstance(values, np.ndarray) else np.array(values, np.int64)
        model.graph.initializer.append(numpy_helper.from_array(array, name))


Edit = Callable[[onnx.ModelProto], Any]


def behind(*nodes: onnx.NodeProto, **constants: Any) -> Edit:
    return lambda model: insert(model, *nodes, **constants)


def ones(*dims: int) -> np.ndarray:
    return np.ones(dims, np.float32)


def subgraph(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "inner", [], [helper.make_tensor_value_info("x", FLOAT, [1])])


S = "state.seen.in"
BODY = helper.make_graph(
    [node("Identity", "go", "on")],
    "body",
    [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("go", TensorProto.BOOL, [])],
    [helper.make_tensor_value_info("on", TensorProto.BOOL, [])],
)
INNER = subgraph(node("Constant", "", "x", value_floats=[1.0]))
SPARSE = helper.make_sparse_tensor(
    helper.make_tensor("", FLOAT, [1], [1.0]), helper.make_tensor("", INT64, [1], [5]), [10**9]
)
YES = np.array(True)


def sized_by_data(operator: str, inputs: str) -> Edit:
    """A size that somebody who calls the model may choose; declared as small."""

    def edit(model: onnx.ModelProto) -> None:
        made = node("Cast", "valid", "size", to=INT64), node(operator, inputs, "big")
        insert(model, *made, one=np.ones(1, np.float32), flat=ones(1, 1, 1))
        model.graph.value_info.append(helper.make_tensor_value_info("big", FLOAT, [1, 1, 1]))

    return edit


def range_of(start: int, limit: int, step: int) -> Edit:
    return behind(node("Range", "start limit step", "big"), start=start, limit=limit, step=step)


def products(count: int = 40, last: str = "p0") -> list[onnx.NodeProto]:
    """Of constants, which an engine computes when it opens the graph."""
    return [node("MatMul", f"p{i} {last if i % 2 == 0 else 'p0'}", f"p{i + 1}") for i in range(count)]


def outer(*names: str) -> list[onnx.NodeProto]:
    """A column of a value times its row; axes a and b."""
    name, x = names
    return [
        node("Unsqueeze", f"{name} a", f"{x}.column"),
        node("Unsqueeze", f"{name} b", f"{x}.row"),
        node("Mul", f"{x}.column {x}.row", x),
    ]


def declare(shape: Any, kind: int = FLOAT) -> Edit:
    """Another shape for the first node's result."""

    def edit(model: onnx.ModelProto) -> None:
        name = model.graph.node[3].output[0]
        model.graph.value_info.append(helper.make_tensor_value_info(name, kind, shape))

    return edit


def function(model: onnx.ModelProto) -> None:
    """A function with the name of one of the standard's operators."""
    made = helper.make_function("", "Add", ["x", "z"], ["y"], [node("Mul", "x x", "y")], [helper.make_opsetid("", 18)])
    model.functions.append(made)


def typed(kind: onnx.TypeProto) -> Edit:
    return lambda model: model.graph.value_info.append(helper.make_value_info("v", kind))


def outside(*more: tuple[str, str], **changes: str) -> Edit:
    """A parameter in the weight file, which has 4 bytes per number of one number at least."""

    def edit(model: onnx.ModelProto) -> None:
        tensor = onnx.TensorProto(name="w", data_type=FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
        places = {"location": "weights.safetensors", "offset": "8", "length": "4"} | changes
        for key, value in (*places.items(), *more):
            if value != "-":
                tensor.external_data.add(key=key, value=value)
        model.graph.initializer.append(tensor)

    return edit


def outside_but(change: Callable[[onnx.TensorProto], Any]) -> Edit:
    return lambda model: (outside()(model), change(model.graph.initializer[-1]))


def constant_of_dims(dims: list[int], data: bytes = b"") -> Edit:
    return lambda model: model.graph.initializer.append(
        onnx.TensorProto(name="c", data_type=FLOAT, dims=dims, raw_data=data)
    )


def divided(operator: str, divisor: int) -> Edit:
    """-2**31 / -1 is no number of 32 bits: ONNX Runtime's process ends, by a signal, when it opens the graph."""
    return behind(node(operator, "a b", "x"), a=np.array([-(2**31)], np.int32), b=np.array([divisor], np.int32))


ENDS = {
    "a": ones(2, 3),
    "row": ones(3),
    "empty": ones(0, 2),
    "image": ones(1, 4, 2, 2),
    "blank": ones(1, 4, 0, 0),
    "index": [1],
    "none": [],
    "far": [0, 2**40, 2**40],
    "nothing": np.zeros((4, 0), np.int64),
    "wide": [-1, 2**31, 2**31 - 1],
}


def ends(operator: str, inputs: str, outputs: str = "x", **attributes: Any) -> Edit:
    """A node that ends the process of an engine, or of which an engine makes something else than it says."""
    return behind(node(operator, inputs, outputs, **attributes), **ENDS)


SUMS = "ab,cd,ef,gh,ij,kl"
HOSTILE: dict[str, Edit] = {
    "endless loop": behind(node("Loop", "- yes", "", body=BODY), yes=YES),
    "branch": behind(node("If", "yes", "x", then_branch=INNER, else_branch=INNER), yes=YES),
    "graph as an attribute": lambda m: m.graph.node[0].attribute.append(helper.make_attribute("body", subgraph())),
    "scan": behind(node("Scan", S, "x", body=subgraph(), num_scan_inputs=1)),
    "sequence map": behind(node("SequenceMap", S, "x", body=subgraph())),
    "random": behind(node("RandomNormal", "", "x", shape=[2])),
    "random by input": behind(node("Bernoulli", S, "x")),
    "dropout": behind(node("Dropout", S, "x")),
    "sequence": behind(node("SplitToSequence", S, "x")),
    "optional": behind(node("Optional", S, "x")),
    "text": behind(node("StringNormalizer", S, "x")),
    "another domain": behind(node("Add", "valid valid", "x", domain="ai.onnx")),
    "an operator of the engine": behind(node("FusedMatMul", "x x", "x", domain="com.microsoft")),
    "3 GB of zeros": behind(node("ConstantOfShape", "s", "x"), s=[750 * 10**6]),
    "expanded": behind(node("Expand", f"{S} sizes", "big"), sizes=[10**8, 3, 11]),
    "expanded much": behind(node("Expand", f"{S} sizes", "big"), sizes=[*[2**40] * 6, 3, 11]),
    "expanded less than nothing": behind(node("Expand", f"{S} sizes", "big"), sizes=[-5, 3, 11]),
    "doubled forty times": behind(
        *(node("Concat", f"{f'x{i}' if i else S} {f'x{i}' if i else S}", f"x{i + 1}", axis=0) for i in range(40))
    ),
    "outer products": behind(
        node("Reshape", f"{S} flat", "m0"),
        *(each for i in range(4) for each in (*outer(f"m{i}", f"o{i}"), node("Reshape", f"o{i} flat", f"m{i + 1}"))),
        flat=[-1],
        a=[0],
        b=[1],
    ),
    "expanded by data": sized_by_data("Expand", "one size"),
    "tiled by data": sized_by_data("Tile", "flat size"),
    "zeros by data": sized_by_data("ConstantOfShape", "size"),
    "tiled": behind(node("Tile", f"{S} times", "big"), times=[10**5, 10**5]),
    "padded": behind(node("Pad", f"{S} p", "big"), p=[0, 0, 10**6, 10**6]),
    "padded for a pool": behind(
        node("Reshape", f"{S} image", "i"),
        node("AveragePool", "i", "big", kernel_shape=[1, 1], pads=[10**6] * 4),
        image=[1, 1, 3, 11],
    ),
    "one of 10^10": behind(node("OneHot", "tokens depth values", "big"), depth=10**10, values=[0, 1]),
    "a range": range_of(0, 10**9, 1),
    "a range backwards": range_of(10**9, 0, -1),
    "a range of steps 0": range_of(0, 1, 0),
    "a range that wraps in its type": range_of(2**62 + 2**50, -(2**62), 2**36),
    "sums of many axes": behind(  # small before and behind, and 10^13 sums between
        node("Einsum", " ".join([S] * 6), "small", equation=f"{SUMS}->"),
        node("Einsum", " ".join([S] * 12), "smaller", equation=f"{SUMS},mn,op,qr,st,uv,wx->"),
    ),
    "constants multiplied": behind(node("ConstantOfShape", "sizes", "p0"), *products(), sizes=[2000, 2000]),
    "constants multiplied that are shapes": behind(  # once the shape of an input is known
        node("Shape", S, "shape"),
        node("Mul", "shape much", "sizes"),
        node("ConstantOfShape", "sizes", "p0"),
        node("Transpose", "p0", "t"),
        *products(last="t"),
        much=[300, 100],
    ),
    "a size that wraps around": behind(  # 2^32 is 0 in 32 bits; without that, the size seemed to be 3
        node("Cast", "large", "short", to=TensorProto.INT32),
        node("Cast", "short", "zero", to=INT64),
        node("Sub", "larger zero", "size"),
        node("ConstantOfShape", "size", "big"),
        large=[2**32],
        larger=[2**32 + 3],
    ),
    "a slice before the first": behind(  # there is one number in it, where a list of Python's would have none
        node("Slice", f"{S} start end axis step", "s"),
        node("Tile", "s times", "big"),
        start=[-100],
        end=[-200],
        axis=[0],
        step=[-1],
        times=[10**6, 10**6],
    ),
    "sizes added across": behind(  # two plus two: four
        node("Add", "column row", "square"),
        node("Reshape", "square flat", "sizes"),
        node("ConstantOfShape", "sizes", "big"),
        column=[[0], [1]],
        row=[[10**3, 10**6]],
        flat=[-1],
    ),
    "a slice backwards to the end": behind(  # which ONNX Runtime takes for all of 40,000
        node("ConstantOfShape", "s", "many"),
        node("Slice", "many last end zero last", "all"),
        *outer("all", "x"),
        s=[40000],
        last=[-1],
        end=[2**63 - 1],
        zero=[0],
        a=[0],
        b=[1],
    ),
    "sizes that are 0 at times": behind(  # when a state is, which means the sizes that were there
        node("NonZero", S, "places"),
        node("Shape", "places", "count", start=1, end=2),
        node("Min", "count one", "few"),
        node("Concat", "few few", "sizes", axis=0),
        node("ConstantOfShape", "s", "many"),
        node("Reshape", "many sizes", "r"),
        *outer("r", "x"),
        one=[1],
        s=[200, 200],
        a=[0, 1],
        b=[2, 3],
    ),
    "sizes of what may have kept its axes": behind(  # as an empty value that is reduced has in ONNX Runtime
        node("NonZero", S, "places"),
        node("ReduceSum", "places a", "x", keepdims=0),
        node("Shape", "x", "sizes"),
        a=[0],
    ),
    "all windows of a value": behind(  # in four dimensions, for which an engine lays them out beside each other
        node("ConstantOfShape", "s", "many"),
        node("ConstantOfShape", "k", "weight"),
        node("Conv", "many weight", "x"),
        s=[1, 1, 20, 20, 20, 20],
        k=[1, 1, 9, 9, 9, 9],
    ),
    "no groups": behind(node("ConvTranspose", "a b", "x", group=0), a=ones(1, 1, 4, 4), b=ones(1, 1, 1, 1)),
    "three axes of which one is empty": behind(
        node("ConvTranspose", "a b", "x"), a=ones(1, 1, 0, 1, 1), b=ones(1, 1, 2, 2, 2)
    ),
    "a normalization across 2^25": behind(
        node("ConstantOfShape", "s", "a"), node("LRN", "a", "x", size=2**25 + 1), s=[10, 10**5, 1, 1]
    ),
    "a division by 0": divided("Div", 0),
    "a division by -1": divided("Div", -1),
    "a remainder of -1": divided("Mod", -1),
    "parts of another number than results": ends("Split", "a", "x y z", num_outputs=1),
    "a missing value of several": ends("Max", "a - a"),
    "a missing bias": ends("LayerNormalization", "a row -", "x y z"),
    "a depth of no numbers": ends("OneHot", "index none row"),
    "one of three values": ends("OneHot", "index index row"),
    "dots of two lengths": ends("Einsum", "row a", equation="...i,...i->..."),
    "blocks of 2^32 in an empty image": ends("DepthToSpace", "blank", blocksize=2**32),
    "sums of nothing": ends("Einsum", "empty empty", equation="a...,...a"),
    "blocks whose square is 0": ends("DepthToSpace", "image", blocksize=2**62),
    "a normalization of no positions": ends("InstanceNormalization", "blank row row"),
    "a normalization of as many positions as there are tokens beside 0": behind(
        node("NonZero", "tokens", "n"),
        node("Cast", "n", "f", to=FLOAT),
        node("Unsqueeze", "f first", "u"),
        node("InstanceNormalization", "u row row", "x"),
        first=[0],
        row=ones(2),
    ),
    "blocks of nothing": ends("QuantizeLinear", "empty empty", axis=0, block_size=2),
    "a flag that is neither 0 nor 1": ends("ReduceMax", "a", keepdims=-1),
    "an empty value of 2^80": ends("ConstantOfShape", "far"),
    "an empty value of 2^62": ends("Reshape", "nothing wide"),
    "notes of a node": lambda m: m.graph.node[0].metadata_props.add(key="a", value="b"),
    "notes of a value": lambda m: m.graph.input[0].metadata_props.add(key="a", value="b"),
    "declared larger": declare([10**9, 10**9]),
    "declared of other axes": declare([3]),
    "declared negative": declare([-3, 4, 1]),
    "declared twice": lambda m: [declare([3, 4, 1], INT64)(m), declare([3, 4, 1], INT64)(m)],
    "a cycle": behind(node("Neg", "b", "a"), node("Neg", "a", "b")),
    "a result twice": lambda m: insert(m, node("Neg", S, m.graph.node[0].output[0])),
    "a function": function,
    "a sparse constant": lambda m: m.graph.sparse_initializer.append(SPARSE),
    "a sparse constant of a node": behind(node("Constant", "", "c", sparse_value=SPARSE)),
    "training": lambda m: m.training_info.add(),
    "a sequence type": typed(helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, [1]))),
    "an optional type": typed(helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [1]))),
    "a map type": typed(helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, [1]))),
    "text in a type": typed(helper.make_tensor_type_proto(TensorProto.STRING, [1])),
    "text as a constant": lambda m: m.graph.initializer.append(
        helper.make_tensor("c", TensorProto.STRING, [1], [b"text"])
    ),
    "an opset twice": lambda m: m.opset_import.add(domain="", version=18),
    "an opset of another name": lambda m: m.opset_import.add(domain="ai.onnx", version=18),
    "an old opset": lambda m: setattr(m.opset_import[0], "version", 7),
    "an opset to come": lambda m: setattr(m.opset_import[0], "version", 99),
    "a format to come": lambda m: setattr(m, "ir_version", 99),
    "weights with NUL": outside(location="weights.safetensors\0"),
    "weights from here": outside(location="./weights.safetensors"),
    "weights from above": outside(location="../step.txl/weights.safetensors"),
    "weights from the root": outside(location="/etc/passwd"),
    "weights of another case": outside(location="Weights.safetensors"),
    "weights from nowhere": outside(location="-"),
    "weights from the manifest": outside(location="manifest.json"),
    "weights before the file": outside(offset="-4"),
    "weights behind the file": outside(offset="100000"),
    "weights far behind the file": outside(offset=str(2**64)),
    "weights at a word": outside(offset="0x8"),
    "weights at another script's number": outside(offset="\u0668"),
    "weights of any length": outside(length="-"),
    "weights of another length": outside(length="8"),
    "weights laid out beforehand": outside(prepacked_0="8|4"),
    "weights at two places": outside(("location", "/etc/passwd")),
    "weights in both": outside_but(lambda tensor: setattr(tensor, "raw_data", bytes(4))),
    "weights outside that are not said to be": outside_but(lambda tensor: tensor.ClearField("data_location")),
    "a constant without numbers": constant_of_dims([10**9]),
    "a constant of negative size": constant_of_dims([-1, -4], bytes(16)),
    "a constant of many axes": constant_of_dims([1] * 100, bytes(4)),
    "a constant of a part of a number": constant_of_dims([1], bytes(3)),
    "an attribute of another type": lambda m: m.graph.node[1].attribute.append(helper.make_attribute("to", "float")),
    "an attribute of another operator": lambda m: m.graph.node[0].attribute.append(helper.make_attribute("axis", 1)),
    "an attribute twice": lambda m: m.graph.node[2].attribute.append(m.graph.node[2].attribute[0]),
    "an attribute by reference": lambda m: m.graph.node[2].attribute.append(
        onnx.AttributeProto(name="axis", type=onnx.AttributeProto.INT, ref_attr_name="other")
    ),
}


def program(manifest: Any) -> Any:
    return next(entry for entry in manifest.programs if entry.segment_length == 4)


def hostile(bundle: Path, name: str) -> bytes:
    model = onnx.load(bundle / "step-4.onnx")
    HOSTILE[name](model)
    return model.SerializeToString()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_refused_before_an_engine_is_called(bundle, tmp_path, monkeypatch, name):
    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine saw it")

    path = changed(bundle, tmp_path / "a.txl", hostile(bundle, name))
    monkeypatch.setattr(onnxruntime, "InferenceSession", called)
    with pytest.raises(
        BundleError, match=r"step-4\.onnx: has .*, expected .*; (export the model again|if you trust it, load)"
    ):
        txl_runtime.load(path, backend="cpu")


@pytest.mark.parametrize(
    ("sizes", "more"), [([5000, 5000], []), ([1200, 1200], products(1))], ids=["bytes", "products"]
)
def test_much_that_is_always_the_same_is_refused_where_as_much_of_the_input_would_not_be(bundle, sizes, more):
    """An engine computes it when it opens the graph, and keeps it."""
    manifest, model = open_bundle(bundle).manifest, onnx.load(bundle / "step-4.onnx")
    assert math.prod(sizes) * (sizes[0] if more else 4) < (WORK if more else BASE) / 2
    insert(model, node("ConstantOfShape", "sizes", "p0"), *more, sizes=sizes)
    with pytest.raises(BundleError, match=r"has values of \d+ bytes, by \d+ products, that are always the same"):
        check_graph(model.SerializeToString(), "a.onnx", program(manifest), manifest)


def changed(bundle: Path, place: Path, graph: bytes) -> Path:
    """A bundle with another graph, which its manifest lists."""
    copied(bundle, place)
    (place / "step-4.onnx").write_bytes(graph)
    return reseal(place)


RAW = {
    "a field of number 0": b"\x00\x01",
    "an unknown field": b"\xf8\x07\x01",
    "a group": b"\x3b\x3c",
    "a second graph": b"\x3a\x00",
    "a second version": b"\x08\x0a",
    "a number of 80 bits": b"\x28" + b"\xff" * 11 + b"\x01",
    "a number of 70 bits": b"\x28" + b"\xff" * 9 + b"\x7f",
    "a number with zeros before it": b"\x28\x81\x80\x00",
    "cut off": b"\x32\x05abc",
    "cut off within a number": b"\x28\xff",
    "a size of 2^62": b"\x32" + b"\xff" * 8 + b"\x3f",
    "a version that is no number": b"\x0a\x01a",
}


@pytest.mark.parametrize("name", RAW)
def test_what_two_readers_could_understand_differently_is_refused(bundle, name):
    manifest = open_bundle(bundle).manifest
    data = (bundle / "step-4.onnx").read_bytes()
    check_graph(data, "a.onnx", program(manifest), manifest)
    with pytest.raises(BundleError, match=r"^a\.onnx: has .*, expected .*; export"):
        check_graph(data + RAW[name], "a.onnx", program(manifest), manifest)


def test_a_name_that_is_no_text_is_refused_by_name(bundle):
    manifest = open_bundle(bundle).manifest
    data = (bundle / "step-4.onnx").read_bytes().replace(b"value.0", b"value.\xff")
    with pytest.raises(BundleError, match=r"the name b'value.\\xff', which is no UTF-8"):
        check_graph(data, "a.onnx", program(manifest), manifest)


def test_nesting_is_as_deep_as_a_graph_is():
    nested = b""
    for _ in range(20_000):
        size = len(nested)
        nested = b"\x3a" + _varint(size) + nested
    with pytest.raises(RefusedError):
        Walk(nested, "step", {}, "weights", Budget(0))


def _varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def test_more_nodes_than_any_graph_has_are_refused_at_once():
    one = node("Neg", "x", "y").SerializeToString()
    body = (b"\x0a" + _varint(len(one)) + one) * (NODES + 1)
    data = b"\x42\x02\x10\x12\x3a" + _varint(len(body)) + body
    with pytest.raises(RefusedError, match=f"{NODES + 1} nodes"):
        Walk(data, "step", {}, "weights", Budget(0))


@pytest.mark.parametrize("many", ["nodes", "attributes", "values", "constants", "inputs"])
def test_time_and_memory_are_linear_in_the_file(many):
    """At most 60 bytes for each byte of a file of many small parts, and 4 times the time for twice of it."""
    seconds, least = [], []
    for count in (500, 1000) if many == "inputs" else (1500, 3000):
        data = _many(many, count).SerializeToString()
        tracemalloc.start()
        begun = time.process_time()
        try:
            Walk(data, "step", {"x": (2,)}, "weights", Budget(0))
        finally:
            seconds.append(time.process_time() - begun)
            least.append(tracemalloc.get_traced_memory()[1] / len(data))
            tracemalloc.stop()
    assert max(least) < 60
    assert seconds[1] < 4 * seconds[0] + 0.1


def _many(what: str, count: int) -> onnx.ModelProto:
    nodes, values, constants = [node("Neg", "x", "y")], [], []
    if what == "nodes":
        nodes = [node("Neg", "x", f"y{i}") for i in range(count)]
    elif what == "attributes":
        nodes = [node("Transpose", "x", f"y{i}", perm=[0]) for i in range(count)]
    elif what == "values":
        values = [helper.make_tensor_value_info(f"v{i}", FLOAT, [i]) for i in range(count)]
    elif what == "constants":
        constants = [numpy_helper.from_array(np.array([i]), f"c{i}") for i in range(count)]
    else:
        nodes = [node("Sum", "x " * count, "y")]
    x, y = (helper.make_tensor_value_info(name, FLOAT, [2]) for name in ("x", nodes[-1].output[0]))
    graph = helper.make_graph(nodes, "g", [x], [y], constants, value_info=values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_every_operator_of_the_list_is_one_of_the_standard_with_these_attributes():
    kinds = {"i": "INT", "f": "FLOAT", "s": "STRING", "t": "TENSOR", "I": "INTS", "F": "FLOATS"}
    for name, form in FORMS[""].items():
        known: dict[str, str] = {}
        assert onnx.defs.has(name, 24, ""), name
        for opset in (18, 24):
            if onnx.defs.has(name, opset, ""):
                schema = onnx.defs.get_schema(name, opset, "")
                known |= {key: str(value.type).rpartition(".")[2] for key, value in schema.attributes.items()}
                assert str(schema.support_level).endswith("COMMON")
                assert "GRAPH" not in known.values()
        assert {key: kind.replace("b", "i") for key, kind in form.attributes.items()}.items() <= {
            key: next((k for k, v in kinds.items() if v == kind), "") for key, kind in known.items()
        }.items(), name
    assert set(FORMS[""]) | set(FORMS["com.microsoft"]) >= PLAIN


def test_only_programs_of_other_families_may_have_all_operators(bundle):
    manifest = open_bundle(bundle).manifest
    data = (bundle / "step-4.onnx").read_bytes()
    entry = msgspec.structs.replace(program(manifest), kind="logprobs")
    with pytest.raises(BundleError, match="the operator 'CumSum'"):
        check_graph(data, "a.onnx", entry, manifest)


def test_a_shape_that_is_false_is_refused_by_the_engine_too():
    """For sizes that follow from a graph's inputs, as they do from ours; not for those that are a value's content."""
    graph = helper.make_graph(
        [node("Neg", "x", "y"), node("Abs", "y", "z")],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [2, 3])],
        [helper.make_tensor_value_info("z", FLOAT, [2, 3])],
        value_info=[helper.make_tensor_value_info("y", FLOAT, [2, 4])],
    )
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.strict_shape_type_inference", "1")
    with pytest.raises(Exception, match="dimension"):
        onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=False)
    with pytest.raises(RefusedError, match="declared as"):
        Walk(data, "step", {"x": (2, 3)}, "weights", Budget(0))


@pytest.mark.parametrize(("first", "fits"), [(0, True), (1, False)])
def test_any_number_of_sequences_is_normalized_and_no_positions_are_not(first, fits):
    """[batch, 2, 4], as GroupNorm makes of it; and its sequences from the second on in place of the positions."""
    nodes = [
        node("Slice", "x first last", "s"),
        node("Transpose", "s", "t", perm=[1, 2, 0] if first else [0, 1, 2]),
        node("InstanceNormalization", "t scale scale", "y"),
    ]
    numbers = {"first": np.array([first]), "last": np.array([9]), "scale": ones(4)}
    constants = [numpy_helper.from_array(array, name) for name, array in numbers.items()]
    x, y = (helper.make_tensor_value_info(name, FLOAT, [size, 2, 4]) for name, size in (("x", "batch"), ("y", "any")))
    graph = helper.make_graph(nodes, "open", [x], [] if first else [y], constants)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    walk = Walk(data, "step", {"x": (3, 2, 4)}, "", Budget(0))
    with nullcontext() if fits else pytest.raises(RefusedError, match="may have no positions"):
        check_positions(walk, data, "step", 1, "", Budget(0))


def test_nothing_is_printed_of_a_graph_that_the_engine_refuses(bundle, tmp_path, monkeypatch, capfd):
    """The engine's own package prints "EP Error" of what fails in some ways, and tries the same again."""
    model = onnx.load(bundle / "step-4.onnx")
    insert(model, node("Add", f"tokens {S}", "x"))  # of two types
    path = changed(bundle, tmp_path / "a.txl", model.SerializeToString())
    with pytest.raises(BundleError, match="expected a graph ONNX Runtime can load"):
        txl_runtime.load(path, backend="cpu")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a damaged graph")

    monkeypatch.setattr(onnxruntime.InferenceSession, "_create_inference_session", fail)
    with pytest.raises(BundleError, match="a damaged graph; expected a graph ONNX Runtime can load"):
        txl_runtime.load(bundle, backend="cpu")
    assert capfd.readouterr() == ("", "")


def test_fields_are_told_in_their_order():
    assert fields(b"\x08\x05\x12\x01a\x1d\x00\x00\x80\x3f", table("1v 2b 3f"), "x") == [
        (1, 5),
        (2, b"a"),
        (3, b"\x00\x00\x80\x3f"),
    ]


@pytest.mark.parametrize("stated", [{"ai.onnx": 19}, {"ai.onnx": 18, "com.microsoft": 1}, {"é" * 200: 18}])
def test_a_graph_imports_what_the_manifest_says(bundle, stated):
    manifest = open_bundle(bundle).manifest
    first, *others = manifest.programs
    data = (bundle / first.file).read_bytes()
    for opset in ({}, {"ai.onnx": 18}, stated):
        changed = msgspec.structs.replace(first, opset=opset)
        tables = msgspec.structs.replace(manifest, programs=(changed, *others))
        if opset is not stated:
            check_graph(data, "the graph", changed, tables)
            continue
        with pytest.raises(BundleError, match=r"has operators of \{'ai.onnx': 18\}, expected .*says of") as caught:
            check_graph(data, "the graph", first, tables)
        assert len(str(caught.value)) < 300
        assert str(caught.value).isascii()
