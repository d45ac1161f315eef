"""Keys and values stay where they are: which kernels of a real build touch memory, and attention as one operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import small_graphs
from composed import run_graph
from onnx import TensorProto, helper
from txl_engines.attention_operator import POSITIONS, unite_attention
from txl_engines.checking import Graph, read_graph
from txl_engines.compiler import Compiler
from txl_engines.composing import compose, whole_programs
from txl_engines.layers import Kernel, read_kernels, read_layers
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.device.engines.library import load_library
from txl_runtime.device.engines.library_features import find_facts
from txl_runtime.ladder import rung

pytestmark = pytest.mark.device

LAYERS = 2
HEADS = {"d_model": 64, "d_embed": 64, "n_head": 2, "d_head": 32, "d_inner": 64}
ODD = HEADS | {"d_model": 82, "d_embed": 82, "d_head": 41}
MEMORY = {"float32": np.float32, "float16": np.float16, "int32": np.int32}


def composed(bundle: Path, length: int, kind: str = "logprobs", update: str = "ring") -> tuple[Graph, Program]:
    """A program of a bundle, checked, as its attention was composed."""
    opened = open_bundle(bundle)
    programs = whole_programs(opened.manifest, update)
    program = next(each for each in programs if (each.kind, each.segment_length) == (kind, length))
    return read_graph(compose(opened, program), program, bundle, 24), program


def touching(graph: Graph) -> list[Kernel]:
    """The kernels of a build by TensorRT-RTX that read or write memory."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    library = load_library("rtx")
    compiler = Compiler(library)
    parsed = compiler.parse(graph.data, str(graph.path))
    assert not parsed.errors
    library.journal.layers = ""
    assert compiler.build(parsed, (86,), on_step=lambda: None) is not None
    states = graph.states
    assert len(states) == 4 * LAYERS
    return [k for k in read_kernels(library.journal.layers) if k.reads(states) or k.writes(states)]


