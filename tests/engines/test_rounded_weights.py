"""Matrices in int8, fp8 and int4: the same numbers in engines and in the copy that judges them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from composed import run_graph
from frozen import frozen
from numpy.typing import NDArray
from onnx import TensorProto, helper
from resealing import contents, copied, reseal
from stand_ins.cuda import open_built
from support import call_main
from txl_engines import given_weights, rounded_weights
from txl_engines.building import NEWEST_OPSET, check_gpus
from txl_engines.bundles import build_bundle
from txl_engines.checking import Graph, read_graph
from txl_engines.compiler import Compiler
from txl_engines.composing import compose, whole_programs
from txl_engines.given_weights import give_weights
from txl_engines.layers import read_kernels
from txl_engines.rounded_weights import Judged, round_matrix, round_weights, rounded_copy
from txl_export import InputSpec, StateSpec, StepSpec, export
from txl_export.proof.parity import ParityError
from txl_export.verifying import verify_rounded
from txl_runtime import load
from txl_runtime.bundle.engines.files import bundle_engines, describe_engine
from txl_runtime.bundle.engines.sidecar import Rounding
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.tables import Program, TensorSpec
from txl_runtime.device.dtypes import from_float32, stored_type, to_float32
from txl_runtime.device.engines import weights as device_weights
from txl_runtime.device.engines.library import load_library
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.selftest import run_selftest

pytestmark = pytest.mark.device

ROUNDINGS: tuple[Rounding, ...] = ("int8", "fp8", "int4")
STEPS = {"int8": 1 / 254, "fp8": 1 / 16, "int4": 1 / 14}
"""Largest error of a value, relative to the largest of those that share its scale (of fp8 to itself)."""
WIDE = {"d_model": 64, "d_embed": 64, "n_head": 2, "d_head": 32, "d_inner": 64}
"""As in tests/engines/test_attention_operator.py: exported once."""


QUICK = Path(__file__).parents[2] / "benchmarks" / "gpu" / "bundles" / "quick-v204-fp16-b2.txl"


@pytest.fixture
def small(monkeypatch) -> None:
    """Matrices of small models count as large."""
    monkeypatch.setattr(given_weights, "LEAST_BYTES", 256)
    monkeypatch.setattr(rounded_weights, "LEAST_BYTES", 256)
    monkeypatch.setattr(rounded_weights, "LEAST", 256)


@pytest.fixture
def half(small, tmp_path: Path) -> Path:
    """A copy of a bundle in fp16."""
    return copied(QUICK, tmp_path / "half.txl")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_codes_times_scale_are_the_matrix_and_equal_ones_have_equal_codes(rounding: Rounding, dtype: str) -> None:
    matrix = np.random.default_rng(0).normal(size=(192, 6)).astype(np.float32)
    matrix[:64, 2] = 0
    stored = from_float32(matrix, dtype)
    matrix = to_float32(stored, dtype)
    codes, scales, values = round_matrix(stored, rounding, dtype)
    assert scales.shape == ((3, 6) if rounding == "int4" else ())
    back = to_float32(values, dtype)
    parts, ours = (side.reshape(3, 64, 6) for side in (matrix, back))
    most = np.abs(parts).max(axis=1, keepdims=True) if rounding == "int4" else np.abs(parts).max()
    most = np.maximum(np.abs(parts), most / 448) if rounding == "fp8" else most
    bound = STEPS[rounding] + {"float16": 2**-10, "bfloat16": 2**-7}[dtype]  # the scale and the value are rounded, too
    assert (np.abs(parts - ours) <= bound * most + 1e-6).all()
    assert not back[:64, 2].any()
    assert np.corrcoef(back.ravel(), matrix.ravel())[0, 1] > 0.99
    assert (round_matrix(stored, rounding, dtype)[0] == codes).all()


def codes_of(graph: Graph, file: Path) -> dict[str, NDArray[Any]]:
    """The arrays that the device holds of a graph's given weights."""
    found = {}
    for weight in graph.given:
        half = np.fromfile(file, "<f2", np.prod(weight.fixed), offset=weight.offset)
        if weight.scale is not None:
            codes = from_float32(half.astype(np.float32) / np.float32(weight.scale), weight.dtype)
            found[weight.name] = codes.reshape(weight.fixed)
        elif weight.turned:
            found[weight.name] = half.reshape(weight.fixed[::-1]).T
        else:
            found[weight.name] = half.reshape(weight.fixed)
    return found


