"""Weights as inputs of engines: what is given and what stays, the same numbers, and the same kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from composed import run_graph
from numpy.typing import NDArray
from onnx import TensorProto, helper
from resealing import copied
from support import cli
from txl_engines import given_weights
from txl_engines.building import NEWEST_OPSET, ComposedEngines
from txl_engines.bundles import build_bundle, choose_weights
from txl_engines.checking import Graph, read_graph
from txl_engines.composing import compose, whole_programs
from txl_engines.given_weights import give_weights
from txl_report.facts.engines import weights_held
from txl_runtime.bundle.engines.sidecar import GivenWeight, distinct, held_weights
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.tables import tensor_bytes
from txl_runtime.device.dtypes import stored_type
from txl_runtime.errors import UsageError
from verified_steps import Heard

pytestmark = pytest.mark.device


@pytest.fixture
def bundle(bundle, monkeypatch) -> Path:
    """One whose matrices count as large."""
    monkeypatch.setattr(given_weights, "LEAST_BYTES", 256)
    return bundle


def as_given(graph: Graph, file: Path) -> dict[str, NDArray[Any]]:
    """Read a graph's given weights from the file of weights."""
    found = {}
    for weight in graph.given:
        dtype, shape = stored_type(weight.dtype), weight.fixed
        stored = (*shape[:-2], shape[-1], shape[-2]) if weight.turned else shape
        values = np.fromfile(file, dtype, np.prod(shape), offset=weight.offset).reshape(stored)
        found[weight.name] = values.swapaxes(-1, -2) if weight.turned else values
    return found


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_program_computes_the_same_of_weights_that_are_given(bundle: Path, update: str) -> None:
    opened, draws = open_bundle(bundle), np.random.default_rng(0)
    for program in whole_programs(opened.manifest, update):
        own = read_graph(compose(opened, program), program, bundle, NEWEST_OPSET)
        shared = give_weights(own, opened.manifest.weights)
        assert len(shared.given) == 10, "two uses of the table, four matrices a layer"
        assert {weight.turned for weight in shared.given} == {True, False}
        assert (shared.sha256, shared.weights) == (own.sha256, own.weights)
        feeds = {
            spec.name: draws.integers(0, 2, spec.fixed).astype(np.int32)
            if spec.dtype == "int32"
            else draws.normal(size=spec.fixed).astype(stored_type(spec.dtype))
            for spec in program.inputs
        }
        assert len(shared.nodes) == len(own.nodes) + sum(weight.turned for weight in shared.given)
        expected = run_graph(own.data, bundle, feeds)
        found = run_graph(shared.data, bundle, feeds | as_given(shared, bundle / opened.manifest.weights))
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5, err_msg=f"{program.name}: {name}")


SIDE, WIDE = 16, 32


def graph_of(*nodes: Any, folder: Path, **weights: tuple[int, ...]) -> Graph:
    """A graph of x [4, 16] with these weights, which lie behind one another in a file."""
    made, offset = [], 0
    for name, shape in weights.items():
        kind = TensorProto.INT32 if name.startswith("whole") else TensorProto.FLOAT
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
        size = 4 * int(np.prod(shape))
        for key, value in {"location": "w.bin", "offset": str(offset), "length": str(size)}.items():
            tensor.external_data.add(key=key, value=value)
        made.append(tensor)
        offset += size
    (folder / "w.bin").write_bytes(np.random.default_rng(0).normal(size=offset // 4).astype("<f4").tobytes())
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y"))
    ids = helper.make_tensor_value_info("ids", TensorProto.INT32, [4])
    model = helper.make_model(
        helper.make_graph(list(nodes), "g", [x, ids], [y], made), opset_imports=[helper.make_opsetid("", 18)]
    )
    names = tuple((node.name, node.op_type) for node in model.graph.node)
    return Graph(model.SerializeToString(), folder / "g.onnx", "0" * 64, {}, names, 0, 0)


def given_of(*nodes: Any, folder: Path, **weights: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], int, bool]]:
    changed = give_weights(graph_of(*nodes, folder=folder, **weights), "w.bin")
    return {weight.name: (weight.fixed, weight.offset, weight.turned) for weight in changed.given}


