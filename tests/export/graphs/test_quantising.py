"""int8 and int4 weights: what they stand for, that rows stay independent, and that a fault is noticed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import txl_export
import txl_runtime
from support import random_state, save_checkpoint, small_config
from txl_export.graphs import quantising
from txl_export.graphs.quantised_matmul import multiply_quantised
from txl_export.graphs.quantising import dequantise, gain_error, quantise
from txl_export.proof.parity import ParityError
from txl_runtime.errors import UsageError
from txl_runtime.selftest import run_selftest

NAME = "layers.00.attention.output.weight"
CONFIG = {"d_model": 64, "d_embed": 64, "d_head": 32, "d_inner": 128, "n_layer": 2, "embedding_scale": 1.0}


def gentle_state(config):
    """Random weights of a tame model: one whose output is not decided by the last bit of a weight."""
    state = random_state(config)
    return {name: value if name.endswith("norm.weight") else value * 0.4 for name, value in state.items()}


@pytest.fixture(scope="module")
def tame(tmp_path_factory):
    """Bundles of one tame model by precision."""
    config, folder = small_config(**CONFIG), tmp_path_factory.mktemp("tame")
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], 600)

    def find(precision):
        bundle = folder / f"{precision}.txl"
        if not bundle.exists():
            options = {"segment_length": (16, 4, 1), "batch_size": 2, "precision": precision, "tokens": tokens}
            txl_export.export(gentle_state(config), bundle, config=config, **options)
        return bundle

    return find


@pytest.mark.parametrize(("precision", "error"), [("int8", 0.005), ("int4", 0.08)])
@pytest.mark.parametrize("size", [512, 410, 16, 96])
def test_a_quantised_matrix_stands_for_the_original_to_its_rounding(precision, error, size):
    matrix = torch.randn(size, 70, generator=torch.Generator().manual_seed(size))
    parts = quantise({NAME: matrix}, precision, [NAME])
    assert NAME not in parts
    found = dequantise(parts)[NAME]
    assert found.shape == matrix.shape
    assert 0 < float((found - matrix).abs().max()) <= error * float(matrix.abs().max())


@pytest.mark.parametrize("size", [512, 410, 16])
def test_both_forms_of_int8_stand_for_the_same_matrix(size):
    matrix = torch.randn(size, 70, generator=torch.Generator().manual_seed(size))
    matrix[:, 3] = 0
    parts = quantise({NAME: matrix}, "int8", [NAME], many=True)
    blocks, columns = (
        dequantise({name: part for name, part in parts.items() if not name.endswith(without)})[NAME]
        for without in ((".columns", ".column_scale"), (".int8", ".scale"))
    )
    assert torch.equal(blocks, columns)
    assert not columns[:, 3].any()


def test_what_is_no_matrix_of_a_layer_stays_as_it_is():
    folded = {"embedding.tables.0": torch.randn(8, 4), "layers.00.attention.norm.weight": torch.ones(4)}
    assert quantise(folded, "int8", ()) == folded
    assert dequantise(folded) == folded


def test_layers_to_keep_stay_as_they_are_and_a_name_of_nothing_is_refused():
    folded = {NAME: torch.randn(16, 16), NAME.replace("00", "01"): torch.randn(16, 16)}
    parts = quantise(folded, "int4", folded, keep=("layers.01",))
    assert torch.equal(parts[NAME.replace("00", "01")], folded[NAME.replace("00", "01")])
    assert f"{NAME}.int4" in parts
    with pytest.raises(UsageError, match=r"--keep layers\.07 names no matrix"):
        quantise(folded, "int4", folded, keep=("layers.07",))


@pytest.mark.slow
def test_int8_multiplies_long_segments_in_another_way_than_short_ones(tame):
    files = {program.name: program.file for program in txl_runtime.load(tame("int8")).manifest.programs}
    ring = {length: files[f"hidden-ring-{length}"] for length in (16, 4, 1)}
    assert ring == {16: "hidden-ring.onnx", 4: "hidden-ring-few.onnx", 1: "hidden-ring-few.onnx"}
    operators = {file: Counter(node.op_type for node in _graph(tame, file)) for file in set(ring.values())}
    assert (operators[ring[16]]["MatMulIntegerToFloat"], operators[ring[16]]["MatMulNBits"]) == (8, 0)
    assert (operators[ring[1]]["MatMulIntegerToFloat"], operators[ring[1]]["MatMulNBits"]) == (0, 8)
    assert operators[ring[16]]["Abs"] == 6, "behind a ReLU nothing is negative"


def _graph(tame, file):
    return onnx.load(tame("int8") / file, load_external_data=False).graph.node


def test_a_row_of_zeros_or_of_huge_values_is_multiplied_as_exactly_as_any(tmp_path):
    weights = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    parts = quantise({NAME: weights}, "int8", [NAME], many=True)
    rows = np.random.default_rng(0).standard_normal((20, 64)).astype(np.float32)
    rows[1], rows[2], rows[3] = 0, rows[2] * 1e30, rows[3] * 1e-30
    found = _product(tmp_path, parts, rows)
    expected = rows.astype(np.float64) @ dequantise(parts)[NAME].double().numpy()
    largest = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64)
    assert (found[1] == 0).all()
    assert np.isfinite(found).all()
    off = np.abs(found - expected) / np.where(largest > 0, largest, 1)
    assert 0 < off.max() < 64**0.5 / 127 * 4, "the rounding of 64 activations, four deviations of it"


def _product(folder, parts, rows):
    """x @ NAME as a long segment's graph has it."""
    value = onnx.helper.make_tensor_value_info
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("MatMul", ["x", NAME], ["y"])],
            "one product",
            [value("x", onnx.TensorProto.FLOAT, ["rows", rows.shape[1]])],
            [value("y", onnx.TensorProto.FLOAT, ["rows", None])],
            [onnx.numpy_helper.from_array(dequantise(parts)[NAME].numpy(), NAME)],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 24)],
        ir_version=12,
    )
    changed = ir.from_proto(model)
    multiply_quantised(changed.graph, parts, many=True)
    ir.save(changed, folder / "product.onnx")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # as the runtime does
    session = onnxruntime.InferenceSession(folder / "product.onnx", options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": rows})[0]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_gain_of_matrices_is_one_and_a_scale_off_by_a_tenth_is_seen(precision):
    folded = {NAME: torch.randn(512, 128, generator=torch.Generator().manual_seed(0))}
    parts = quantise(folded, precision, [NAME])
    assert gain_error(folded, parts) < 0.01
    parts[f"{NAME}.scale"] = parts[f"{NAME}.scale"] * 1.1
    assert 0.08 < gain_error(folded, parts) < 0.12


def test_one_layers_scale_off_by_a_tenth_fails_and_says_what_to_keep(tmp_path, monkeypatch):
    config, original = small_config(**CONFIG), quantising._columns
    calls = []

    def faulty(matrix):
        codes, scale = original(matrix)
        calls.append(matrix)
        return codes, scale * (1.1 if len(calls) <= 4 else 1)

    monkeypatch.setattr(quantising, "_columns", faulty)
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], 600)
    checkpoint = save_checkpoint(tmp_path / "model.pt", config, gentle_state(config))
    with pytest.raises(ParityError, match=r"suffer most: keep them in float32 with --keep layers\.00"):
        txl_export.export(checkpoint, tmp_path / "m.txl", segment_length=(4, 1), precision="int8", tokens=tokens)
    assert not (tmp_path / "m.txl").exists()


@pytest.mark.slow
def test_the_self_test_of_a_quantised_bundle_can_fail(tame, monkeypatch):
    model = txl_runtime.load(tame("int8"))
    assert run_selftest(model).passed
    vectors = model.bundle.selftest()
    vectors["logprobs"] = vectors["logprobs"] + 0.5
    monkeypatch.setattr(type(model.bundle), "selftest", lambda self: vectors)
    assert not run_selftest(model).passed