@pytest.mark.parametrize("update", ["ring", "rolled"])
@pytest.mark.parametrize("rounding", ["int8", "int4"])  # ONNX Runtime multiplies fp8 by no scale of float16
def test_a_program_computes_what_the_copy_computes_that_judges_it(
    small, make_bundle: Callable[..., Path], rounding: Rounding, update: str
) -> None:
    half = make_bundle(WIDE, precision="fp16", verify=False)
    opened, draws = open_bundle(half), np.random.default_rng(0)
    shared = opened.manifest.weights if update == "ring" else ""
    for program in whole_programs(opened.manifest, update)[:2]:
        own = read_graph(compose(opened, program), program, half, NEWEST_OPSET)
        graph = round_weights(own, program, rounding, shared)
        assert len(graph.rounded) == 4 * opened.manifest.config.n_layer
        assert {weight.scale is None for weight in graph.given} == ({False} if graph.given else set())
        assert bool(graph.given) == (bool(shared) and rounding == "int8")
        graph = give_weights(graph, shared) if shared else graph
        feeds = {
            spec.name: draws.integers(0, 2, spec.fixed).astype(np.int32)
            if spec.dtype == "int32"
            else draws.normal(size=spec.fixed).astype(stored_type(spec.dtype))
            for spec in program.inputs
        }
        found = run_graph(graph.data, half, feeds | codes_of(graph, half / opened.manifest.weights))
        with rounded_copy(opened, graph.rounded, rounding) as copy:
            expected = run_graph(compose(open_bundle(copy), program), copy, feeds)
            before = run_graph(own.data, half, feeds)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=2e-3, err_msg=name)
        assert max(np.abs(before[name] - values).max() for name, values in expected.items()) > 4e-3, "it was rounded"