def test_each_use_of_a_weight_is_an_input_and_what_would_be_copied_stays(tmp_path: Path) -> None:
    large, node = (512, 64), helper.make_node
    assert given_of(node("MatMul", ["x", "w"], ["y"]), folder=tmp_path, w=large) == {"w.turned": ((64, 512), 0, True)}
    assert given_of(node("MatMul", ["x", "w"], ["y"]), folder=tmp_path, w=(3, *large)) == {
        "w.turned": ((3, 64, 512), 0, True)
    }
    tied = (node("Gather", ["w", "ids"], ["h"]), node("Gemm", ["h", "w"], ["y"], transB=1))
    assert given_of(*tied, folder=tmp_path, small=(4,), w=large) == {
        "w.gathered": (large, 16, False),
        "w.linear": (large, 16, False),
    }
    changed = onnx.load_from_string(give_weights(graph_of(*tied, folder=tmp_path, w=large), "w.bin").data)
    assert [node.input[place] for node, place in zip(changed.graph.node, (0, 1), strict=True)] == [
        "w.gathered",
        "w.linear",
    ]
    for stays in (
        node("MatMul", ["w", "x"], ["y"]),
        node("Gemm", ["x", "w"], ["y"]),
        node("Gather", ["w", "ids"], ["y"], axis=1),
        node("Add", ["x", "w"], ["y"]),
    ):
        assert given_of(stays, folder=tmp_path, w=large) == {}
    both = (node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "w"], ["y"]))
    assert given_of(*both, folder=tmp_path, w=large) == {}, "a weight that is held is not given besides"
    assert given_of(node("MatMul", ["x", "w"], ["y"]), folder=tmp_path, w=(8, 8)) == {}, "it is small"
    assert given_of(node("Gather", ["whole", "ids"], ["y"]), folder=tmp_path, whole=large) == {}, "no real numbers"
    assert given_of(node("MatMul", ["x", "w"], ["y"]), folder=tmp_path, w=(20000,)) == {}, "a vector"
    assert given_of(node("Gather", ["w", "ids"], ["y"]), folder=tmp_path, w=(20000,)) == {}, "a vector"
    assert given_of(node("MatMul", ["x", "y"], ["h"]), folder=tmp_path, y=large) == {}, "the graph returns it"
    other = graph_of(node("MatMul", ["x", "w"], ["y"]), folder=tmp_path, w=large)
    assert give_weights(other, "another.bin").given == ()


@pytest.mark.parametrize("shape", [(512, 65), (513, 64), (3, 512, 65)])
def test_a_matrix_of_an_odd_size_stays_where_a_product_reads_it(tmp_path: Path, shape: tuple[int, ...]) -> None:
    node = helper.make_node
    assert given_of(node("MatMul", ["x", "w"], ["y"]), folder=tmp_path, w=shape) == {}
    assert given_of(node("Gemm", ["x", "w"], ["y"], transB=1), folder=tmp_path, w=shape) == {}
    tied = (node("Gather", ["w", "ids"], ["h"]), node("Gemm", ["h", "w"], ["y"], transB=1))
    assert given_of(*tied, folder=tmp_path, w=shape) == {}
    assert given_of(node("Gather", ["w", "ids"], ["y"]), folder=tmp_path, w=shape) == {"w.gathered": (shape, 0, False)}


def test_what_no_node_reads_stays_for_whatever_else_reads_it(tmp_path: Path) -> None:
    graph = graph_of(helper.make_node("Relu", ["x"], ["y"]), folder=tmp_path, w=(512, 64))
    changed = give_weights(graph, "w.bin")
    assert changed.given == ()
    assert [tensor.name for tensor in onnx.load_from_string(changed.data).graph.initializer] == ["w"]


@pytest.mark.parametrize("name", ["w.turned", "w.turned.back"])
@pytest.mark.parametrize("read", [True, False])
def test_a_weight_stays_whose_new_name_is_a_value_of_the_graph(tmp_path: Path, name: str, read: bool) -> None:
    node = helper.make_node
    nodes = node("Relu", ["x"], [name]), node("MatMul", [name if read else "x", "w"], ["y"])
    assert given_of(*nodes, folder=tmp_path, w=(512, 64)) == {}


def test_a_table_of_two_uses_lies_on_the_device_once_and_what_is_not_given_stays_in_the_engine(bundle: Path) -> None:
    opened = open_bundle(bundle)
    (program, *_) = whole_programs(opened.manifest, "ring")
    own = read_graph(compose(opened, program), program, bundle, NEWEST_OPSET)
    shared = give_weights(own, opened.manifest.weights)
    table = [weight for weight in shared.given if weight.name.endswith((".gathered", ".linear"))]
    assert len(table) == 2
    assert len(distinct(table)) == 1
    given = sum(map(tensor_bytes, distinct(shared.given).values()))
    assert (own.given, own.weight_bytes) == ((), given + shared.weight_bytes)
    assert 0 < shared.weight_bytes < 0.2 * own.weight_bytes


