"""fp16 and bf16: weights, products and memory of half the bytes, float32 where numbers need it."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import ml_dtypes
import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import txl_export
import txl_runtime
from frozen import frozen
from onnx import TensorProto, helper
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from seeded_bundle_faults import with_constant
from stand_ins import step_stream
from support import call_main, cli, random_state, save_checkpoint, small_config
from txl_export import exporting
from txl_export.families.transformer_xl.folding import to_precision
from txl_export.graphs import emulation
from txl_export.graphs.emulation import in_float32, runnable
from txl_export.graphs.half import computes_in_half
from txl_runtime.bundle.reading import SELFTEST, open_bundle
from txl_runtime.errors import BackendError, CheckError, TxlError, UsageError
from txl_runtime.listener import Silent
from txl_runtime.selftest import SelftestResult, run_selftest
from verified_steps import Heard

KINDS = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
STORED = {"fp16": "F16", "bf16": "BF16"}
BIG = {"d_model": 32, "d_embed": 32, "d_head": 16, "d_inner": 64, "vocab_size": 256}
ADAPTIVE = {
    "config": {"memory_start": "zeros", "pre_lnorm": True, "cutoffs": (20, 40)},
    "batch_size": 2,
    "verify": False,
}
precisions = pytest.mark.parametrize("precision", [pytest.param("fp16", marks=pytest.mark.slow(keep=0)), "bf16"])
TEXT = (np.arange(3000) * 7 % 60).astype(np.int32)


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    typed = onnx.shape_inference.infer_shapes(model, check_type=True, data_prop=True)
    values = (*typed.graph.value_info, *typed.graph.input, *typed.graph.output)
    found = {value.name: value.type.tensor_type.elem_type for value in values}
    return found | {tensor.name: tensor.data_type for tensor in model.graph.initializer}


@precisions
def test_graphs_say_what_is_computed_in_which_type(make_bundle, precision: str):
    bundle = open_bundle(make_bundle(**ADAPTIVE, precision=precision))
    half, full = KINDS[precision], TensorProto.FLOAT
    for file in sorted({program.file for program in bundle.manifest.programs}):
        model = onnx.load(bundle.file(file), load_external_data=False)
        types = types_of(model)
        for node in model.graph.node:
            kinds = {types[name] for name in node.input if name}
            if node.op_type in ("MatMul", "Gemm", "LayerNormalization", "TensorScatter"):
                assert kinds - {TensorProto.INT64} == {half}, (file, node.op_type)
            if node.op_type == "LayerNormalization":
                assert [a.i for a in node.attribute if a.name == "stash_type"] == [TensorProto.FLOAT], "statistics"
            if node.op_type in ("Softmax", "LogSoftmax"):
                assert kinds == {full}, (file, node.op_type)
            if node.op_type in ("Gather", "GatherElements"):
                assert types[node.input[1]] == TensorProto.INT32
        for value in (*model.graph.input, *model.graph.output):
            kind = value.type.tensor_type.elem_type
            if value.name in ("logprobs", "hidden"):
                assert kind == full
            elif "memory" in value.name:
                assert kind == half
            else:
                assert kind == TensorProto.INT32


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("precision", KINDS)
def test_the_bundle_says_and_stores_half(make_bundle, precision: str):
    bundle = open_bundle(make_bundle(precision=precision, verify=False))
    other = open_bundle(make_bundle(verify=False))
    manifest = bundle.manifest
    assert manifest.precision == precision
    assert {state.dtype for state in manifest.states} == {{"fp16": "float16", "bf16": "bfloat16"}[precision]}
    assert manifest.state_bytes * 2 == other.manifest.state_bytes
    assert manifest.model_id == other.manifest.model_id
    with safe_open(bundle.file("weights.safetensors"), framework="pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {STORED[precision]}  # noqa: SIM118
    size, whole = (b.file("weights.safetensors").stat().st_size for b in (bundle, other))
    assert size < 0.6 * whole


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize(("operator", "value"), [("Add", np.nan), ("Mul", 0)])
def test_log_probabilities_that_are_none_in_one_update_rule_fail_without_a_text(tmp_path, precision, operator, value):
    """The ring's graphs are right; the rolled ones of a segment of 1 are run in brief chains, too short for drift."""
    checkpoint, path = save_checkpoint(tmp_path / "model.pt", small_config()), tmp_path / "b.txl"
    txl_export.export(checkpoint, path, segment_length=(4, 1), batch_size=3, precision=precision)
    with_constant("logprobs", operator, value, "logprobs-1.onnx")(path)
    failing = {gate.name for gate in txl_export.verify(path, checkpoint=checkpoint).gates if gate.passed is False}
    assert "KL mean of one chain" in failing


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_verification_judges_half_by_its_distribution_and_says_what_it_is_worth(tmp_path, precision: str):
    values = small_config(**BIG)
    state = {name: tensor * (1 if "norm" in name else 0.2) for name, tensor in random_state(values).items()}
    heard = Heard()
    path = tmp_path / "b.txl"
    made = txl_export.export(
        state, path, config=values, precision=precision, tokens=TEXT, segment_length=(8, 1), listener=heard
    )
    assert made.parity is not None
    gates = {gate.name: gate for gate in made.parity.gates}
    assert set(gates) >= {"drift (late mean abs)", "KL mean", "top-1 differing", "perplexity (relative)"}
    assert "log-probs max abs" not in gates
    assert gates["memory RMS error (of the standard deviation)"].value > 0
    assert all(gate.passed for gate in gates.values()), made.parity.gates
    assert 0 < gates["KL mean"].value < 1e-4
    assert made.parity.precision == precision
    assert any(f"{precision} on the CPU is indicative" in message for message in heard.warnings)
    if precision == "bf16":
        assert "in float32 rounded to bf16 (indicative)" in made.parity.backend
    reached = load_file(path / SELFTEST)["reached"]
    assert 1e-5 < reached[0] < 0.5
    again = txl_export.verify(path, tokens=TEXT)
    assert again.passed
    assert again.precision == precision
    assert again.reference.startswith("the bundle's own weights")
    checked = txl_export.verify(path, checkpoint=save_checkpoint(tmp_path / "m.pt", values, state), tokens=TEXT)
    assert checked.passed
    assert max(chain.outputs["logprobs"].largest for chain in again.chains) > 1e-5, "a reference in full precision"
    if precision == "fp16":
        result = run_selftest(txl_runtime.load(path))
        assert result.passed
        assert result.limits["logprobs"] < 1


