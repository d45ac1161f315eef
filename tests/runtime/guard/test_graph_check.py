"""Graphs with what no graph needs, or whose sizes follow from values, are refused before an engine sees them."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import step_models
import txl_runtime
from hostile_graphs import HOSTILE, TRIED, hostile, insert, node
from onnx import TensorProto, helper, numpy_helper
from resealing import copied, reseal
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import BundleError
from txl_runtime.guard.forms import FORMS, MICROSOFT, PLAIN
from txl_runtime.guard.graph_check import NODES, SIDES, FedSizeError, Walk, check_graph
from txl_runtime.guard.protobuf import RefusedError, fields, table

FLOAT = TensorProto.FLOAT


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log-probabilities of tokens [3, 4], with a state [3, 11]."""
    return step_models.counting().write(tmp_path_factory.mktemp("graphs") / "step.txl")


def program(manifest: Any) -> Any:
    return next(entry for entry in manifest.programs if entry.segment_length == 4)


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in TRIED])
def test_a_hostile_graph_is_refused_before_an_engine_is_called(bundle, tmp_path, monkeypatch, name):
    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine saw it")

    path = changed(bundle, tmp_path / "a.txl", hostile(bundle, name))
    monkeypatch.setattr(onnxruntime, "InferenceSession", called)
    with pytest.raises(BundleError, match=r"step-4\.onnx: has .*, expected .*; export the model again"):
        txl_runtime.load(path, backend="cpu")


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
        Walk(nested, "step", "weights", 0)


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
        Walk(data, "step", "weights", 0)


@pytest.mark.parametrize("many", ["nodes", "attributes", "values", "constants", "inputs"])
def test_time_and_memory_are_linear_in_the_file(many):
    """At most 60 bytes for each byte of a file of many small parts, and 4 times the time for twice of it."""
    seconds, least = [], []
    for count in (500, 1000) if many == "inputs" else (1500, 3000):
        data = _many(many, count).SerializeToString()
        tracemalloc.start()
        begun = time.process_time()
        try:
            Walk(data, "step", "weights", 0)
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


def checked(*nodes: onnx.NodeProto, **constants: Any) -> Walk:
    """A graph that is fed x [2, 3] and n [1]; constants are int64 where they are no arrays."""
    x = helper.make_tensor_value_info("x", FLOAT, [2, 3])
    n = helper.make_tensor_value_info("n", TensorProto.INT64, [1])
    model = helper.make_model(helper.make_graph([], "g", [x, n], []), ir_version=10)
    model.opset_import[0].version = 18
    model.opset_import.add(domain=MICROSOFT, version=1)
    insert(model, *nodes, **constants)
    return Walk(model.SerializeToString(), "step", "weights", 0)


SIZED = [
    (name, place) for name, form in FORMS[""].items() for place in form.sizes if name not in ("Resize",) or place == 3
]


@pytest.mark.parametrize(("operator", "place"), SIZED)
def test_a_size_follows_from_shapes_and_constants_never_from_values(operator, place):
    """E.g. Expand(x, Shape(x)) passes, and Expand(x, n) does not, nor what is computed of n."""
    form = FORMS[""][operator]
    attributes = dict.fromkeys(form.required, 0)
    shape = node("Shape", "x", "shape"), node("Add", "shape one", "more")
    fed = node("Cast", "n", "m", to=TensorProto.INT64), node("Add", "m shape", "more")
    for size, passes in (("shape", True), ("one", True), ("more", True), ("n", False), ("more", False)):
        names = ["one"] * len(form.inputs)
        names[0] = "one" if 0 in form.sizes else "x"
        names[place] = size
        made = (*(shape if passes else (*shape[:1], *fed)), node(operator, " ".join(names), "y", **attributes))
        if passes:
            checked(*made, one=[1])
            continue
        with pytest.raises(FedSizeError, match=f"a size that is computed from data at {operator}"):
            checked(*made, one=[1])


