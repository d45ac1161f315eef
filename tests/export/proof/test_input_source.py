"""The inputs of chains: the user's samples, to the end and all of them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from stand_ins.step_stream import FEATURES, MANIFEST, ArrayModel, ArrayStream, B, NumpyReference
from txl_export.proof.chains import SAMPLED, planned
from txl_export.proof.gates import OUTPUTS
from txl_export.proof.input_source import InputSource
from txl_export.proof.verification import verify_model
from txl_runtime.bundle.tables import Input
from verified_steps import Heard, failing, verified


def test_samples_are_read_on_and_on():
    seen: list[np.ndarray] = []

    class Noting(ArrayStream):
        def run(self, inputs: Any, lengths: Any = None, commit: bool = True) -> dict[str, np.ndarray]:
            seen.append(inputs["x"])
            return super().run(inputs, lengths, commit)

    samples = {"x": np.arange(2 * 50 * 3, dtype=np.float32).reshape(2, 50, 3) / 100}
    parity = verified(Noting, samples=samples)
    assert next(gate for gate in parity.gates if gate.name == "KL mean").verdict == "passed"
    first, second = (values[0, :, 0] for values in seen[:2])
    assert set(first.tolist()) <= set(samples["x"][..., 0].ravel().tolist())
    step = (second[0] - first[-1]) * 100
    assert step == pytest.approx(3, abs=1e-3) or second[0] in (0.0, 1.5), "the next segment goes on"


class Reading(NumpyReference):
    """Notes the first number of everything that it reads."""

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def step(self, inputs: Any, states: Any, valid: Any) -> Any:
        self.seen |= set(np.round(inputs["x"][..., 0].ravel().astype(np.float64) * 1000).tolist())
        return super().step(inputs, states, valid)


class ElseInOneSample(ArrayStream):
    """Takes another branch where an observation is one of a thousand."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        rare = (np.round(x[..., 0] * 1000) == 777).any(1, keepdims=True)
        return outputs | {"mean": np.where(rare, outputs["mean"] + 1, outputs["mean"])}, after


def numbered(*shape: int) -> dict[str, np.ndarray]:
    """Samples whose first numbers count from 0 in thousandths."""
    x = np.random.default_rng(0).normal(size=(*shape, FEATURES)).astype(np.float32)
    x[..., 0] = np.arange(x[..., 0].size).reshape(shape) / 1000
    return {"x": x}


def without_length(stream: type[ArrayStream] = ArrayStream) -> ArrayModel:
    """The same step of one position, none of whose inputs has an "L", as of a policy."""
    model = ArrayModel(stream)
    one = {
        "inputs": (msgspec.structs.replace(MANIFEST.inputs[0], shape=("B", 1, FEATURES)), MANIFEST.inputs[1]),
        "outputs": (msgspec.structs.replace(MANIFEST.outputs[0], shape=("B", 1, 5)), MANIFEST.outputs[1]),
        "programs": MANIFEST.programs[1:],
    }
    model.manifest, model.segment_lengths = msgspec.structs.replace(model.manifest, **one), (1,)
    return model


def test_every_sample_of_a_policy_is_read_and_a_fault_in_one_of_a_thousand_is_found():
    samples, reference, heard = numbered(1000, 1), Reading(), Heard()
    right, wrong = without_length(), without_length(ElseInOneSample)
    verify_model(lambda: right, reference, "the test", samples, listener=heard).require()
    assert reference.seen >= set(range(1000))
    assert not [line for line in heard.warnings if "samples" in line]
    assert OUTPUTS in failing(verify_model(lambda: wrong, NumpyReference(), "the test", samples))


def test_long_samples_are_read_to_their_end_and_of_many_each_is_begun():
    reference, model = Reading(), ArrayModel()
    verify_model(lambda: model, reference, "the test", numbered(2, 50), segments=40).require()
    assert reference.seen >= set(range(100))
    source = InputSource(MANIFEST, numbered(50, 40), np.random.default_rng(0), 20 * B)
    for _ in range(20):
        source.take(B, 4)
    assert len(source.begun) == 50


def test_that_not_all_samples_were_read_is_said():
    heard = Heard()
    verified(samples=numbered(1000, 4), segments=20, listener=heard)
    line = next(line for line in heard.warnings if "samples" in line)
    assert line.startswith("142 of 1000 samples were read, because the longest chain ends after 20 segments; verify")
    assert planned(MANIFEST, None, 1000)[0].segments == math.ceil(1000 / B)
    assert planned(MANIFEST, None, 10**6)[0].segments == SAMPLED
    large = msgspec.structs.replace(MANIFEST, parameters=10**10)
    assert planned(large, None, 10**6)[0].segments == planned(large, None)[0].segments, "it takes long as it is"


def test_only_the_first_sequence_reads_no_flag_and_nothing_else_is_drawn_otherwise():
    flags = (
        Input(name="begin", dtype="bool", shape=("L", "B"), role="feature"),
        Input(name="mask", dtype="bool", shape=("B", "L"), role="feature"),
    )
    manifest = msgspec.structs.replace(MANIFEST, inputs=(*MANIFEST.inputs, *flags))
    flagged = {"begin": False}
    usual, quiet = (InputSource(manifest, None, np.random.default_rng(0), flags=flagged) for _ in range(2))
    for _ in range(4):
        expected, found = usual.take(B, 16), quiet.take(B, 16, quiet=True)
        assert expected["begin"][:, 0].any()
        assert not found["begin"][:, 0].any()
        expected["begin"][:, 0] = False
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
    given = {"x": np.zeros((1, 9, FEATURES)), "begin": np.ones((9, 1), np.bool_), "mask": np.ones((1, 9), np.bool_)}
    assert InputSource(manifest, given, np.random.default_rng(0), flags=flagged).take(B, 4, quiet=True)["begin"].all()