@pytest.mark.parametrize(
    "precision", ["fp16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "bf16"))]
)
def test_a_step_of_one_position_touches_memory_with_scatter_and_attention_alone(make_bundle, precision: str):
    graph, program = composed(make_bundle(config=HEADS, batch_size=2, precision=precision, verify=False), 1)
    kernels = touching(unite_attention(graph, program))
    new = {name for name in graph.states if name.startswith("new_")}
    attends = [kernel for kernel in kernels if kernel.attends]
    scatters = [kernel for kernel in kernels if not kernel.attends]
    assert len(attends) == LAYERS, "one fused kernel a layer"
    assert set().union(*(kernel.reads(new) for kernel in attends)) == new, "it reads every buffer itself"
    assert not any(kernel.writes(graph.states) for kernel in attends)
    assert len(scatters) == LAYERS
    assert all("Scat" in kernel.name and kernel.writes(new) for kernel in scatters), scatters
    assert not any(kernel.copies(graph.states) for kernel in kernels)
    memory = next(tensor.bytes for kernel in attends for tensor in kernel.inputs if tensor.name in new)
    strays = [t for k in scatters for t in k.outputs if t.name not in new and t.bytes >= memory]
    assert strays == [], "no copy of a buffer leaves by another door"


@pytest.mark.parametrize(
    ("length", "config", "precision"),
    [(4, HEADS, "fp16"), (4, HEADS, "fp32"), pytest.param(1, ODD, "fp16", marks=pytest.mark.slow)],
)
def test_what_is_still_copied(make_bundle, length: int, config: dict[str, Any], precision: str):
    """TensorRT-RTX 1.7 copies keys and values, once each a layer, where this says so; a change is to be seen."""
    graph, program = composed(make_bundle(config=config, batch_size=2, precision=precision, verify=False), length)
    united = unite_attention(graph, program)
    assert united is graph, "as it was composed"
    kernels = touching(united)
    assert sum(kernel.copies(graph.states) for kernel in kernels) == 2 * LAYERS
    assert not any(kernel.attends for kernel in kernels), "attention reads the copies"


def test_products_copy_at_one_position_too(make_bundle):
    """The reason for all this: without it there are two kernels more in every layer."""
    graph, program = composed(make_bundle(config=HEADS, batch_size=2, precision="fp16", verify=False), 1)
    before, after = touching(graph), touching(unite_attention(graph, program))
    assert sum(kernel.copies(graph.states) for kernel in before) == 2 * LAYERS
    assert len(before) == len(after) + LAYERS, "two copies a layer that touched memory, and one attention that did not"


@pytest.mark.parametrize(
    ("config", "precision"),
    [({}, "fp32"), ({}, "fp16"), pytest.param({"attn_type": 1}, "fp32", marks=pytest.mark.slow)],
)
def test_one_operator_computes_what_the_products_do(make_bundle, config: dict[str, Any], precision: str):
    changes = HEADS | config | ({"position_rows": 9} if config else {})
    bundle = make_bundle(config=changes, batch_size=2, precision=precision, verify=False)
    graph, program = composed(bundle, 1)
    united = unite_attention(graph, program)
    assert [kind for _, kind in united.nodes].count("Attention") == united.attention_layers == LAYERS
    assert "Softmax" not in {kind for _, kind in united.nodes}
    assert (united.sha256, united.scatters, united.states) == (graph.sha256, graph.scatters, graph.states)
    draws = np.random.default_rng(0)
    feeds = {}
    for spec in program.inputs:
        if spec.dtype == "int32":
            feeds[spec.name] = np.full(spec.fixed, {"head": 3, "fill": 2, "valid": 1}.get(spec.name, 7), np.int32)
        else:  # rows that nobody may see are far from the others: their scores beyond 1e4, where -1e4 hides nothing
            rows = draws.normal(0, 3, spec.fixed)
            rows[:, :, 3:] *= 1e3
            feeds[spec.name] = rows.astype(MEMORY[spec.dtype])
    sides = []
    for each in (graph, united):
        path = bundle / "tried.onnx"
        path.write_bytes(each.data)
        try:
            sides.append((onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]), dict(feeds)))
        finally:
            path.unlink()
    states = open_bundle(bundle).manifest.states_of("ring")
    memory = open_bundle(bundle).manifest.memory_length
    assert states[0].slots is not None
    assert memory is not None
    limit = 1e-5 if precision == "fp32" else rung(precision, "rtx").deviation
    assert limit is not None
    names, written = [spec.name for spec in program.outputs], {state.output for state in states}
    for step in range(2 * states[0].slots):  # each side goes on from its own memory, several times round the ring
        results, head = [], (3 + step) % states[0].slots
        for session, given in sides:
            assert given["head"].tolist() == [head] * 2
            found = dict(zip(names, session.run(None, given), strict=True))
            given |= {state.input: found[state.output] for state in states}
            given["head"] = (given["head"] + 1) % states[0].slots
            given["fill"] = np.minimum(given["fill"] + 1, memory)
            given["tokens"] = np.full_like(given["tokens"], step % 11)
            results.append({n: values[:, :, head] if n in written else values for n, values in found.items()})
        for name, products in results[0].items():
            apart = (results[1][name].astype(np.float64) - products).std() / products.astype(np.float64).std()
            assert apart <= limit, (name, step)