def test_codes_of_two_scales_at_one_place_are_two_weights() -> None:
    """An engine multiplies by its own scale, so that codes which were made with a second one would be wrong."""
    one = GivenWeight(name="w", dtype="int8", shape=(64, 64), offset=0, turned=False, scale=0.1)
    other = msgspec.structs.replace(one, name="v", shape=(128, 64), scale=0.5)
    assert len(distinct([one, other])) == 2
    assert len(distinct([one, msgspec.structs.replace(other, scale=0.1)])) == 1


def test_what_engines_hold_is_told_in_a_line() -> None:
    assert weights_held(2, 2_000_000, 0) == "weights on the device: 2.0 MB in 2 engines, each of which holds its own"
    told = "weights on the device: 7.0 MB once + 600.0 kB in 2 engines = 7.6 MB"
    assert weights_held(2, 7_600_000, 7_000_000) == told


class Able:
    title, shares = "TensorRT-RTX 9", True


@pytest.mark.parametrize(
    ("asked", "rule", "programs", "expected"),
    [
        (None, "ring", 2, "once"),
        (None, "replace", 2, "once"),
        (None, "ring", 1, "each"),
        (None, "rolled", 4, "each"),
        ("each", "ring", 4, "each"),
        ("once", "ring", 1, "once"),
    ],
)
def test_weights_are_shared_where_that_gains_something(asked, rule, programs, expected) -> None:
    assert choose_weights(asked, Able(), rule, programs) == expected  # type: ignore[arg-type]


def test_who_asks_for_shared_weights_where_there_are_none_is_refused(bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"--weights is once, but engines of rolled memory by TensorRT-RTX 9 hold"):
        choose_weights("once", Able(), "rolled", 4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"expected --target rtx and another memory than rolled; leave --weights out"):
        build_bundle(bundle, "cuda", weights="once")
    assert not ComposedEngines().shares


def test_real_engines_of_shared_weights_have_the_same_kernels_and_are_built_again_for_others(
    make_bundle, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    wide = {"d_model": 192, "d_embed": 192, "n_head": 6, "d_head": 32, "d_inner": 769, "vocab_size": 400}
    made = make_bundle(config=wide, precision="fp16", verify=False)
    bundle = copied(made, tmp_path / "wide.txl")
    shared = build_bundle(bundle, "rtx", (86,), kinds=("logprobs",))
    assert "6 read where all engines of the bundle read them" in " ".join(
        cli("inspect", bundle / shared.engines[0].file).stdout.split()
    )
    own = build_bundle(bundle, "rtx", (86,), kinds=("logprobs",), weights="each")
    weights = open_bundle(bundle).manifest.weight_bytes
    assert 1.8 * weights < own.weight_bytes <= 2 * weights
    assert own.shared_weight_bytes == 0
    assert shared.weight_bytes < 1.7 * weights, "what has odd sizes is there twice"
    older = [msgspec.structs.replace(engine.sidecar, weight_bytes=None) for engine in own.engines]
    assert held_weights(older, weights) == (2 * weights, 0)
    for one, other in zip(shared.engines, own.engines, strict=True):
        assert not other.reused
        assert len(one.sidecar.identity.given) == 6, (
            "two matrices a layer, the others have odd sizes, and the table for both its uses"
        )
        assert one.sidecar.identity.onnx == other.sidecar.identity.onnx
        assert one.sidecar.kernels == other.sidecar.kernels
        assert (one.sidecar.fused_attention, one.sidecar.copying) == (
            other.sidecar.fused_attention,
            other.sidecar.copying,
        )
    assert all(
        engine.reused for engine in build_bundle(bundle, "rtx", (86,), kinds=("logprobs",), weights="each").engines
    )


def test_who_insists_on_shared_weights_where_all_are_small_is_told(bundle: Path, monkeypatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    monkeypatch.undo()  # 64 KiB again
    heard = Heard()
    made = build_bundle(bundle, "rtx", (86,), kinds=("logprobs",), weights="once", listener=heard)
    assert made.shared_weight_bytes == 0
    assert [said for said in heard.warnings if "so each engine holds all" in said] == [
        "no weight is of 65536 bytes and read in a way that is shared, so each engine holds all"
    ]