def test_bf16_on_the_cpu_is_refused_by_name(make_bundle):
    path = make_bundle(**ADAPTIVE, precision="bf16")
    with pytest.raises(BackendError, match=r"its precision is bf16, which backend cpu .* cannot run, expected fp32"):
        txl_runtime.load(path, "cpu")
    done = cli("selftest", path, "--backend", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--backend rtx, tensorrt or cuda" in done.stderr


def test_where_there_is_no_room_for_the_copy_that_is_said(make_bundle, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    path = make_bundle(**ADAPTIVE, precision="bf16")
    monkeypatch.setattr(emulation, "save_file", full)
    with (
        pytest.raises(TxlError, match=r"No space left on device .* expected room for one; set TMPDIR to"),
        runnable(path, open_bundle(path).manifest, "cpu"),
    ):
        pass


@pytest.mark.slow
def test_the_copy_for_the_cpu_holds_and_computes_what_bf16_can(make_bundle, tmp_path):
    path = make_bundle(**ADAPTIVE, precision="bf16")
    manifest = open_bundle(path).manifest
    with runnable(path, manifest, "rtx") as same:
        assert same == path
    with runnable(path, manifest, "cpu") as copy:
        assert open_bundle(copy).manifest.precision == "fp32"
        for update in ("ring", "rolled"):
            stream = txl_runtime.load(copy, update=update).stream()
            exact = txl_runtime.load(make_bundle(**ADAPTIVE, precision="fp32"), update=update).stream()
            for _ in range(4):
                found, wanted = (s.step([[3, 1, 4, 1]] * 2) for s in (stream, exact))
            assert 1e-3 < np.abs(found - wanted).max() < 0.5
            for rows in stream.memory().values():
                np.testing.assert_array_equal(rows, rows.astype(ml_dtypes.bfloat16).astype(np.float32))
        weights = [safe_open(folder / manifest.weights, framework="pt") for folder in (path, copy)]
        for name in weights[0].keys():  # noqa: SIM118 - no mapping
            assert torch.equal(weights[0].get_tensor(name).float(), weights[1].get_tensor(name))
    assert not copy.exists()


@precisions
def test_every_operator_that_computes_is_followed_by_a_rounding(precision: str):
    value, kind = helper.make_tensor_value_info, KINDS[precision]
    short = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[precision]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Transpose", ["product"], ["turned"], perm=[1, 0]),
        helper.make_node("Exp", ["turned"], ["grown"]),
        helper.make_node("Cast", ["grown"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Softmax", ["wide"], ["weights"]),
        helper.make_node("Cast", ["weights"], ["y"], to=kind),
    ]
    draws = np.random.default_rng(0)
    matrix = draws.normal(size=(5, 3)).astype(short)
    x, y = (value(name, kind, shape) for name, shape in (("x", [2, 5]), ("y", [3, 2])))
    graph = helper.make_graph(nodes, "small", [x], [y], [onnx.numpy_helper.from_array(matrix, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    copy = in_float32(model)
    onnx.checker.check_model(copy, full_check=True)
    operators = [node.op_type for node in copy.graph.node]
    assert Counter(operators)["Cast"] == 2 + 2 * 3, "products, exponentials and the cast itself are rounded"
    session = onnxruntime.InferenceSession(copy.SerializeToString(), providers=["CPUExecutionProvider"])
    given = draws.normal(size=(2, 5)).astype(short)

    def rounded(values):
        return values.astype(short).astype(np.float32)

    grown = rounded(np.exp(rounded(given.astype(np.float32) @ matrix.astype(np.float32)).T))
    soft = np.exp(grown - grown.max(axis=-1, keepdims=True))
    wanted = rounded(soft / soft.sum(axis=-1, keepdims=True))
    (found,) = session.run(None, {"x": given.astype(np.float32)})
    np.testing.assert_allclose(found, wanted, rtol=2**-7)
    np.testing.assert_array_equal(found, rounded(found))


def test_what_is_too_large_for_fp16_becomes_infinite_and_what_is_small_is_kept_as_it_can_be():
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [5]) for name in "xy")
    nodes = [helper.make_node("Mul", ["x", "x"], ["square"]), helper.make_node("Sqrt", ["square"], ["y"])]
    model = helper.make_model(
        helper.make_graph(nodes, "small", [x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    given = np.array([255, 256, -300, 2**-10, 2**-13], np.float32)  # the last square is below fp16's least number
    session = onnxruntime.InferenceSession(in_float32(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": given})
    np.testing.assert_array_equal(found, [255, np.inf, np.inf, 2**-10, 0])


def test_a_model_whose_values_are_too_large_for_fp16_is_refused(tmp_path):
    """ONNX Runtime's CPU keeps them between its operators, so without rounding they would not be seen."""
    values = small_config()
    state = random_state(values)
    for name in ("inner", "outer"):
        state[f"layers.01.feed_forward.{name}.weight"] *= 1000
    with pytest.raises(CheckError, match=r"where fp16 is rounded .* gives infinity, NaN .*; give --precision bf16"):
        txl_export.export(state, tmp_path / "b.txl", config=values, precision="fp16", segment_length=4, verify=False)


def test_a_step_whose_rounded_results_are_no_numbers_is_told_and_keeps_those_of_the_cpu(tmp_path, monkeypatch):
    """An infinite difference would let every engine pass."""
    said = []
    heard = Silent()
    monkeypatch.setattr(heard, "warn", said.append)
    monkeypatch.setattr(exporting, "seal", lambda folder, manifest: manifest)
    results = {True: float("inf"), False: 1e-3}
    monkeypatch.setattr(
        exporting,
        "_selftest",
        lambda folder, manifest, rounding=False: SelftestResult(
            "cpu", 1, (1,), {"outputs": results[rounding], "state": 2e-3}, {}
        ),
    )
    prepared = SimpleNamespace(vectors=lambda manifest: {"length": np.ones(1)})
    manifest = msgspec.structs.replace(step_stream.MANIFEST, precision="fp16")
    exporting._add_selftest(prepared, tmp_path, manifest, heard)
    assert load_file(tmp_path / SELFTEST)["reached"].tolist() == [1e-3, 2e-3]
    assert len(said) == 1
    assert "a device may fail it" in said[0]


def test_values_that_fp16_cannot_hold_are_refused_by_name(tmp_path):
    values = small_config()
    state = random_state(values)
    state["layers.01.feed_forward.inner.weight"][0, 0] = 1e5
    with pytest.raises(
        UsageError, match=r"layers\.01\.feed_forward\.inner\.weight holds 1e\+05, expected at most 6\.55e"
    ):
        txl_export.export(state, tmp_path / "b.txl", config=values, precision="fp16", segment_length=4, verify=False)
    assert not (tmp_path / "b.txl").exists()
    assert to_precision({"a": torch.ones(1)}, "fp32")["a"].dtype == torch.float32


def test_a_graph_computes_in_half_where_most_of_its_constants_are_read_as_float16():
    def graph(cast: bool, wide: int) -> ir.Graph:
        half, whole = (ir.tensor(np.zeros(3, np.float16), name="a"), ir.tensor(np.zeros(wide, np.float32), name="b"))
        values = [ir.Value(name=one.name, const_value=one, type=ir.TensorType(one.dtype)) for one in (half, whole)]
        nodes = [ir.node("Cast" if cast else "Neg", values[:1]), ir.node("Neg", values[1:])]
        return ir.Graph([], [node.outputs[0] for node in nodes], nodes=nodes, initializers=values)

    assert computes_in_half(graph(cast=False, wide=2))
    assert not computes_in_half(graph(cast=True, wide=2)), (
        "weights that are stored in half, and computed with in float32"
    )
    assert not computes_in_half(graph(cast=False, wide=4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp16", {"memory": "hidden"}),
        ("bf16", {"config": {"attn_type": 1, "position_rows": 9}}),
        ("fp16", {"config": {"attn_type": 2}}),
        ("bf16", {"config": {"attn_type": 3, "position_rows": 12}}),
        ("fp16", {"config": {"cutoffs": (20, 40), "div_val": 2}}),
        ("bf16", {"config": {"d_head": 41}}),
        ("fp16", {"config": {"memory_length": 0}}),
    ],
    ids=str,
)
def test_every_kind_of_model_exports_in_half(make_bundle, precision: str, options):
    path = make_bundle(precision=precision, batch_size=2, verify=False, **options)
    assert txl_export.verify(path).passed


def test_a_half_bundle_through_the_commands(monkeypatch, capfd):
    path = frozen("half")
    for command in ("inspect", "selftest", "verify"):
        code, shown, said = call_main((command, path, "--json"), monkeypatch, capfd)
        assert code == 0, said
        assert command == "selftest" or json.loads(shown)["precision"] == "fp16"