def step_of(*nodes: Any, folder: Path, length: int = 1, **weights: tuple[int, ...]) -> tuple[Graph, Program]:
    """A step that reads these weights of float16, which lie behind one another in a file."""
    made, offset = [], 0
    for name, shape in weights.items():
        tensor = onnx.TensorProto(
            name=name, data_type=TensorProto.FLOAT16, dims=shape, data_location=TensorProto.EXTERNAL
        )
        for key, value in {"location": "w.bin", "offset": offset, "length": 2 * int(np.prod(shape))}.items():
            tensor.external_data.add(key=key, value=str(value))
        made.append(tensor)
        offset += 2 * int(np.prod(shape))
    (folder / "w.bin").write_bytes(np.random.default_rng(0).normal(size=offset // 2).astype("<f2").tobytes())
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in ("x", "y"))
    graph = helper.make_graph(list(nodes), "g", [x], [y], made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    names = tuple((node.name, node.op_type) for node in nodes)
    spec = (TensorSpec(name="x", dtype="float16", shape=(1,)),)
    program = Program(
        name="step", kind="step", segment_length=length, update="replace", file="g.onnx", inputs=spec, outputs=spec
    )
    return Graph(model.SerializeToString(), folder / "g.onnx", "0" * 64, {}, names, 0, 0), program


def test_of_a_step_what_products_alone_read_is_rounded(tmp_path: Path) -> None:
    node, large = helper.make_node, (512, 64)

    def rounded(*nodes: Any, length: int = 1, **weights: tuple[int, ...]) -> tuple[int, list[str], dict[str, str]]:
        graph, program = step_of(*nodes, folder=tmp_path, length=length, **weights)
        made = round_weights(graph, program, "int8", "w.bin")
        model = onnx.load_from_string(made.data)
        kinds = {one.name: TensorProto.DataType.Name(one.data_type) for one in model.graph.initializer}
        assert model.opset_import[0].version == 19
        return len(made.rounded), [weight.name for weight in made.given], kinds

    product = node("MatMul", ["x", "w"], ["y"])
    assert rounded(product, w=large) == (1, ["w.int8"], {"w.scale": "FLOAT16"})
    assert rounded(product, w=(511, 65)) == (1, [], {"w.int8": "INT8", "w.scale": "FLOAT16"}), "odd: it would be copied"
    assert rounded(product, w=(96, 96)) == (1, [], {"w.int8": "INT8", "w.scale": "FLOAT16"}), "small"
    assert rounded(product, w=(16, 16)) == (0, [], {"w": "FLOAT16"})
    assert rounded(product, w=(2, *large)) == (0, [], {"w": "FLOAT16"})
    assert rounded(node("MatMul", ["w", "x"], ["y"]), w=large) == (0, [], {"w": "FLOAT16"})
    assert rounded(product, node("Add", ["x", "w"], ["z"]), w=large)[0] == 0, "read otherwise, too"
    assert rounded(node("MatMul", ["x", "y"], ["z"]), y=large)[0] == 0, "it is returned"
    turned = (node("Transpose", ["w"], ["t"], perm=[1, 0]), node("Gemm", ["x", "t"], ["y"]))
    assert rounded(*turned, w=large) == (1, [], {"w.int8": "INT8", "w.scale": "FLOAT16"})
    recurrent = (node("Unsqueeze", ["w", "axes"], ["u"]), node("GRU", ["x", "u", "r"], ["y"]))
    assert rounded(*recurrent, w=large) == (1, [], {"w.int8": "INT8", "w.scale": "FLOAT16"})
    assert rounded(*recurrent, length=8, w=large) == (1, [], {"w": "FLOAT16"}), "a loop holds the rounded values"


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_compiler_takes_the_codes_into_the_product(tmp_path: Path, rounding: Rounding, rows: int) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph, program = step_of(product, folder=tmp_path, w=(512, 2048))
    model = onnx.load_from_string(graph.data)
    for value, width in ((model.graph.input[0], 512), (model.graph.output[0], 2048)):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT16, [rows, width]))
    graph = round_weights(dataclasses.replace(graph, data=model.SerializeToString()), program, rounding, "w.bin")
    library = load_library("rtx")
    compiler = Compiler(library)
    parsed = compiler.parse(graph.data, str(graph.path))
    plan = compiler.build(parsed, (89, 120), lambda: None)
    kernels = list(read_kernels(library.journal.layers))
    assert len(kernels) == 1, [kernel.name for kernel in kernels]
    codes = sum(tensor.bytes for tensor in kernels[0].inputs) - 2 * rows * 512
    assert codes == (0 if rounding == "int4" else 512 * 2048), "of an engine's own constants the list says nothing"
    assert (memoryview(plan).nbytes > 512 * 1024) == (rounding == "int4")


def judge(copy: Path) -> Judged:
    """The self-test of the copy, without the ladder: figures as `build` keeps them."""
    model = load(copy, backend="cpu")
    model.backend.name, model.backend.precision = "rtx", "int8"
    outputs, state, *_ = run_selftest(model).largest.values()
    return Judged((outputs, state), {"KL mean": None, "drift": 0.5})


def self_tested(path: Path) -> Any:
    model = load(path, backend="cpu")
    model.backend, *_ = open_built(path)
    return model, run_selftest(model)


@pytest.fixture
def built(half: Path) -> Path:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    build_bundle(half, "rtx", (86, 89), kinds=("logprobs",), rounding=("int8", judge))
    return half