@pytest.mark.parametrize("precision", ["fp16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_positions_of_a_draft_attend_as_heads_copy_nothing_and_compute_the_same(make_bundle, precision: str):
    bundle = make_bundle(config=HEADS, batch_size=2, precision=precision, verify=False, lookup=True)
    assert open_bundle(bundle).manifest.stepwise == POSITIONS == 5
    graph, program = composed(bundle, 5)
    assert unite_attention(graph, program) is unite_attention(graph, program, 4) is graph
    united, draws = unite_attention(graph, program, POSITIONS), np.random.default_rng(0)
    assert [kind for _, kind in united.nodes].count("Attention") == united.attention_layers == LAYERS
    fixed = {"head": [3, 9], "fill": [2, 12], "valid": [5, 4]}
    for _ in range(3):
        feeds = {
            spec.name: np.array(fixed.get(spec.name, draws.integers(0, 60, spec.fixed)), np.int32)
            if spec.dtype == "int32"
            else draws.normal(size=spec.fixed).astype(MEMORY[spec.dtype])
            for spec in program.inputs
        }
        expected, found = (run_graph(each.data, bundle, feeds) for each in (graph, united))
        limit = 1e-5 if precision == "fp32" else rung(precision, "rtx").deviation
        for name, products in expected.items():
            ours, theirs = (
                each[:, :4].astype(np.float64) if name == "logprobs" else each for each in (found[name], products)
            )
            assert (ours - theirs).std() <= limit * products.astype(np.float64).std(), name
    if precision == "fp16":
        kernels = touching(united)
        assert not any(kernel.copies(graph.states) for kernel in kernels)
        assert (
            len(frozenset().union(*(kernel.reads(graph.states) for kernel in kernels if kernel.attends))) == 2 * LAYERS
        )
        assert sum(kernel.copies(graph.states) for kernel in touching(graph)) == 2 * LAYERS


def test_other_graphs_stay_as_they_are(make_bundle):
    bundle = make_bundle(config=HEADS, batch_size=2, precision="fp16", verify=False)
    for length, kind, update in ((4, "logprobs", "ring"), (4, "score", "ring"), (1, "logprobs", "rolled")):
        graph, program = composed(bundle, length, kind, update)
        assert unite_attention(graph, program) is graph
    plain = small_graphs.ring(length=1)  # no mask: nothing says which slots are visible
    graph = read_graph(plain.SerializeToString(), small_graphs.program(plain, "ring"), Path(), 24)
    assert unite_attention(graph, small_graphs.program(plain, "ring")) is graph


def test_only_libraries_that_were_looked_at_get_it():
    assert find_facts("rtx", "1.7.1.116").reads_in_place
    assert not any(find_facts("tensorrt", version).reads_in_place for version in ("10.3", "10.16", "11.4"))


@pytest.mark.parametrize(("scale", "bare"), [(1.0, True), (0.25, False)])
def test_a_product_with_one_is_taken_away_and_others_stay(scale: float, bare: bool):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    shape = [1, 2, 4, 32]
    values = [small_graphs.value(name, shape, TensorProto.FLOAT) for name in ("q", "k", "v")]
    node = helper.make_node("Attention", ["q", "k", "v"], ["out"], scale=scale)
    graph = small_graphs.model([node], values, [small_graphs.value("out", shape, TensorProto.FLOAT)], opset=24)
    library = load_library("rtx")
    parsed = Compiler(library).parse(graph.SerializeToString(), "small.onnx")
    assert not parsed.errors
    index = parsed.layer_types.index("ATTENTION_INPUT")
    boundary = parsed.network.get_layer(index)
    names = [boundary.get_input(place).name for place in range(3)]
    assert (names == ["q", "k", "v"]) == bare
    assert (names[:2] == ["q", "k"]) == bare
    assert names[2] == "v"
    assert Compiler(library).build(parsed, (86,), on_step=lambda: None) is not None, "fp32 has no kernel"


def test_kernels_are_read_with_what_they_read_and_write():
    listing = """Layers:
Name: __myl_Scat_myl0_1, LayerType: kgen, Inputs: [ { Name: new_memory.key, Dimensions: [1,2,8,4], Strides: [64,32,4,1], Datatype: Half, Format: x }, { Name: (a) [b]_output, Dimensions: [1,2,1,4], Datatype: Half }], Constants: [ { Name: memory.c, Dimensions: [1], Datatype: Half }], Outputs: [ { Name: new_memory.key, Dimensions: [1,2,8,4], Datatype: Half, Format: x }], TacticName: __myl_Scat_0x1, StreamId: 0
Name: __myl_Move_myl0_2, LayerType: kgen, Inputs: [ { Name: new_memory.key, Dimensions: [1,2,8,4], Datatype: Half }], Constants: [], Outputs: [ { Name: t, Dimensions: [2,8,4], Datatype: Half }], TacticName:
Name: _gemv_mha_v1_myl0_3, LayerType: kgen, Inputs: [ { Name: t, Dimensions: [2,8,4], Datatype: Half }, { Name: memory.value, Dimensions: [1,2,8,4], Datatype: Half }], Outputs: [ { Name: out, Dimensions: [2,1,4], Datatype: Half }]
Name: w, LayerType: wait
"""  # noqa: E501
    states = ("memory.key", "new_memory.key", "memory.value")
    scatter, move, attention = read_kernels(listing)
    assert (scatter.reads(states), scatter.writes(states)) == ({"new_memory.key"}, {"new_memory.key"})
    assert (scatter.copies(states), move.copies(states), attention.copies(states)) == (False, True, False)
    assert [tensor.bytes for tensor in move.inputs + move.outputs] == [128, 128]
    assert (attention.reads(states), attention.attends) == ({"memory.value"}, True)
    report = read_layers(listing, states)
    assert (report.kernels, report.read_in_place, report.copying) == (3, 1, 1)
