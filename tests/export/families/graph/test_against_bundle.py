"""A bundle beside an ONNX file from elsewhere: its states are fed back, and where the two part is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import txl_export
from onnx import TensorProto, helper, numpy_helper
from small_graphs import model, value
from step_models import B, Graph, StepModel, state
from txl_export.families.graph import standing_in
from txl_export.families.graph.against_bundle import SEGMENTS
from txl_runtime.bundle.tables import Input, Output
from txl_runtime.errors import BackendError, CheckpointError, UsageError

FEATURES, WIDTH = 3, 4
WEIGHTS = np.random.default_rng(0).normal(size=(FEATURES, WIDTH)).astype(np.float32)


def bundle(path: Path, first: float = 0.0, role: str = "feature") -> Path:
    """h' = 0.9 h + x W, and h' is returned, for three sequences that have nothing to do with each other."""
    step = StepModel(
        inputs=(
            Input(name="x", dtype="float32", shape=("B", FEATURES), role="feature"),
            Input(name="valid", dtype="int32", shape=("B",), role="valid"),
        ),
        outputs=(Output(name="y", dtype="float32", shape=("B", WIDTH), role=role),),
        states=(state("h", (B, WIDTH), 0, initial=first),),
    )
    graph = Graph()
    kept = graph.add("Mul", ["state.h.in", graph.constant(0.9, np.float32)])
    after = graph.add("Add", [kept, graph.add("MatMul", ["x", graph.constant(WEIGHTS)])])
    graph.add("LogSoftmax" if role == "logprobs" else "Identity", [after], "y")
    live = graph.add("Greater", ["valid", graph.constant(0, np.int32)])
    wide = graph.add("Reshape", [live, graph.constant([-1, 1], np.int64)])
    graph.add("Where", [wide, after, "state.h.in"], "state.h.out")
    step.add("step-1", 1, graph)
    return step.write(path)


def outside(
    path: Path,
    names: tuple[str, str, str, str] = ("x", "state", "y", "stateN"),
    kept: float = 0.9,
    weights: np.ndarray = WEIGHTS,
    rate: bool = False,
    batch: int | str = "batch",
) -> Path:
    """The same as others would have exported it, or almost the same."""
    x, h, y, after = names
    nodes = [
        helper.make_node("Mul", [h, "kept"], ["faded"]),
        helper.make_node("MatMul", [x, "weights"], ["seen"]),
        helper.make_node("Add", ["faded", "seen"], ["sum"]),
        helper.make_node("Mul", ["sum", "scale"], [y]),
        helper.make_node("Identity", [y], [after]),
    ]
    if rate:
        nodes.insert(0, helper.make_node("Cast", ["sr"], ["rate"], to=TensorProto.FLOAT))
        nodes.insert(1, helper.make_node("Div", ["rate", "usual"], ["scale"]))
    constants = [("kept", kept), ("weights", weights), *([("usual", 16000)] if rate else [("scale", 1)])]
    inputs = [(x, [batch, FEATURES]), (h, [batch, WIDTH])]
    given = [value(name, shape) for name, shape in inputs] + [value("sr", [], TensorProto.INT64)] * rate
    returned = [value(name, [batch, WIDTH]) for name in (y, after)]
    tensors = [numpy_helper.from_array(np.array(one, np.float32), name) for name, one in constants]
    onnx.save(model(nodes, given, returned, tensors, opset=17), path)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(tmp_path_factory.mktemp("made") / "step.txl")


def arrays(path: Path, **values: Any) -> Path:
    np.savez(path, **values)
    return path


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("x", "cache", "y", "new_cache"), {}),
        (("input", "state", "output", "stateN"), {"rename": {"input": "x", "output": "y"}}),
        (("x", "before", "y", "after"), {"states": {"before": "after"}}),
    ],
    ids=str,
)
def test_the_same_model_from_elsewhere_agrees_over_all_segments(
    names: Any, said: dict[str, Mapping[str, str]], made: Path, tmp_path: Path
) -> None:
    parity = txl_export.verify(made, checkpoint=outside(tmp_path / "a.onnx", names), **said)
    assert parity.passed
    assert parity.reference == f"a.onnx, {SEGMENTS} segments of 1"
    (gate,) = parity.gates
    assert gate.name == "y max abs (relative)"
    assert gate.value is not None
    assert gate.value < 1e-6


def test_a_state_may_begin_as_something_else_than_zeros(made: Path, tmp_path: Path) -> None:
    given = arrays(tmp_path / "a.npz", state=np.ones((B, WIDTH)))
    parity = txl_export.verify(made, checkpoint=outside(tmp_path / "a.onnx"), inputs=given)
    assert "y in segment 1 of" in parity.gate_advice, "the bundle begins with zeros"


def test_a_state_that_is_called_as_the_bundles_begins_as_it_does(tmp_path: Path) -> None:
    made = bundle(tmp_path / "step.txl", first=0.5)
    path = outside(tmp_path / "a.onnx")
    assert not txl_export.verify(made, checkpoint=path, segments=3).passed
    assert txl_export.verify(made, checkpoint=path, segments=3, rename={"state": "h"}).passed


def test_a_file_of_fewer_sequences_is_streamed_beside_as_many_of_the_bundles(made: Path, tmp_path: Path) -> None:
    parity = txl_export.verify(made, checkpoint=outside(tmp_path / "a.onnx", batch=1), segments=9)
    assert parity.passed
    assert not txl_export.verify(made, checkpoint=outside(tmp_path / "a.onnx", kept=0.8, batch=1), segments=9).passed


def test_logits_of_a_file_are_the_bundles_log_probabilities(tmp_path: Path) -> None:
    made = bundle(tmp_path / "step.txl", role="logprobs")
    assert txl_export.verify(made, checkpoint=outside(tmp_path / "a.onnx"), segments=9).passed


def test_an_output_may_be_the_state_and_further_outputs_are_no_matter(made: Path, tmp_path: Path) -> None:
    path = outside(tmp_path / "a.onnx", ("x", "h", "y", "after"))
    assert txl_export.verify(made, checkpoint=path, states={"h": "y"}, segments=9).passed


def test_other_weights_part_in_the_first_segment(made: Path, tmp_path: Path) -> None:
    parity = txl_export.verify(made, checkpoint=outside(tmp_path / "a.onnx", weights=WEIGHTS * np.float32(1.01)))
    assert not parity.passed
    assert "they part first at y in segment 1 of 200" in parity.gate_advice


def test_a_state_that_is_kept_otherwise_parts_later(made: Path, tmp_path: Path) -> None:
    parity = txl_export.verify(made, checkpoint=outside(tmp_path / "a.onnx", kept=0.89), segments=9)
    assert not parity.passed
    assert "y in segment 2 of 9" in parity.gate_advice


def test_what_the_file_takes_besides_and_real_inputs_come_from_a_file(made: Path, tmp_path: Path) -> None:
    path = outside(tmp_path / "a.onnx", rate=True)
    with pytest.raises(UsageError, match=r"a\.onnx: takes sr beside .* always the same \(sr\?\) by --inputs FILE\.npz"):
        txl_export.verify(made, checkpoint=path)
    real = np.random.default_rng(1).normal(size=(2, FEATURES))
    given = arrays(tmp_path / "a.npz", x=real, sr=np.int64(16000))
    assert txl_export.verify(made, checkpoint=path, inputs=given, segments=5).passed
    given = arrays(tmp_path / "a.npz", x=real, sr=np.int64(8000))
    assert not txl_export.verify(made, checkpoint=path, inputs=given, segments=5).passed
    given = arrays(tmp_path / "a.npz", x=real * 0, sr=np.int64(8000))
    assert txl_export.verify(made, checkpoint=path, inputs=given, segments=5).passed, "it is these that are read"


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such output": (
        {},
        {"states": {"state": "nothing"}},
        r"--state or --inputs name nothing; the file takes x, state and gives y, stateN",
    ),
    "other names": (
        {"names": ("input", "before", "output", "after")},
        {},
        r"takes input, before and gives output, after beside .*, and the bundle has x, y, expected one name for each "
        "thing; give --rename input=x --rename output=y --state before=after",
    ),
    "more sequences": ({"batch": 4}, {}, "batch_size is 4, expected 1 … 3; export with --batch-size for more"),
    "beside a module": ({}, {"module": "a.py:build"}, r"a\.onnx: is an ONNX file, which has no use for --module"),
    "inputs without one": (
        {},
        {"inputs": {"z": np.zeros(2)}},
        r"a\.onnx: --rename, --state or --inputs name z; the file takes x, state",
    ),
    "text as inputs": ({}, {"inputs": {"state": np.array(["a"])}}, "state is float32, which no array is made of"),
    "inputs of another shape": ({}, {"inputs": {"x": np.zeros((2, 7))}}, r"--inputs has x of \[2, 7\], expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_in_one_line(case: str, made: Path, tmp_path: Path) -> None:
    other, options, said = REFUSED[case]
    options = {"checkpoint": outside(tmp_path / "a.onnx", **other)} | options
    if isinstance(options.get("inputs"), dict):
        options["inputs"] = arrays(tmp_path / "a.npz", **options["inputs"])
    with pytest.raises(UsageError, match=said) as refusal:
        txl_export.verify(made, **options)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there_is_refused_in_one_line(made: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^nowhere\.onnx: No such file or directory, expected an ONNX model"):
        txl_export.verify(made, checkpoint="nowhere.onnx")


def test_a_file_that_takes_too_long_is_refused_in_one_line(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_in, "SECONDS", 0.0)
    with pytest.raises(BackendError, match=r"a\.onnx: took more than 0 s of processor time; try fewer --segments"):
        txl_export.verify(made, checkpoint=outside(tmp_path / "a.onnx"))


def test_options_of_a_comparison_need_a_file(made: Path) -> None:
    with pytest.raises(UsageError, match=r"--inputs, --state and --rename are for a FILE\.onnx that the bundle"):
        txl_export.verify(made, states={"a": "b"})