def test_places_are_found_among_constants_alone():
    """NonZero of what a model is fed returns as many places as there are, and eight of them took gigabytes."""
    checked(node("NonZero", "c", "p"), node("Gather", "x p", "y"), c=[1, 0])
    checked(node("Shape", "x", "s"), node("NonZero", "s", "p"), node("Expand", "x p", "y"))
    with pytest.raises(FedSizeError, match="a NonZero of data at NonZero"):
        checked(node("NonZero", "x", "p"))


@pytest.mark.parametrize("operator", ["Div", "Mod"])
@pytest.mark.parametrize("kind", ["int8", "int32", "uint16", "int64"])
def test_no_whole_number_is_divided_by_a_constant_that_ends_the_process(operator, kind):
    for divisor in (np.array([1], kind), np.arange(1, 100).astype(kind)):
        checked(node(operator, "n b", "y"), b=divisor)
    wrong = [np.array(0, kind), np.array([1] * 300 + [0], kind)]
    for divisor in [*wrong, np.array([-1], kind)] if kind[0] == "i" else wrong:
        with pytest.raises(RefusedError, match="divided by 0 or -1"):
            checked(node(operator, "n b", "y"), b=divisor)
    checked(node(operator, "x b", "y"), b=np.zeros(1, np.float32))


def test_a_divisor_of_whole_numbers_lies_in_the_graph():
    tensor = TensorProto(name="w", data_type=TensorProto.INT32, dims=[1], data_location=1)
    for key, value in {"location": "weights", "offset": "0", "length": "4"}.items():
        tensor.external_data.add(key=key, value=value)
    x = helper.make_tensor_value_info("x", TensorProto.INT32, [1])
    graph = helper.make_graph([node("Div", "x w", "y")], "g", [x], [], [tensor])
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    with pytest.raises(RefusedError, match="divided by some in the weight file"):
        Walk(data, "step", "weights", 4)


def test_the_constant_of_a_node_is_one():
    checked(node("Constant", "", "y", value_ints=[1, 2]), node("Reshape", "x y", "z"))
    with pytest.raises(RefusedError, match="divided by 0"):
        checked(node("Constant", "", "y", value_int=0), node("Div", "n y", "z"))
    with pytest.raises(RefusedError, match="divided by 0"):
        checked(node("Constant", "", "y", value_int=-1), node("Identity", "y", "i"), node("Mod", "n i", "z"))
    for attributes in ({}, {"value_int": 1, "value_float": 1.0}):
        with pytest.raises(RefusedError, match="a constant of several values or none"):
            checked(node("Constant", "", "y", **attributes))


GONE = "GlobalLpPool LRN LpNormalization LpPool ReverseSequence"
REFUSED = [
    *((operator, {}, "the operator") for operator in (*GONE.split(), "RotaryEmbedding", "MeanVarianceNormalization")),
    *(("Softmax", {"axis": n}, "numbers of 32 bits") for n in (2**31, -(2**31) - 1, 2**32 + 1, 2**63 - 1)),
]


@pytest.mark.parametrize(("operator", "attributes", "said"), REFUSED)
def test_what_no_exporter_writes_is_refused(operator, attributes, said):
    with pytest.raises(RefusedError, match=said):
        checked(node(operator, "x", "y", **attributes))


def blocks(**changes: Any) -> None:
    """[2, 64] by 64 x 8 in 4 bits, in two blocks for each column."""
    given = {"K": 64, "N": 8, "bits": 4, "block_size": 32} | changes
    codes, scales, zeros = given.pop("codes", 8 * 2 * 16), given.pop("scales", 16), given.pop("zeros", 8)
    more, by, kind = given.pop("more", ""), given.pop("by", "b"), given.pop("kind", np.float32)
    given = {name: value for name, value in given.items() if value is not None}
    checked(
        node("MatMulNBits", f"x {by} s z {more}".strip(), "y", domain=MICROSOFT, **given),
        b=np.ones(codes, np.uint8),
        s=np.ones(scales, kind),
        z=np.ones(zeros, np.uint8),
        g=np.zeros(64, np.int32),
    )


