"""Verification of bundles with graphs written by hand, against the same in NumPy: counts, growth, log-probabilities."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from step_models import MODELS, ROWS, VOCABULARY, B, Graph, StepModel
from txl_export.proof.gates import STATES
from txl_export.proof.parity import Parity, ParityError
from txl_export.proof.references import Reference
from txl_export.proof.selftest_vectors import selftest_vectors
from txl_export.proof.unusual_inputs import FAR
from txl_export.proof.verification import verify_model
from txl_runtime import load
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.tables import Input, Output, StateTensor
from txl_runtime.listener import Silent
from txl_runtime.model import Model
from txl_runtime.selftest import run_selftest


class Counting(Reference):
    """`step_models.counting` in float64."""

    described, small = "computed in float64", True

    def fresh(self, count: int) -> dict[str, Any]:
        return {"seen": np.tile(np.linspace(0, 1, VOCABULARY), (count, 1))}

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        tokens = inputs["tokens"]
        counted = np.arange(tokens.shape[1]) < np.asarray(valid)[:, None]
        hot = np.eye(VOCABULARY)[tokens] * counted[..., None]
        scores = states["seen"][:, None] + hot.cumsum(1)
        logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        return {"logits": logprobs}, {"seen": states["seen"] + hot.sum(1)}

    def in_single(self) -> None:
        return None


class Growing(Reference):
    """`step_models.growing` in float64."""

    described, small = "computed in float64", True

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self.table, self.mix = (draws.normal(size=size).astype(np.float32) for size in ((VOCABULARY, 4), (4, 3)))

    def fresh(self, count: int) -> dict[str, Any]:
        return {"clock": np.full(1, 3, np.int32), "rows": np.zeros((count, 0, 4)), "summary": None}

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        words = self.table.astype(np.float64)[inputs["tokens"]]
        every = np.concatenate([states["rows"], words], axis=1)
        mean = every.mean(1, keepdims=True)
        mixed = mean[:, 0] @ self.mix.astype(np.float64)
        summary = np.stack([mixed, -mixed])
        if states["summary"] is not None:
            words = words + states["summary"].sum((0, 2))[:, None, None]
            summary = summary + states["summary"] * 0.5
        after = {"clock": states["clock"] + np.int32(1), "rows": every[:, -ROWS:], "summary": summary}
        return {"mean": words + mean}, after

    def in_single(self) -> None:
        return None


REFERENCES = {"counting": Counting, "growing": Growing}


@pytest.fixture(params=REFERENCES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bundle(name: str, tmp_path: Path) -> Path:
    return MODELS[name]().write(tmp_path / f"{name}.txl")


def verified(bundle: Path, name: str, **options: Any) -> Parity:
    return verify_model(partial(load, bundle, "cpu"), REFERENCES[name](), "the test", segments=24, **options)


def failing(parity: Parity) -> set[str]:
    return {gate.name for gate in parity.gates if gate.passed is False}


def test_growing_counted_and_absent_states_pass(bundle, name):
    parity = verified(bundle, name)
    parity.require()
    longest = parity.chains[0].chain
    assert longest.full_from == (3 if name == "growing" else longest.full_from)
    names = {gate.name for gate in parity.gates}
    assert ("independent sequences (bits)" in names) == (name == "counting")
    assert ("whole numbers differing" in names) == (name == "growing")


def test_their_vectors_are_replayed_with_all_sequences_where_they_run_in_lockstep(bundle, name):
    model = load(bundle, "cpu")
    vectors = selftest_vectors(model.manifest, REFERENCES[name]())
    replaying = Model.__new__(Model)
    replaying.__dict__ = dict(model.__dict__)
    replaying.bundle = type("Bundle", (), {"manifest": model.manifest, "selftest": lambda _: vectors, "path": bundle})()
    result = run_selftest(replaying)
    result.require()
    assert result.streams == ((3,) if name == "growing" else (1, 2, 3))
    assert max(result.largest.values()) < 1e-6


def test_each_stage_of_growth_has_its_faults_found(tmp_path):
    path = MODELS["growing"]().write(tmp_path / "growing.txl")
    graph = onnx.load(path / "step-2.1.onnx")
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.shape == () and values.dtype == np.float32:
            tensor.CopyFrom(numpy_helper.from_array(np.float32(0.51), tensor.name))
    (path / "step-2.1.onnx").write_bytes(graph.SerializeToString())
    accept(path, "step-2.1.onnx")
    assert failing(verified(path, "growing")) >= {STATES}


def accept(path: Path, name: str) -> None:
    """Let the manifest say what a file is now."""
    import json

    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["files"][name] = {"size": (path / name).stat().st_size, "sha256": file_sha256(path / name)}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_with_real_tokens_distribution_and_perplexity_are_judged(tmp_path):
    path = MODELS["counting"]().write(tmp_path / "counting.txl")
    samples = {"tokens": np.random.default_rng(0).integers(0, VOCABULARY, (1, 300)).astype(np.int32)}
    judged = {gate.name: gate for gate in verified(path, "counting", samples=samples).gates}
    random = {gate.name: gate for gate in verified(path, "counting").gates}
    assert judged["KL mean"].verdict == random["KL mean"].verdict == "passed", "whatever the tokens are"
    assert judged["perplexity (relative)"].verdict == "passed"
    assert random["perplexity (relative)"].verdict == "not judged"


def gates(features: bool) -> StepModel:
    """A step whose gate is the logarithm of a sigmoid, which is 0 in the graph where it is small in PyTorch."""
    table = np.random.default_rng(0).normal(size=(VOCABULARY, 4)).astype(np.float32)
    given = Input(name="x", dtype="float32", shape=("B", 4), role="feature")
    tokens = Input(name="tokens", dtype="int32", shape=("B",), role="tokens", vocab=VOCABULARY)
    held = StateTensor(
        name="held", input="state.held.in", output="state.held.out", dtype="float32", shape=(B, 4), batch_axis=0,
        update="replace",
    )  # fmt: skip
    valid = Input(name="valid", dtype="int32", shape=("B",), role="valid")
    outputs = (Output(name="y", dtype="float32", shape=("B", 4)),)
    model, graph = StepModel((given if features else tokens, valid), outputs, (held,)), Graph()
    read = "x" if features else graph.add("Gather", [graph.constant(table), "tokens"])
    total = graph.add("Add", [read, graph.add("Mul", ["state.held.in", graph.constant(0.5, np.float32)])])
    graph.add("Log", [graph.add("Sigmoid", [total])], "y")
    live = graph.add("Greater", ["valid", graph.constant(0, np.int32)])
    live = graph.add("Unsqueeze", [live, graph.constant([1], np.int64)])
    graph.add("Where", [live, total, "state.held.in"], "state.held.out")
    model.add("step-1", 1, graph)
    return model


class Gates(Reference):
    """`gates` in float64."""

    described, small = "computed in float64", True

    def __init__(self) -> None:
        self.table = np.random.default_rng(0).normal(size=(VOCABULARY, 4)).astype(np.float32).astype(np.float64)

    def fresh(self, count: int) -> dict[str, Any]:
        return {"held": np.zeros((count, 4))}

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        read = inputs["x"].astype(np.float64) if "x" in inputs else self.table[inputs["tokens"]]
        total = read + states["held"] / 2
        with np.errstate(invalid="ignore"):  # a state may hold NaN
            return {"y": -np.logaddexp(0, -total)}, {"held": total}

    def in_single(self) -> None:
        return None


@pytest.mark.parametrize("features", [False, True], ids=["tokens", "samples"])
def test_where_a_graph_overflows_tensor_operator_and_input_are_named(features, tmp_path, monkeypatch):
    monkeypatch.setattr("txl_export.proof.chains.LIVE", 2)  # fewer than the graph has
    path = gates(features).write(tmp_path / "gates.txl")
    samples = {"x": np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)} if features else None
    warned: list[str] = []
    heard = Silent()
    monkeypatch.setattr(heard, "warn", warned.append)
    parity = verify_model(partial(load, path, "cpu"), Gates(), "the test", samples, segments=24, listener=heard)
    verdict = next(gate.verdict for gate in parity.gates if gate.name == FAR)
    far = "x" if features else "held"
    if features:
        assert failing(parity) == {FAR}
        with pytest.raises(ParityError) as refused:
            parity.require()
        message = str(refused.value)
    else:
        parity.require()
        assert verdict == "not judged", "the module may never hold such states"
        message = next(line for line in warned if "large" in line)
    assert f"with {far} 100 times as large as usual, output y is -inf where the module's is -" in message
    assert "; docs/own-models-reference.md#large" in message
