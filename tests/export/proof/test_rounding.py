"""The distance of a model from itself between float32 and float64, along given segments."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from frozen import frozen
from stand_ins.step_stream import ArrayModel, ArrayStream, NumpyReference
from support import random_state, small_config
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity import oracle
from txl_export.families.transformer_xl.parity.oracle import Oracle
from txl_export.proof import references
from txl_export.proof.gates import OUTPUTS, STATES
from txl_export.proof.rounding import OwnRounding
from txl_export.proof.verification import verify_model
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from verified_steps import Heard, OnceWrong, failing

CONFIG = small_config()
CALLS = [
    ({"tokens": np.random.default_rng(number).integers(0, 60, (2, 4)).astype(np.int32)}, np.array(counts, np.int32))
    for number, counts in enumerate([(4, 4), (2, 0), (4, 3)])
]


@pytest.fixture
def manifest() -> Manifest:
    return open_bundle(frozen("0.8/clusters")).manifest


def model(larger: dict[str, float], dtype: torch.dtype = torch.float64, memory_length: int = 7) -> Oracle:
    """A small model, some of its weights times a factor."""
    state = random_state(CONFIG)
    state["softmax.tables.0"] = state["embedding.tables.0"].clone()
    for name, factor in larger.items():
        state[name] *= factor
    config = msgspec.convert(
        {name: CONFIG[name] for name in ModelConfig.__struct_fields__ if name in CONFIG}, ModelConfig
    )
    dialect = Dialect(family="txl", memory_start="empty", window=None, clamp_length=None)
    return Oracle(PaperModel(config, dialect, memory_length, state, dtype), "kv")


def apart(manifest: Manifest, reference: Oracle) -> tuple[float, float]:
    """The largest errors of log-probabilities and of memory in the segments above."""
    beside, found = OwnRounding(manifest, reference.precisions() or (), 2), {"output": 0.0, "state": 0.0}
    for inputs, counts in CALLS:
        beside.segment(inputs, counts)
    for name, errors in beside.errors.items():
        found[name.split()[0]] = max(found[name.split()[0]], errors.largest)
    return found["output"], found["state"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_says_what_rounding_does_whichever_precision_the_reference_has(manifest, dtype):
    logprobs, memory = apart(manifest, model({}, dtype))
    assert 1e-8 < logprobs < 1e-5
    assert 1e-9 < memory < 1e-5
    steep, same = apart(manifest, model({"softmax.tables.0": 1e4}, dtype))
    assert 1e-3 < steep < 1
    assert same == memory, "what is remembered does not depend on the softmax"


def test_log_probabilities_are_compared_piece_by_piece(manifest, monkeypatch):
    """A segment of a large vocabulary, in both precisions at once, would be larger than the model."""
    monkeypatch.setattr(references, "whole", None)
    assert apart(manifest, model({})) > (0, 0)


def test_a_model_without_memory_and_one_that_is_too_large(manifest, monkeypatch):
    assert apart(manifest, model({}, memory_length=0))[1] == 0
    monkeypatch.setattr(oracle, "MOST_PARAMETERS", model({}).network.parameters - 1)
    assert model({}).precisions() is None


class Doubling(NumpyReference):
    """A state that differs a little differs more with every segment, as in a model that nobody has trained."""

    def __init__(self, single: bool = False) -> None:
        self._single = single

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        outputs, after = super().step(inputs, states, valid)
        return outputs, after | {"h": doubled(after["h"], np.float32 if self._single else np.float64)}

    def in_single(self) -> Any:
        return None if self._single else Doubling(single=True)


def doubled(h: np.ndarray, dtype: Any) -> np.ndarray:
    """A fraction of a multiple: the digits behind the point move to the front."""
    return (9 * h.astype(dtype)) % dtype(1)


class DoublingStream(ArrayStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"h": doubled(after["h"], np.float32)}


class DoublingWrongOnce(DoublingStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        if self.steps == 17:
            outputs["mean"][0, 1] += 1e-2
        return outputs, after


class DoublingForgetsToForget(DoublingStream):
    def reset(self, rows=None):
        held = self.held["h"]
        super().reset(rows)
        self.held["h"] = held


@pytest.mark.parametrize(
    ("stream", "gates"), [(DoublingStream, set()), (DoublingWrongOnce, {OUTPUTS}), (DoublingForgetsToForget, {STATES})]
)
def test_where_rounding_grows_in_the_model_itself_segments_are_compared_one_by_one(stream, gates):
    heard = Heard()
    model = ArrayModel(stream)
    parity = verify_model(lambda: model, Doubling(), "the test", segments=40, listener=heard)
    assert failing(parity) >= gates
    assert bool(failing(parity)) == bool(gates)
    assert [line for line in heard.warnings if line.startswith("the module amplifies rounding: in float32 it is ")]
    assert "so every segment begins with its state for output words, state h" in parity.reference


class DoublingLeaking(DoublingStream):
    """Another state than the one that rounding grows in leaks a little with every step."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"rows": after["rows"] + np.float32(4e-5)}


def test_rounding_that_grows_in_one_state_does_not_hide_what_leaks_from_another():
    model = ArrayModel(DoublingLeaking)
    parity = verify_model(lambda: model, Doubling(), "the test", segments=40)
    assert "state rows" not in parity.reference
    assert failing(parity) == {OUTPUTS}, "mean, which reads the rows, by itself far from the module"


def slowly_doubled(h: np.ndarray, rows: np.ndarray, x: np.ndarray, dtype: Any) -> dict[str, np.ndarray]:
    """A state whose errors become a quarter larger with every segment, and another to which a little of it is added."""
    h = (dtype(1.25) * h.astype(dtype) + x.astype(dtype).mean((1, 2))[None, :, None]) % dtype(1)
    return {"h": h, "rows": rows.astype(dtype) + dtype(3e-5) * h.mean((0, 2))[:, None, None]}


class DriftingBeside(NumpyReference):
    """Rounding grows in one state along the whole chain, and shows a little in another."""

    def __init__(self, single: bool = False) -> None:
        self._single = single

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        outputs, after = super().step(inputs, states, valid)
        dtype = np.float32 if self._single else np.float64
        return outputs, after | slowly_doubled(states["h"], after["rows"], inputs["x"], dtype)

    def in_single(self) -> Any:
        return None if self._single else DriftingBeside(single=True)


class DriftingBesideStream(ArrayStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | slowly_doubled(states["h"], after["rows"], x, np.float32)


class DriftingBesideAndLeaking(DriftingBesideStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"rows": after["rows"] + np.float32(4e-5)}


@pytest.mark.parametrize(("stream", "gates"), [(DriftingBesideStream, set()), (DriftingBesideAndLeaking, {OUTPUTS})])
def test_what_only_drifts_with_growing_rounding_is_held_to_the_limits_and_not_to_its_drift(stream, gates):
    model = ArrayModel(stream)
    parity = verify_model(lambda: model, DriftingBeside(), "the test", segments=80)
    assert "output words, state h" in parity.reference
    assert "state rows" not in parity.reference
    assert failing(parity) == gates


def test_a_fault_in_a_model_in_which_nothing_grows_is_not_taken_for_rounding():
    class Beside(NumpyReference):
        def in_single(self) -> Any:
            return NumpyReference()

    model = ArrayModel(OnceWrong)
    parity = verify_model(lambda: model, Beside(), "the test", segments=40)
    assert STATES in failing(parity)
    assert parity.reference == "the test, computed in float64"
