"""Graphs that ask for too much, for what no graph needs, or for what ends an engine's process: 115 attacks by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT


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
    """Return products of constants, which an engine computes when it opens the graph."""
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
        others = [value for value in model.graph.value_info if value.name != name]
        del model.graph.value_info[:]
        model.graph.value_info.extend(others)
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
    "a division by -1 behind a node": behind(
        node("Identity", "b", "c"),
        node("Cast", S, "i", to=TensorProto.INT32),
        node("Div", "i c", "x"),
        b=np.array([-1], np.int32),
    ),
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
    "declared twice": lambda m: m.graph.value_info.append(m.graph.value_info[0]),
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
    "very many tiny products": behind(
        node("Expand", "one sizes", "v"), node("MatMul", "v v", "x"), one=ones(1), sizes=[2**23, 1, 1]
    ),
    "a network whose first result is left out": behind(
        node("Expand", "one sizes", "v"),
        node("LSTM", "v w r", "- x", hidden_size=7),
        one=ones(1),
        sizes=[2**22, 1, 1],
        w=ones(1, 28, 1),
        r=ones(1, 28, 7),
    ),
    "numbers of 8 bytes": behind(
        node("Expand", "one sizes", "v"),
        node("Cast", "v", "d", to=TensorProto.DOUBLE),
        node("Exp", "d", "x"),
        one=ones(1),
        sizes=[2**25],
    ),
    "remainders of fractions": behind(
        node("Expand", "one sizes", "v"), node("Mod", "v v", "x", fmod=1), one=ones(1), sizes=[2**24 + 2**23]
    ),
    "one image of one channel, laid out in blocks": behind(
        node("Expand", "one sizes", "v"),
        node("MaxPool", "v", "x", kernel_shape=[1, 1]),
        one=ones(1),
        sizes=[1, 1, 2**12, 2**11],
    ),
}


TRIED = frozenset(
    (
        "3 GB of zeros",
        "expanded",
        "expanded much",
        "expanded less than nothing",
        "doubled forty times",
        "outer products",
        "tiled",
        "padded",
        "padded for a pool",
        "one of 10^10",
        "a range",
        "a range backwards",
        "a range of steps 0",
        "a range that wraps in its type",
        "sums of many axes",
        "constants multiplied",
        "constants multiplied that are shapes",
        "a size that wraps around",
        "a slice before the first",
        "sizes added across",
        "a slice backwards to the end",
        "all windows of a value",
        "no groups",
        "three axes of which one is empty",
        "parts of another number than results",
        "a depth of no numbers",
        "one of three values",
        "dots of two lengths",
        "sums of nothing",
        "a normalization of no positions",
        "an empty value of 2^80",
        "an empty value of 2^62",
        "declared larger",
        "declared of other axes",
        "very many tiny products",
        "a network whose first result is left out",
        "numbers of 8 bytes",
        "remainders of fractions",
        "one image of one channel, laid out in blocks",
    )
)
"""Attacks that structure does not show: ONNX Runtime refuses them, dies, or they run and take memory and time."""


def hostile(bundle: Path, name: str) -> bytes:
    """The graph of a `step_models.counting` for segments of 4, with an attack in it."""
    model = onnx.load(bundle / "step-4.onnx")
    HOSTILE[name](model)
    return model.SerializeToString()
