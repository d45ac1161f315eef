"""What a step may take: strangers' graphs are refused above it, and honest ones of any size that is in use are not."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import step_models
import txl_runtime
from onnx import TensorProto, helper, numpy_helper
from txl_runtime.errors import BundleError, UsageError
from txl_runtime.guard.graph_check import BASE, EACH, NODES, OPENING, SIDES, Budget, Walk
from txl_runtime.guard.lives import Lives
from txl_runtime.guard.protobuf import RefusedError

FLOAT = TensorProto.FLOAT


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, outputs, **attributes)


def constant(name: str, values: Any, dtype: Any = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def graph(nodes: Any, inputs: Any, outputs: Sequence[str], constants: Any = (), opset: int = 18) -> bytes:
    given = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    made = helper.make_graph(list(nodes), "g", given, [helper.make_tensor_value_info(o, FLOAT, None) for o in outputs])
    made.initializer.extend(constants)
    for output in made.output:
        output.type.tensor_type.shape.SetInParent()
    versions = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(made, opset_imports=versions, ir_version=10)
    for output in made.output:
        model.graph.output.remove(output)
    return model.SerializeToString()


def taken(data: bytes, budget: Budget | None = None, **sizes: tuple[int, ...]) -> Budget:
    budget = budget or Budget(0)
    Walk(data, "step", sizes, "weights", budget)
    return budget


def test_no_order_of_nodes_keeps_more_at_once_than_is_counted():
    """Random small graphs, all orders in which their nodes can run."""
    draw, tight = random.Random(1), 0
    for _ in range(50):
        reads = [draw.sample(range(i), min(i, draw.choice([0, 1, 1, 2]))) for i in range(5)]
        sizes = [draw.randrange(1, 9) for _ in reads]
        lives = Lives()
        for read, size in zip(reads, sizes, strict=True):
            lives.add(read, size, 1)
        worst = 0
        for order in permutations(range(5)):
            place = {one: at for at, one in enumerate(order)}
            if any(place[read] > place[one] for one, read_by in enumerate(reads) for read in read_by):
                continue
            readers = [[place[j] for j in range(5) if i in reads[j]] or [place[i]] for i in range(5)]
            alive = [sum(sizes[i] for i in range(5) if place[i] <= at <= max(readers[i])) for at in range(5)]
            worst = max(worst, *alive)
        most, many = lives.most()
        assert worst <= most <= sum(sizes)
        assert 1 <= many <= 5
        tight += most < sum(sizes)
    assert tight > 10


def test_what_is_dropped_again_is_not_counted_for_ever():
    """A chain of a hundred values of 8 MB has few of them at once, but a hundred of one value have all."""
    chain = [node("Sin", [f"v{i}"], [f"v{i + 1}"]) for i in range(100)]
    fan = [node("Sin", ["v0"], [f"v{i + 1}"]) for i in range(100)]
    most = taken(graph(chain, {"v0": (FLOAT, [2**21])}, []), v0=(2**21,)).taken
    assert most < 5 * 2**23
    with pytest.raises(RefusedError, match="steps of"):
        taken(graph([*fan, node("Sum", [f"v{i}" for i in range(1, 101)], ["y"])], {"v0": (FLOAT, [2**21])}, []),
              v0=(2**21,))  # fmt: skip


DEAR: dict[str, tuple[list[onnx.NodeProto], list[onnx.TensorProto]]] = {
    "very many tiny products": (
        [node("Expand", ["x", "size"], ["v"]), node("MatMul", ["v", "v"], ["y"])],
        [constant("size", [2**23, 1, 1])],
    ),
    "a network whose first result is left out": (
        [
            node("Expand", ["x", "size"], ["v"]),
            node("LSTM", ["v", "w", "r"], ["", "h"], hidden_size=7),
        ],
        [
            constant("size", [2**22, 1, 1]),
            constant("w", np.ones((1, 28, 1)), np.float32),
            constant("r", np.ones((1, 28, 7)), np.float32),
        ],
    ),
    "numbers of 8 bytes": (
        [node("Expand", ["x", "size"], ["v"]), node("Cast", ["v"], ["d"], to=11), node("Exp", ["d"], ["y"])],
        [constant("size", [2**25])],
    ),
    "remainders of fractions": (
        [node("Expand", ["x", "size"], ["v"]), node("Mod", ["v", "v"], ["y"], fmod=1)],
        [constant("size", [2**24 + 2**23])],
    ),
    "one image of one channel, laid out in blocks": (
        [node("Expand", ["x", "size"], ["v"]), node("MaxPool", ["v"], ["y"], kernel_shape=[1, 1])],
        [constant("size", [1, 1, 2**12, 2**11])],
    ),
}


@pytest.mark.parametrize("name", DEAR)
def test_what_takes_more_than_its_results_is_counted(name):
    nodes, constants = DEAR[name]
    with pytest.raises(RefusedError, match=r"steps of \d+ bytes and \d+ products"):
        taken(graph(nodes, {"x": (FLOAT, [1])}, [], constants), x=(1,))


GONE = "ConvInteger DynamicQuantizeLinear GlobalLpPool LRN LpNormalization LpPool MatMulInteger ReverseSequence"
REFUSED = [
    *((operator, {}, "the operator") for operator in (*GONE.split(), "RotaryEmbedding", "MeanVarianceNormalization")),
    *(
        ("Cast", {"to": to}, "Cast|type|32 bits") for to in (8, 17, 21, 22, 2**32 + 7)
    ),  # to text, or to less than a byte
    *(("Softmax", {"axis": n}, "numbers of 32 bits") for n in (2**31, -(2**31) - 1, 2**32 + 1, 2**63 - 1)),
]


@pytest.mark.parametrize(("operator", "attributes", "said"), REFUSED)
def test_what_no_exporter_writes_is_refused(operator, attributes, said):
    with pytest.raises(RefusedError, match=said):
        taken(graph([node(operator, ["x"], ["y"], **attributes)], {"x": (FLOAT, [2])}, []), x=(2,))


def products(**changes: Any) -> bytes:
    """[2, 64] by 64 x 8 in 4 bits, in two blocks for each column."""
    given = {"K": 64, "N": 8, "bits": 4, "block_size": 32} | changes
    codes, scales, zeros = given.pop("codes", 8 * 2 * 16), given.pop("scales", 16), given.pop("zeros", 8)
    more = given.pop("more", [])
    constants = [constant("b", np.ones(codes), np.uint8), constant("s", np.ones(scales), given.pop("kind", np.float32))]
    constants += [constant("z", np.ones(zeros), np.uint8), constant("g", np.zeros(64), np.int32)]
    names = ["x", given.pop("by", "b"), "s", "z", *more]
    given = {name: value for name, value in given.items() if value is not None}
    made = node("MatMulNBits", names, ["y"], domain="com.microsoft", **given)
    return graph([made], {"x": (FLOAT, [2, 64])}, [], constants)


def test_quantised_weights_of_the_exporters_form_pass():
    taken(products(), x=(2, 64))
    taken(products(bits=8, codes=8 * 2 * 32, zeros=16), x=(2, 64))


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 2, "more": ["g"]},  # ONNX Runtime reads it as 4 bits: twice the bytes that there are
        {"bits": 2, "codes": 8 * 2 * 8, "zeros": 8},
        {"more": ["g"]},
        {"more": ["", "x"]},
        {"codes": 8 * 2 * 16 - 1},
        {"scales": 15},
        {"zeros": 7},
        {"kind": np.float64},
        {"K": 128},
        {"N": 16},
        {"N": 2**31},
        {"block_size": 24},
        {"block_size": None},
        {"bits": None, "codes": 0, "zeros": 0},  # ONNX Runtime takes 4 bits where nothing is said
        {"by": "x"},
    ],
)
def test_quantised_weights_of_any_other_form_are_refused(changes):
    with pytest.raises(RefusedError):
        taken(products(**changes), x=(2, 64))


@pytest.mark.parametrize(("scale", "zero"), [((3,), (3,)), ((2,), (1,)), ((), (4,))])
@pytest.mark.parametrize("operator", ["QuantizeLinear", "DequantizeLinear"])
def test_scales_of_other_sizes_than_the_value_are_refused(operator, scale, zero):
    constants = [constant("s", np.ones(scale), np.float32), constant("z", np.ones(zero), np.uint8)]
    with pytest.raises(RefusedError, match="scales or zero points"):
        taken(graph([node(operator, ["x", "s", "z"], ["y"], axis=0)], {"x": (FLOAT, [2, 4])}, [], constants), x=(2, 4))


def test_nodes_values_and_sides_beyond_those_of_any_graph_are_refused():
    """ONNX Runtime takes a time to open them that grows faster than they do."""
    x = {"x": (FLOAT, [2])}
    many = int(math.sqrt(OPENING)) + 1
    apart = [node("Neg", ["x"], [f"y{i}"]) for i in range(many)]
    with pytest.raises(RefusedError, match=f"{many} nodes, {many} values at once"):
        taken(graph(apart, x, []), x=(2,))
    with pytest.raises(RefusedError, match=f"at most {SIDES}"):
        taken(graph([node("Sum", ["x"] * (SIDES + 1), ["y"])], x, []), x=(2,))
    chain = [node("Neg", [f"y{i}" if i else "x"], [f"y{i + 1}"]) for i in range(NODES // 2)]
    taken(graph(chain, x, []), x=(2,))


def test_numbers_that_are_known_are_bounded_by_the_file():
    """A chain of sums of 256 known numbers, and all sums of two of some such constants."""
    nodes = [node("Add", [f"a{i}", "c"], [f"a{i + 1}"]) for i in range(1500)]
    data = graph(nodes, {}, [], [constant("a0", np.arange(256)), constant("c", np.arange(256))])
    tracemalloc.start()
    walk = Walk(data, "step", {}, "weights", Budget(0))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 60 * len(data)
    assert walk.values["a2"].content is not None
    assert walk.values["a1500"].content is None
    constants = [constant(f"c{i}", np.arange(256) + i) for i in range(24)]
    pairs = [node("Add", [f"c{i}", f"c{j}"], [f"s{i}.{j}"]) for i in range(24) for j in range(24)]
    with pytest.raises(RefusedError, match="more numbers than the file has bytes"):
        taken(graph(pairs, {}, [], constants))


# An honest Transformer-XL, whose weights are sizes alone.
LAYERS, WIDTH, INNER, HEADS, M, B, V, L = 24, 1024, 4096, 16, 3800, 16, 267_735, 512


class Large:
    """The nodes that the exporter writes for a layer, of the sizes above."""

    def __init__(self) -> None:
        self.bytes, self.constants = 0, dict[str, onnx.TensorProto]()

    def weight(self, name: str, *dims: int) -> str:
        if name in self.constants:
            return name
        tensor = onnx.TensorProto(name=name, data_type=FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
        size = 4 * math.prod(dims)
        for key, value in (("location", "weights"), ("offset", self.bytes), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        self.constants[name] = tensor
        self.bytes += size
        return name

    def layer(self, i: int, ring: bool, rows: int) -> list[onnx.NodeProto]:
        def n(name: str) -> str:
            return f"{i}.{name}"

        keys, write = [n("k"), n("v")], list[onnx.NodeProto]()
        for name in keys:
            if ring:
                write.append(node("TensorScatter", [f"{name}.in", f"{name}.new", "head"], [f"{name}.out"], axis=2))
            else:
                write.append(node("Concat", [f"{name}.in", f"{name}.new"], [f"{name}.all"], axis=2))
                write.append(node("Slice", [f"{name}.all", "l", "far", "two"], [f"{name}.out"]))
        k, v = (f"{name}.{'out' if ring else 'all'}" for name in keys)
        return [
            node("MatMul", [f"h{i}", self.weight(n("qkv"), WIDTH, 3 * WIDTH)], [n("all")]),
            node("Reshape", [n("all"), "heads"], [n("heads")]),
            node("Transpose", [n("heads")], [n("turned")], perm=[0, 2, 1, 3]),
            node("Split", [n("turned")], [n("q"), f"{keys[0]}.new", f"{keys[1]}.new"], axis=1, num_outputs=3),
            *write,
            node("Transpose", [k], [n("kt")], perm=[0, 1, 3, 2]),
            node("Add", [n("q"), self.weight(n("u"), 1, HEADS, 1, 64)], [n("qu")]),
            node("MatMul", [n("qu"), n("kt")], [n("content")]),
            node("Add", [n("q"), self.weight(n("w"), 1, HEADS, 1, 64)], [n("qw")]),
            node("MatMul", [n("qw"), self.weight(n(f"table.{rows}"), HEADS, 64, rows)], [n("position")]),
            node("GatherElements", [n("position"), "distances"], [n("shifted")], axis=3),
            node("Add", [n("content"), n("shifted")], [n("scores")]),
            node("Where", ["seen", n("scores"), "far.off"], [n("masked")]),
            node("Softmax", [n("masked")], [n("softmax")], axis=-1),
            node("MatMul", [n("softmax"), v], [n("mixed")]),
            node("Transpose", [n("mixed")], [n("back")], perm=[0, 2, 1, 3]),
            node("Reshape", [n("back"), "flat"], [n("rows")]),
            node("MatMul", [n("rows"), self.weight(n("o"), WIDTH, WIDTH)], [n("o.out")]),
            node("Add", [f"h{i}", n("o.out")], [n("r1")]),
            node("LayerNormalization", [n("r1"), self.weight(n("g"), WIDTH)], [n("n1")]),
            node("MatMul", [n("n1"), self.weight(n("in"), WIDTH, INNER)], [n("inner")]),
            node("Relu", [n("inner")], [n("relu")]),
            node("MatMul", [n("relu"), self.weight(n("out"), INNER, WIDTH)], [n("outer")]),
            node("Add", [n("n1"), n("outer")], [f"h{i + 1}"]),
        ]


@pytest.mark.parametrize("ring", [True, False])
def test_a_large_transformer_xl_is_not_refused_without_a_budget(ring):
    """All its programs: segments of 512 and of 1, and the softmax over all words."""
    large, columns = Large(), M + 2 * L if ring else M
    table = large.weight("words", V, WIDTH)
    graphs = list[tuple[bytes, dict[str, tuple[int, ...]]]]()
    for length in (L, 1):
        rows = columns if ring else M + length
        inputs = {"tokens": (6, [B, length]), "head": (7, [B])}
        memory = {f"{i}.{name}.in": (FLOAT, [B, HEADS, columns, 64]) for i in range(LAYERS) for name in "kv"}
        numbers = {"heads": [B, length, 3 * HEADS, 64], "flat": [B * length, WIDTH], "l": [length], "far": [2**31 - 1],
                   "two": [2], "d": [B, HEADS, length, rows], "s": [B, 1, length, rows]}  # fmt: skip
        nodes = [
            node("Cast", ["head"], ["one"], to=6),
            node("ReduceMax", ["one"], ["any"], keepdims=0),
            node("Expand", ["any", "d"], ["distances"]),
            node("Expand", ["any", "s"], ["seen.i"]),
            node("Cast", ["seen.i"], ["seen"], to=9),
            node("Gather", ["words", "tokens"], ["embedded"]),
            node("Reshape", ["embedded", "flat"], ["h0"]),
            *(one for i in range(LAYERS) for one in large.layer(i, ring, rows)),
        ]
        outputs = [f"{i}.{name}.out" for i in range(LAYERS) for name in "kv"]
        small = [*(constant(*entry) for entry in numbers.items()), constant("far.off", -1e4, np.float32)]
        data = outputs_of(nodes, inputs | memory, [f"h{LAYERS}", *outputs], [*large.constants.values(), *small])
        graphs.append((data, {name: tuple(dims) for name, (_, dims) in (inputs | memory).items()}))
    softmax = [node("Gemm", ["hidden", table], ["linear"], transB=1), node("LogSoftmax", ["linear"], ["logprobs"])]
    given = {"hidden": (FLOAT, [B * L, WIDTH])}
    graphs.append((outputs_of(softmax, given, ["logprobs"], [large.constants[table]]), {"hidden": (B * L, WIDTH)}))
    budget = Budget(large.bytes)
    for data, sizes in graphs:
        Walk(data, "step", sizes, "weights", budget)
    state = LAYERS * 2 * B * HEADS * columns * 64 * 4
    assert 2 * state < budget.taken < 0.8 * (BASE + EACH * budget.weights), budget.taken


def outputs_of(nodes: Any, inputs: Any, outputs: list[str], constants: Any) -> bytes:
    model = onnx.load_model_from_string(graph(nodes, inputs, [], constants, opset=24))
    for output in outputs:
        value = helper.make_tensor_value_info(output, FLOAT, [f"{output}.{axis}" for axis in range(4)])
        del value.type.tensor_type.shape.dim[2 if output[0] in "hl" else 4 :]
        model.graph.output.append(value)
    return model.SerializeToString()


def varint(value: int) -> bytes:
    return (varint_rest(value) if value > 127 else b"") or bytes([value])


def varint_rest(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7)


def held(kind: int, numbers: Sequence[int], field: int = 5, packed: bool = True, more: bytes = b"") -> Walk:
    """A constant whose numbers are written as whole ones of up to 64 bits, in a graph of nothing else."""
    parts = [varint(number % 2**64) for number in numbers]
    body = b"".join(parts)
    tag = varint(field << 3 | 2) + varint(len(body)) if packed else b""
    data = tag + body if packed else b"".join(varint(field << 3) + part for part in parts)
    tensor = varint(1 << 3) + varint(len(numbers)) + varint(2 << 3) + varint(kind) + b"\x42\x01c" + data + more
    inner = b"\x2a" + varint(len(tensor)) + tensor
    return Walk(b"\x08\x0a\x42\x02\x10\x12\x3a" + varint(len(inner)) + inner, "step", {}, "weights", Budget(0))


WHOLE = [(2, 0, 8), (3, 1, 8), (4, 0, 16), (5, 1, 16), (6, 1, 32), (9, 0, 1), (10, 0, 16), (16, 0, 16)]
"""ONNX's number of each type whose numbers stand in the field for 32 bits, whether it has a sign, and its bits."""


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("kind", "sign", "bits"), [*WHOLE, (12, 0, 32)])
def test_whole_numbers_are_held_to_their_type_however_they_are_written(kind, sign, bits, packed):
    """ONNX Runtime takes the low bits of what is larger, so it would see other sizes than the check."""
    field, low, high = 11 if kind == 12 else 5, -(2 ** (bits - 1)) if sign else 0, 2 ** (bits - sign) - 1
    held(kind, [low, high], field, packed)
    for number in (low - 1, high + 1, 2**32 + low, 2**63 - 1, -(2**63), high - 2**64 + 2**40):
        with pytest.raises(RefusedError, match="numbers beyond its type"):
            held(kind, [number], field, packed)