def test_engines_that_round_so_pass_the_self_test_and_a_wrong_scale_does_not(built: Path, monkeypatch) -> None:
    model, found = self_tested(built)
    assert found.passed, found.largest
    assert (model.backend.precision, "rows" in found.largest) == ("int8", False)
    assert found.largest["logprobs"] > 0.25 * model.backend.reached[0], "what was built is not the fp16 bundle"
    calls, real = [], device_weights.from_float32

    def one_wrong(values: NDArray[Any], dtype: str) -> Any:
        calls.append(dtype)
        return real(values * np.float32(1.5) if len(calls) == 1 else values, dtype)

    monkeypatch.setattr(device_weights, "from_float32", one_wrong)
    _, wrong = self_tested(built)
    assert set(calls) == {"int8"}
    assert not wrong.passed


def test_the_sidecar_names_the_precision_and_what_was_judged(built: Path, monkeypatch, capfd) -> None:
    for _, sidecar in bundle_engines(open_bundle(built)):
        assert (sidecar.identity.precision, sidecar.identity.rounding) == ("fp16", "int8")
        assert sidecar.judged == {"KL mean": None, "drift": 0.5}
    facts = describe_engine(built / "engines/rtx/logprobs-ring-1.engine")
    assert (facts["rounding"], facts["reached"]) == ("int8", sidecar.reached)
    shown = call_main(["inspect", built / "engines/rtx/logprobs-ring-1.engine"], monkeypatch, capfd).stdout
    assert "fp16, matrices in int8" in shown
    assert "KL mean not judged; drift 0.5" in shown
    assert "int8" in call_main(["inspect", built], monkeypatch, capfd).stdout