def test_quantised_weights_of_the_exporters_form_pass():
    blocks()
    blocks(bits=8, codes=8 * 2 * 32, zeros=16)


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 2, "more": "g"},  # ONNX Runtime reads it as 4 bits: twice the bytes that there are
        {"bits": 2, "codes": 8 * 2 * 8, "zeros": 8},
        {"more": "g"},
        {"more": "- x"},
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
        blocks(**changes)


def test_a_quantised_product_has_no_bias():
    """ONNX Runtime 1.23 reads behind the end of a bias that is too short."""
    names = "a b one scale zero -"
    given = {"a": np.ones((2, 8), np.uint8), "b": np.ones((8, 3), np.int8), "one": np.float32([1])}
    given |= {"scale": np.ones(3, np.float32), "zero": np.uint8([128]), "bias": np.ones(1, np.float32)}
    checked(node("MatMulIntegerToFloat", names.removesuffix(" -"), "y", domain=MICROSOFT), **given)
    with pytest.raises(RefusedError, match="7 inputs at MatMulIntegerToFloat"):
        checked(node("MatMulIntegerToFloat", f"{names} bias", "y", domain=MICROSOFT), **given)


BIASES = {
    "a number for each channel": ("w", "b", 2, {}, True),
    "one number": ("w", "b", 1, {}, False),
    "one number between quantisers": ("weight", "bias", 1, {}, False),
    "a number for each channel between quantisers": ("weight", "bias", 2, {}, True),
    "a computed bias": ("w", "more", 2, {}, False),
    "computed weights": ("other", "b", 2, {}, False),
    "groups of a transposed convolution": ("w", "b", 6, {"group": 2}, True),
    "numbers for one of two groups": ("w", "b", 3, {"group": 2}, False),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_convolution_s_bias_has_a_number_for_each_channel(name):
    """ONNX Runtime up to 1.25 reads behind the end of a shorter one."""
    weight, bias, numbers, said, passes = BIASES[name]
    nodes = [node("DequantizeLinear", "v scale", "weight"), node("DequantizeLinear", "c scale", "bias")]
    nodes += [node("Abs", "b", "more"), node("Abs", "w", "other")]
    nodes += [node("ConvTranspose" if said else "Conv", f"x {weight} {bias}", "y", **said)]
    given = {"w": np.ones((2, 3, 1), np.float32), "b": np.ones(numbers, np.float32), "scale": np.float32(1)}
    given |= {"v": np.ones((2, 3, 1), np.int8), "c": np.ones(numbers, np.int32)}
    with contextlib.nullcontext() if passes else pytest.raises(RefusedError, match=r"a bias of .* for weights of "):
        checked(*nodes, **given)


def test_a_product_of_integers_has_constant_weights():
    """With an Add, ONNX Runtime up to 1.25 reads behind the end of a bias shorter than computed columns."""
    given = {"w": np.ones((8, 3), np.int8), "zero": np.uint8(128), "other": np.int8(0)}
    nodes = [node("DynamicQuantizeLinear", "x", "a scale point")]
    checked(*nodes, node("MatMulInteger", "a w point other", "y"), **given)
    with pytest.raises(RefusedError, match="weights that are computed"):
        checked(*nodes, node("Identity", "w", "v"), node("MatMulInteger", "a v point other", "y"), **given)


def test_sides_beyond_those_of_any_graph_are_refused():
    with pytest.raises(RefusedError, match=f"at most {SIDES}"):
        checked(node("Sum", "x " * (SIDES + 1), "y"))


def test_nothing_is_printed_of_a_graph_that_the_engine_refuses(bundle, tmp_path, monkeypatch, capfd):
    """The engine's own package prints "EP Error" of what fails in some ways, and tries the same again."""
    model = onnx.load(bundle / "step-4.onnx")
    insert(model, node("Add", "tokens state.seen.in", "x"))  # of two types
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
