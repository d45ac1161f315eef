"""Whole programs for engines, made of a bundle's pieces: the same numbers as the runtime's, over chained segments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import txl_runtime
from composed import Runner, segments, spoiled
from frozen import frozen
from onnx import TensorProto, helper
from resealing import copied, reseal
from txl_engines.checking import read_graph
from txl_engines.composing import compose, whole_programs
from txl_engines.shapes import fix_sizes
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.engines.library_features import find_facts
from txl_runtime.errors import BundleError

pytestmark = pytest.mark.device

ADAPTIVE = {"config": {"cutoffs": (20, 40)}}
SHAPES: dict[str, tuple[str | dict[str, Any], str]] = {
    "ring": ("ring", "ring"),
    "rolled": ("ring", "rolled"),
    "ring, adaptive softmax": ("0.8/clusters", "ring"),
    "rolled, adaptive softmax": ("0.8/clusters", "rolled"),
    "ring, fp16, adaptive softmax": ({"precision": "fp16", **ADAPTIVE}, "ring"),
    "rolled, fp16, adaptive softmax": ({"precision": "fp16", **ADAPTIVE}, "rolled"),
    "rolled, hidden memory": ("hidden", "rolled"),
    "rolled, absolute positions": ({"config": {"attn_type": 2}}, "rolled"),
    "no memory": ({"config": {"memory_length": 0}}, "rolled"),
    "ring, zeros, pre-norm": ("zeros", "ring"),
    "ring, window and clamp": ({"config": {"same_length": True, "clamp_length": 3}}, "ring"),
    "ring, single steps": ({"lookup": True}, "ring"),
    "rolled, single steps": ({"lookup": True}, "rolled"),
    "ring, learned positions": ({"config": {"attn_type": 1, "position_rows": 9}}, "ring"),
}
"""Bundles by their names, or by options where none is kept; and the rule."""
QUICK = [shape for shape, (source, _) in SHAPES.items() if isinstance(source, str)]
shapes = pytest.mark.parametrize(
    "shape", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow(keep=1)) for name in SHAPES]
)


@pytest.fixture
def bundle(make_bundle, tmp_path, shape: str) -> Path:
    """A copy of a bundle, to write composed graphs beside its weights."""
    source, _ = SHAPES[shape]
    kept = frozen(source) if isinstance(source, str) else make_bundle(verify=False, batch_size=3, **source)
    return copied(kept, tmp_path / "small.txl")


@shapes
def test_programs_compute_what_the_runtime_does_whatever_stands_in_padding(bundle: Path, shape: str):
    manifest, (_, update) = open_bundle(bundle).manifest, SHAPES[shape]
    b = manifest.batch_size
    close = {"rtol": 0, "atol": 0.03 if manifest.precision == "fp16" else 2e-5}
    for program in whole_programs(manifest, update):
        truth = txl_runtime.load(bundle, update=update).stream(b)
        run, again = Runner(bundle, program), Runner(bundle, program)
        for number, (ids, valid) in enumerate(segments(b, program.segment_length)):
            tokens, targets = ids[:, :-1], ids[:, 1:]
            wanted = truth.step(tokens, valid)
            found, same = (
                runner(spoiled(tokens, valid, 2 * number + seed), valid, spoiled(targets, valid, 7 * number + seed))
                for seed, runner in enumerate((run, again))
            )
            counted = np.arange(program.segment_length) < valid[:, None]
            if program.kind == "last":
                counted, wanted = valid > 0, wanted[np.arange(b), np.maximum(valid, 1) - 1]
            elif program.kind == "score":
                wanted = -np.take_along_axis(wanted, targets[..., None], axis=2)[..., 0]
            np.testing.assert_allclose(found[counted], wanted[counted], **close)
            np.testing.assert_array_equal(found[counted], same[counted], err_msg="padding changed a bit")
            for row in range(b):
                rows, others = (runner.newest(row) for runner in (run, again))
                assert len(rows) == len(manifest.states_of(update))
                for name, values in rows.items():
                    np.testing.assert_array_equal(values, others[name])


@shapes
def test_graphs_hold_nothing_but_what_is_needed(bundle: Path, shape: str):
    opened, (_, update) = open_bundle(bundle), SHAPES[shape]
    manifest = opened.manifest
    programs = whole_programs(manifest, update)
    middle = "-ring" if update == "ring" else ""
    lengths = [5, 4, 1] if shape.endswith("single steps") else [4, 1]
    expected = {f"logprobs{middle}-{length}" for length in lengths}
    expected |= {f"{kind}{middle}-{lengths[0]}" for kind in ("last", "score")}
    assert {program.name for program in programs} == expected
    for program in programs:
        data = compose(opened, program)
        assert compose(opened, program) == data
        path = bundle / "composed.onnx"
        path.write_bytes(data)
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        shapes = {value.name: value.type.tensor_type.shape.dim for value in typed.graph.value_info}
        assert all(size.HasField("dim_value") for dims in shapes.values() for size in dims), "every size is fixed"
        operators = [node.op_type for node in model.graph.node]
        assert not {"If", "Loop", "Scan", "Shape", "Range"} & set(operators)
        in_place = len(manifest.states_of(update)) if update == "ring" else 0
        assert operators.count("TensorScatter") == in_place
        read = {name for node in model.graph.node for name in node.input}
        assert {tensor.name for tensor in model.graph.initializer} <= read
        if program.kind == "score" and manifest.config.cutoffs:
            widths = {dims[-1].dim_value for dims in shapes.values() if dims}
            assert manifest.config.vocab_size not in widths
        graph = read_graph(data, program, bundle, find_facts("tensorrt", "10.16.1").opset)
        assert (graph.attention_layers, graph.scatters) == (2, in_place)
        assert set(graph.weights) == {"weights.safetensors"}


def test_a_segment_of_one_has_no_last_program():
    manifest = open_bundle(frozen("ring")).manifest
    one = tuple(program for program in manifest.programs if program.segment_length != 4)
    manifest = msgspec.structs.replace(manifest, programs=one)
    assert [program.name for program in whole_programs(manifest, "ring")] == ["logprobs-ring-1", "score-ring-1"]


@pytest.mark.parametrize("shape", ["rolled, hidden memory"])
def test_bundles_from_before_the_softmax_stood_apart_still_load_and_build_what_they_hold(bundle: Path):
    document = json.loads((bundle / "manifest.json").read_text())
    document["programs"] = [program for program in document["programs"] if program["update"] != "none"]
    (bundle / "manifest.json").write_text(json.dumps(document))
    opened = open_bundle(bundle)
    programs = whole_programs(opened.manifest, "rolled")
    assert [program.name for program in programs] == ["logprobs-4", "logprobs-1"]
    composed, held = (
        onnx.load_model_from_string(data)
        for data in (compose(opened, programs[0]), (bundle / "logprobs-4.onnx").read_bytes())
    )
    assert {node.name for node in composed.graph.node} < {node.name for node in held.graph.node}
    shapes = [[size.dim_value for size in value.type.tensor_type.shape.dim] for value in composed.graph.input]
    assert shapes == [list(spec.shape) for spec in programs[0].inputs], "B is fixed"
    txl_runtime.load(bundle).stream().step([[1, 2, 3]] * 2)


@pytest.mark.parametrize("shape", ["rolled"])
def test_graphs_that_are_not_what_the_manifest_says_are_told_by_name(bundle: Path):
    opened = open_bundle(bundle)
    programs = {program.name: program for program in whole_programs(opened.manifest, "rolled")}
    path = bundle / "logprobs-4.onnx"
    whole = onnx.load(path, load_external_data=False)

    def with_changes(**changes: Any) -> None:
        changed = onnx.ModelProto()
        changed.CopyFrom(whole)
        for node in changed.graph.node:
            for names in (node.input, node.output):
                names[:] = [changes.get(name, name) for name in names]
        write(path, changed.SerializeToString())

    def write(path: Path, data: bytes) -> None:
        path.write_bytes(data)
        reseal(bundle)

    with_changes(hidden="other")
    with pytest.raises(BundleError, match=r"logprobs-4\.onnx: no value is called hidden, expected what the softmax"):
        compose(open_bundle(bundle), programs["last-4"])
    write(path, b"\xff" * 9)
    with pytest.raises(BundleError, match=r"logprobs-4\.onnx: has the model that is cut off"):
        compose(open_bundle(bundle), programs["score-4"])
    write(path, whole.SerializeToString())
    head = onnx.load(bundle / "head.onnx", load_external_data=False)
    head.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 99
    write(bundle / "head.onnx", head.SerializeToString())
    with pytest.raises(
        BundleError, match=r"head\.onnx: one of its inputs is hidden float32\[rows, 99\], expected hidden"
    ):
        compose(open_bundle(bundle), programs["last-4"])
    head.graph.input[0].type.tensor_type.shape.dim[1].dim_value = opened.manifest.config.d_model
    for entry in head.graph.initializer[0].external_data:
        if entry.key == "offset":
            entry.value = "8"
    write(bundle / "head.onnx", head.SerializeToString())
    with pytest.raises(BundleError, match=r"embedding\.tables\.0 is another tensor than in logprobs-4\.onnx"):
        compose(open_bundle(bundle), programs["last-4"])


def test_open_sizes_become_numbers_and_shapes_constants():
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], start=1, end=2),
        helper.make_node("Squeeze", ["shape"], ["length"]),
        helper.make_node("Cast", ["length"], ["count"], to=TensorProto.INT32),
        helper.make_node("Range", ["zero", "count", "one"], ["places"]),
        helper.make_node("Add", ["places", "head"], ["moved"]),
        helper.make_node("Mul", ["x", "x"], ["y"]),
    ]
    constants = [onnx.numpy_helper.from_array(np.array(n, np.int32), name) for name, n in (("zero", 0), ("one", 1))]
    inputs = [value("x", TensorProto.FLOAT, [2, "segment", "rest"]), value("head", TensorProto.INT32, [1])]
    outputs = [value("moved", TensorProto.INT32, ["segment"]), value("y", TensorProto.FLOAT, [2, "segment", "rest"])]
    graph = helper.make_graph(nodes, "small", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    before = model.SerializeToString()
    fixed = fix_sizes(model, {"segment": 5})
    assert model.SerializeToString() == before
    assert [node.op_type for node in fixed.graph.node] == ["Add", "Mul"]
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in fixed.graph.initializer}
    np.testing.assert_array_equal(found["places"], np.arange(5, dtype=np.int32))
    assert fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value == 5
    assert fixed.graph.input[0].type.tensor_type.shape.dim[2].dim_param == "rest"