def test_one_precision_a_target_and_what_fails_leaves_the_bundle(built: Path, half: Path) -> None:
    before = contents(half)

    def fail(copy: Path) -> Judged:
        assert open_bundle(copy).manifest.files.keys().isdisjoint(name for name, _ in bundle_engines(open_bundle(half)))
        raise CheckError("too far")

    with pytest.raises(CheckError, match="too far"):
        build_bundle(half, "rtx", (89,), kinds=("logprobs",), rounding=("fp8", fail))
    again = build_bundle(half, "rtx", (86, 89), kinds=("logprobs",), rounding=("int8", fail))
    assert all(engine.reused for engine in again.engines), "nothing to judge"
    assert contents(half) == before
    build_bundle(half, "rtx", (86,), "rolled", kinds=("logprobs",))
    found = bundle_engines(open_bundle(half))
    assert {(sidecar.identity.update, sidecar.identity.rounding) for _, sidecar in found} == {("rolled", "")}


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_two_builds_are_of_the_same_graph(
    half: Path, make_bundle: Callable[..., Path], tmp_path: Path, rounding: Rounding
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    judged, keys = Judged((0.1, 0.1), {}), set()
    if rounding == "int4":
        with pytest.raises(UsageError, match="has no matrix of 16384 bytes that products alone read"):
            build_bundle(half, "rtx", (120,), kinds=("logprobs",), rounding=("int4", never))
        half = copied(make_bundle(WIDE, precision="fp16", verify=False), tmp_path / "wide.txl")
    for _ in range(2):
        made = build_bundle(half, "rtx", kinds=("logprobs",), force=True, rounding=(rounding, lambda copy: judged))
        assert made.engines[0].sidecar.reached == judged.reached
        keys.add(tuple(engine.sidecar.key for engine in made.engines))
        assert made.engines[0].sidecar.identity.compute_capabilities == ((89, 120, 121) if rounding == "fp8" else ())
    assert len(keys) == 1


def never(copy: Path) -> Judged:
    raise AssertionError("it is refused before")


def test_what_has_no_such_matrices_is_refused(tmp_path: Path, half: Path, monkeypatch, capfd) -> None:
    whole = copied(frozen("ring"), tmp_path / "whole.txl")
    with pytest.raises(UsageError, match=r"its precision is fp32, expected fp16 or bf16 for --precision int8; export"):
        build_bundle(whole, "rtx", rounding=("int8", never))
    for target in ("cuda", "tensorrt"):
        with pytest.raises(
            UsageError, match=f"is built for {target}, and --precision is int8, expected rtx; leave it out"
        ):
            build_bundle(half, target, rounding=("int8", never))
    said = call_main(["build", half, "--target", "native", "--precision", "int4"], monkeypatch, capfd)
    assert (said.code, "is int4, which is for --target rtx" in said.stderr) == (2, True)
    said = call_main(["build", half, "--target", "rtx", "--precision", "bf16"], monkeypatch, capfd)
    assert (said.code, "--precision bf16 is for --target native" in said.stderr) == (2, True)
    said = call_main(["build", half, "--target", "rtx", "--text", half / "manifest.json"], monkeypatch, capfd)
    assert (said.code, "--text and --tokens judge rounded matrices" in said.stderr) == (2, True)


@pytest.mark.parametrize(("rounding", "gpu", "since"), [("fp8", 86, 89), ("int4", 75, 80)])
def test_a_gpu_without_the_precision_is_refused(rounding: Rounding, gpu: int, since: int) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    wanted = f"--sm holds {gpu}, which has no {rounding}, expected SM {since} or newer"
    with pytest.raises(UsageError, match=wanted):
        check_gpus((gpu, 120), "fp16", load_library("rtx"), rounding)
    assert check_gpus((gpu,), "fp16", load_library("rtx"), "int8") == (gpu,)


@pytest.mark.slow
def test_the_command_judges_first_and_says_what_only_text_judges(half: Path, monkeypatch, capfd) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    command = ["build", half, "--target", "rtx", "--precision", "fp8", "--sm", "89"]
    ran = call_main(command, monkeypatch, capfd)
    assert ran.code == 0, ran.stderr
    assert "not judged without real text" in ran.stdout
    again = call_main([*command, "--json", "--text", __file__], monkeypatch, capfd)
    assert "the text was not read: all engines of fp8 are there and judged; --force judges again" in again.stderr
    facts = json.loads(again.stdout)["programs"][0]
    assert (facts["rounding"], facts["reused"], facts["judged"]["KL mean"]) == ("fp8", True, None)
    assert facts["judged"]["memory RMS error (of the standard deviation)"] > 1e-3
    _, found = self_tested(half)
    assert found.passed, found.largest


@pytest.mark.slow
def test_a_step_of_its_own_is_judged_beside_its_bundle(small, tmp_path: Path) -> None:
    class Policy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = torch.nn.GRU(16, 32, 2, batch_first=True)

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.gru(x, h)

    torch.manual_seed(0)
    spec = StepSpec(
        Policy().eval(),
        [InputSpec("x", ("B", "L", 16))],
        [StateSpec("h", (2, "B", 32))],
        ["y"],
        segment_lengths=(4, 1),
    )
    export(spec, path := tmp_path / "policy.txl", precision="fp16", verify=False)
    bundle, places = open_bundle(path), []
    for program in whole_programs(bundle.manifest, "replace"):
        graph = read_graph(compose(bundle, program), program, path, NEWEST_OPSET)
        places.append(round_weights(graph, program, "int8", "").rounded)
    assert len(places[0]) == 4
    assert set(places[0]) == set(places[1])
    with rounded_copy(bundle, places[0], "int8") as copy:
        parity, reached = verify_rounded(bundle, copy, "int8")
        assert parity.passed
        assert 1e-5 < max(reached) < 0.1
        with pytest.raises(UsageError, match="reads no token ids, and --text or --tokens is given"):
            verify_rounded(bundle, copy, "int8", text=path)
    with rounded_copy(bundle, places[0], "fp8") as copy:  # its weights are all of one size, so fp8 has fewer digits
        further, _ = verify_rounded(bundle, copy, "fp8")
        name = "state RMS error (of the standard deviation)"
        ours, theirs = ({gate.name: gate.value for gate in one.gates}[name] for one in (parity, further))
        assert 3 * ours < theirs < 0.05
        with (copy / "weights.safetensors").open("r+b") as file:  # the first matrix is lost
            file.seek(places[0][0][0])
            file.write(bytes(2 * int(np.prod(places[0][0][1]))))
        reseal(copy)
        with pytest.raises(ParityError, match="the matrices do not bear fp8; build without --precision"):
            verify_rounded(bundle, copy, "fp8")
