"""The engine that interprets composed ONNX with PyTorch computes what ONNX Runtime does, alone and in the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
from frozen import frozen
from gpu_exercise import LIMIT, exercise, in_threads
from onnx import TensorProto, helper
from stand_ins.driver import FakeDriver
from stand_ins.engine import GraphRun, open_fake_device
from stand_ins.late_place import LatePlace
from stand_ins.small_steps import EVERY
from torch_engine import HostPlace, Interpreter, TorchExecutable, open_torch, view_of
from txl_engines.composing import whole_programs
from txl_runtime import load
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.bundle.tables import Program, TensorSpec, tensor_bytes
from txl_runtime.device.dtypes import stored_type
from txl_runtime.device.interface import ALIGNMENT, Launch, host_address
from txl_runtime.errors import BackendError, UsageError

pytestmark = pytest.mark.device

B = 3
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hidden memory": {"memory": "hidden"},
    "divided, windowed": {"config": {"cutoffs": (20, 40), "div_val": 2, "same_length": True, "clamp_length": 3}},
    "absolute positions": {"config": {"attn_type": 2}},
    "large vocabulary": {"config": {"vocab_size": 1100, "cutoffs": (300,)}},
    "fp16": {"precision": "fp16", "config": {"cutoffs": (20, 40)}},
    "bf16": {"precision": "bf16"},
}
RMS = {"fp16": 1e-2, "bf16": 5e-2}
"""Root mean square of differences, in standard deviations, as the ladder of parity has it for other outputs."""


def values_of(spec: TensorSpec, draws: np.random.Generator, most: Mapping[str, int]) -> np.ndarray[Any, Any]:
    if spec.dtype == "bool":
        return draws.random(spec.fixed) < 0.5
    if spec.dtype == "int32":
        return draws.integers(0, most.get(spec.name, 60) + 1, spec.fixed).astype(np.int32)
    if spec.name == "temperature":
        return draws.uniform(0.5, 1.5, spec.fixed).astype(np.float32)
    floats = draws.normal(0, 0.7, spec.fixed).astype(np.float32)
    if spec.dtype == "bfloat16":
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    return floats.astype(stored_type(spec.dtype))


def buffer(spec: TensorSpec) -> np.ndarray[Any, Any]:
    """Memory for a tensor, at an aligned address."""
    raw = np.zeros(tensor_bytes(spec) + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + tensor_bytes(spec)]


def by_torch(executable: TorchExecutable, given: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Run a program once, over addresses of the host."""
    program, held = executable.program, {}
    for spec in program.inputs:
        held[spec.name] = buffer(spec)
        held[spec.name][...] = np.ascontiguousarray(given[spec.name]).reshape(-1).view(np.uint8)
    for spec in program.outputs:
        shared = executable.in_place.get(spec.name)
        held[spec.name] = held[shared] if shared else buffer(spec)
    executable.prepare({name: host_address(array) for name, array in held.items()}, None)()
    return {spec.name: held[spec.name] for spec in program.outputs}


def floats(raw: np.ndarray[Any, Any], spec: TensorSpec) -> np.ndarray[Any, Any]:
    return view_of(np.ascontiguousarray(raw).copy().view(np.uint8), spec).to(torch.float64).numpy()


def compare(
    bundle: Bundle, program: Program, seed: int, weights: dict[str, Any], reference: Bundle | None = None
) -> None:
    """`reference` is the same model in fp32, where ONNX Runtime has no kernels for the bundle's own precision."""
    draws, m = np.random.default_rng(seed), bundle.manifest
    slots = [state.slots for state in m.states_of(program.update) if state.slots]
    most = {"valid": program.segment_length, "fill": m.memory_length, "head": slots[0] - 1 if slots else 0}
    given = {spec.name: values_of(spec, draws, most) for spec in program.inputs}
    executable = TorchExecutable(bundle, program, HostPlace(), weights)
    ours = by_torch(executable, given)
    other = program
    if reference is not None:
        other = next(item for item in whole_programs(reference.manifest, program.update) if item.name == program.name)
        widened = {spec.name: floats(given[spec.name], spec).astype(np.float32) for spec in program.inputs}
        given = {spec.name: widened[spec.name].astype(stored_type(spec.dtype)) for spec in other.inputs}
    work = GraphRun(reference or bundle, other).bind()
    theirs = work([np.ascontiguousarray(given[spec.name]).reshape(-1).view(np.uint8) for spec in other.inputs])
    for spec, wide, raw in zip(program.outputs, other.outputs, theirs, strict=True):
        found, expected = floats(ours[spec.name], spec), floats(raw.view(np.uint8), wide)
        where = f"{program.name}: {spec.name}"
        if m.precision == "fp32":
            np.testing.assert_allclose(
                found, expected, rtol=0, atol=2e-6 * max(1, np.abs(expected).max()), err_msg=where
            )
        else:
            error = np.sqrt(np.mean((found - expected) ** 2)) / max(expected.std(), 1e-3)
            assert error <= RMS[m.precision], where