def test_a_constant_has_one_encoding_which_is_its_types_own():
    assert held(7, [-(2**63), 2**63 - 1], 7).values["c"].content == ((-(2**63),) * 2, (2**63 - 1,) * 2)
    held(13, [2**64 - 1], 11)
    for kind, numbers, field, more in (
        (6, [1], 7, b""),  # another type's field
        (7, [1], 5, b""),
        (6, [1], 5, b"\x3a\x01\x01"),  # a second one
        (6, [1], 5, b"\x4a\x04\1\0\0\0"),  # raw bytes as well
        (6, [1, 2], 5, b"\x08\x03"),  # of another number than its sizes say
        (1, [1], 5, b""),
        (8, [1], 5, b""),  # text
        (21, [1], 5, b""),  # 4 bits
        (6, [1], 5, b"\x70\x01"),  # said to be outside
    ):
        with pytest.raises(RefusedError):
            held(kind, numbers, field, more=more)
    with pytest.raises(RefusedError, match="other truth values"):
        taken(graph([], {}, [], [onnx.TensorProto(name="c", data_type=9, dims=[1], raw_data=b"\2")]))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return step_models.counting().write(tmp_path_factory.mktemp("budget") / "step.txl")


def test_a_budget_is_a_ceiling_that_the_message_names(bundle, monkeypatch):
    with pytest.raises(BundleError, match=r"expected at most 100 and .* load it with budget=(\d+)") as caught:
        txl_runtime.load(bundle, backend="cpu", budget=100)
    needed = int(str(caught.value).partition("budget=")[2].partition(",")[0])
    while needed > 100:  # of each graph in turn
        try:
            txl_runtime.load(bundle, backend="cpu", budget=needed)
            break
        except BundleError as error:
            more = int(str(error).partition("budget=")[2].partition(",")[0])
            assert more > needed
            needed = more
    monkeypatch.setenv("TXL_DEPLOY_BUDGET", "100")
    with pytest.raises(BundleError, match="TXL_DEPLOY_BUDGET"):
        txl_runtime.load(bundle, backend="cpu")
    txl_runtime.load(bundle, backend="cpu", budget=needed)  # what is given counts
    monkeypatch.setenv("TXL_DEPLOY_BUDGET", "much")
    with pytest.raises(UsageError, match="TXL_DEPLOY_BUDGET is 'much'"):
        txl_runtime.load(bundle, backend="cpu")


def test_a_budget_that_is_no_number_of_bytes_is_refused(bundle):
    for budget in (0, -1, 1.5, True, "9"):
        with pytest.raises(UsageError, match="budget is"):
            txl_runtime.load(bundle, backend="cpu", budget=budget)


def test_a_state_that_the_manifest_alone_declares_is_counted():
    """It buys nothing either: 2^26 numbers go in, and as many come out."""
    data = outputs_of([node("Neg", ["x"], ["h"])], {"x": (FLOAT, [2**26, 1])}, ["h"], [])
    with pytest.raises(RefusedError, match=f"steps of {2**29} bytes"):
        Walk(data, "step", {"x": (2**26, 1)}, "weights", Budget(0, 2**29 - 1))
    Walk(data, "step", {"x": (2**26, 1)}, "weights", Budget(0, 2**29))