@pytest.mark.parametrize(
    "shape", ["clusters of 0.8", *(pytest.param(name, marks=pytest.mark.slow(keep=1)) for name in SHAPES)]
)
def test_every_composed_program_gives_what_onnx_runtime_gives(shape: str, make_bundle: Callable[..., Path]) -> None:
    kept = shape not in SHAPES
    bundle = open_bundle(frozen("0.8/clusters") if kept else make_bundle(verify=False, batch_size=B, **SHAPES[shape]))
    reference = open_bundle(make_bundle(verify=False, batch_size=B)) if shape == "bf16" else None
    ran, weights = [], {}
    for update in (rule for rule in bundle.manifest.updates if rule != "none"):
        for program in whole_programs(bundle.manifest, update):
            for seed in range(3):
                compare(bundle, program, seed, weights, reference)
            ran.append((update, program.kind))
    kinds = {kind for _, kind in ran}
    assert {"logprobs", "next" if "large" in shape else "last", "score"} <= kinds
    assert {update for update, _ in ran} >= (
        {"rolled"} if "hidden" in shape or "absolute" in shape else {"rolled", "ring"}
    )


@pytest.mark.parametrize("name", ["cell", "absent", "counted"])
def test_steps_of_other_models_give_what_onnx_runtime_gives(name: str, tmp_path: Path) -> None:
    txl_export.export(EVERY[name](), tmp_path / "own.txl", batch_size=2, verify=False)
    bundle = open_bundle(tmp_path / "own.txl")
    for program in whole_programs(bundle.manifest, bundle.manifest.updates[0]):
        for seed in range(3):
            compare(bundle, program, seed, {})


def graph_of(*nodes: Any, inputs: tuple[Any, ...] = (), initializers: tuple[Any, ...] = ()) -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(list(nodes), "g", [x, *inputs], [y], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]).SerializeToString()


def interpreted(graph: bytes, **in_place: str) -> Interpreter:
    return Interpreter(graph, Path(), "cpu", in_place, {})


def test_an_unknown_operator_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="operator LSTM of node recurrent is not interpreted, expected one of Add, A"):
        interpreted(graph_of(helper.make_node("LSTM", ["x"], ["y"], name="recurrent")))
    with pytest.raises(UsageError, match="operator Relu of node r is not interpreted"):
        interpreted(graph_of(helper.make_node("Relu", ["x"], ["y"], name="r", domain="com.microsoft")))


def test_sizes_that_are_computed_are_refused_by_name() -> None:
    sizes = helper.make_tensor_value_info("sizes", TensorProto.INT64, [1])
    with pytest.raises(UsageError, match="Reshape turn computes sizes, expected a constant"):
        interpreted(graph_of(helper.make_node("Reshape", ["x", "sizes"], ["y"], name="turn"), inputs=(sizes,)))


def test_what_is_overwritten_may_be_read_by_nobody_else() -> None:
    scatter = helper.make_node("TensorScatter", ["x", "x"], ["y"], axis=1)
    with pytest.raises(UsageError, match="y: expected the result of a TensorScatter whose input nobody else reads"):
        interpreted(graph_of(scatter), y="x")


@pytest.fixture
def late() -> Callable[..., tuple[Any, Any, FakeDriver]]:
    """A bundle interpreted on the stand-in, and on the CPU by ONNX Runtime."""

    def open_both(update: str, seed: int = 0) -> tuple[Any, Any, FakeDriver]:
        path = frozen("0.8/clusters")
        model, reference = (load(path, backend="cpu", threads=1) for _ in range(2))
        driver = FakeDriver(seed=seed)
        model.backend = open_torch(model.bundle, open_fake_device(driver), LatePlace(driver), update)
        return model, reference, driver

    return open_both


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_the_exercise_of_a_gpu_is_rehearsed(update: str, late: Callable[..., Any]) -> None:
    model, reference, driver = late(update)
    found = exercise(model, reference, steps=120, seed=1)
    assert found.worst < 1e-5
    assert found.done.keys() >= {"segment", "one", "partial", "idle", "reset", "select", "score", "snapshot", "looked"}
    assert found.wrapped > 3 if update == "ring" else found.wrapped == 0
    assert "recorded" in set(found.recorded.values())
    driver.check()
    assert driver.replayed > 20


def test_an_exercise_finds_a_program_that_is_wrong(late: Callable[..., Any]) -> None:
    model, reference, _ = late("ring")
    for executable in model.backend.executables.values():
        inner = executable._interpreter
        name = executable.program.outputs[0].name
        executable._interpreter = lambda values, inner=inner, name=name: {
            key: value + 0.1 if key == name else value for key, value in inner(values).items()
        }
    assert exercise(model, reference, steps=10, seed=1).worst > LIMIT


def test_four_threads_share_a_model(late: Callable[..., Any]) -> None:
    model, reference, driver = late("ring", seed=3)
    found = in_threads(model, reference, threads=4, steps=25)
    assert len(found) == 4
    assert max(item.worst for item in found) < 1e-5
    driver.check()


def test_what_pytorch_raises_is_an_engine_s_failure(late: Callable[..., Any]) -> None:
    model, *_ = late("rolled")

    def fail(*_: Any) -> Launch:
        def launch() -> None:
            raise RuntimeError("CUDA error: out of memory\nat somewhere")

        return launch

    for executable in model.backend.executables.values():
        executable._place.tie = fail
    with pytest.raises(BackendError, match="failed in PyTorch: CUDA error: out of memory at somewhere"):
        model.stream().step(np.zeros((2, 1), np.int32))
