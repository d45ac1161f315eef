"""Gates that take more than one number: drift, half precision, the distribution."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from stand_ins.step_stream import MANIFEST, ArrayStream
from txl_export.proof.bits import Bits
from txl_export.proof.comparing import ChainErrors, TensorErrors
from txl_export.proof.gates import OUTPUTS, judge
from txl_report.schema.verification import Chain
from txl_runtime.ladder import rung
from verified_steps import MiscountedOnce, failing, verified


def test_of_random_inputs_the_distribution_is_judged_in_float32_alone():
    class Scaled(ArrayStream):
        def compute(self, x, states):
            outputs, after = super().compute(x, states)
            return outputs | {"words": outputs["words"] * np.float32(1.01)}, after

    assert "KL mean" in failing(verified(Scaled))
    assert next(gate for gate in verified(Scaled, precision="fp16").gates if gate.name == "KL mean").passed is None


def words(change: Any) -> type[ArrayStream]:
    """A step whose log-probabilities are changed in single positions."""

    class Changed(ArrayStream):
        def compute(self, x, states):
            outputs, after = super().compute(x, states)
            found = outputs["words"]
            return outputs | {"words": change(found) if found.shape[1] == 1 else found}, after

    return Changed


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "change",
    [lambda found: np.full_like(found, np.nan), np.zeros_like, lambda found: found[..., ::-1].copy()],
    ids=["NaN", "zeros", "another order"],
)
def test_log_probabilities_of_one_chain_that_are_another_functions_fail_without_a_text(precision, change):
    """Only the chain of segments of 1 has them, which is too short for drift to be judged in it."""
    assert "KL mean of one chain" in failing(verified(words(change), precision=precision))
    assert failing(verified(precision=precision)) == set()


def divergences(*means: float) -> list[ChainErrors]:
    chains = [steady(40)[0] for _ in means]
    for chain, mean in zip(chains, means, strict=True):
        chain.kl.extend([mean] * 40)
    return chains


@pytest.mark.parametrize(("worst", "passed"), [(1.9e-4, True), (2.1e-4, False)])
def test_on_real_inputs_a_chain_may_diverge_by_twice_the_limit_of_all(worst, passed):
    gates = {gate.name: gate for gate in judge(MANIFEST, "fp16", "cpu", divergences(worst, 0, 0), Bits(), real=True)}
    assert gates["KL mean"].passed
    assert gates["KL mean of one chain"].passed is passed


@pytest.mark.parametrize("order", [1, -1])
def test_a_drift_that_is_infinitely_far_is_the_worst_wherever_it_stands(order):
    chains = []
    for value in (np.inf, 1e-7):
        chain, errors = steady(40)
        for _ in range(40):
            errors.add((np.zeros((4, 64)), np.full((4, 64), value)))
        chains.append(chain)
    gates = judge(MANIFEST, "fp32", "cpu", chains[::order], Bits(), real=False)
    assert next(gate for gate in gates if gate.name == "drift of h").passed is False


def steady(segments: int) -> tuple[ChainErrors, TensorErrors]:
    """A chain with one state that was full from the beginning, and what compares that."""
    facts = Chain(name="segments of 1", streams=4, segments=segments, positions=0, rows=[64] * segments, full_from=0)
    errors = TensorErrors()
    return ChainErrors(facts, states={"h": errors}), errors


@pytest.mark.parametrize("reach", [None, 8])
@pytest.mark.parametrize(("share", "found"), [(0.5, set()), (3.0, {"drift of h"})])
def test_in_half_precision_bursts_below_a_hundredth_of_the_limit_are_no_drift(share: float, found: set[str], reach):
    random, burst = np.random.default_rng(0), rung("fp16", "cpu").burst
    assert burst is not None
    chain, errors = steady(40)
    for segment in range(40):
        values = random.normal(size=(64, 8))
        errors.add((values, values + (share * burst if segment >= 30 else 0)))
    gates = list(judge(msgspec.structs.replace(MANIFEST, reach=reach), "fp16", "cpu", [chain], Bits(), real=False))
    assert {gate.name for gate in gates if gate.passed is False} == found


def test_a_state_without_spread_has_no_limit_to_be_divided_by():
    chain, errors = steady(40)
    for _ in range(40):
        errors.add((np.zeros((64, 8)), np.zeros((64, 8))))
    gates = {gate.name: gate for gate in judge(MANIFEST, "fp16", "cpu", [chain], Bits(), real=False)}
    assert (gates["drift of h"].value, gates["drift of h"].passed) == (0.0, True)


class Rounded(ArrayStream):
    """As fp16 computes: outputs and states lose bits, each by itself."""

    bits = 1e-3

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        draws = np.random.default_rng(self.steps)
        return (
            {name: self._rounded(values, draws) for name, values in outputs.items()},
            {name: self._rounded(values, draws) for name, values in after.items()},
        )

    def _rounded(self, values: np.ndarray, draws: np.random.Generator) -> np.ndarray:
        if values.dtype != np.float32:
            return values
        same = draws.uniform(-1, 1, values.shape[1:])  # for all sequences alike
        return (values * (1 + self.bits * same)).astype(np.float32)


def test_half_precision_is_judged_by_the_deviation_and_whole_numbers_stay_exact():
    parity = verified(Rounded, precision="fp16")
    assert OUTPUTS not in {gate.name for gate in parity.gates}
    values = {gate.name: gate for gate in parity.gates}
    for name in ("outputs", "state"):
        gate = values[f"{name} RMS error (of the standard deviation)"]
        assert gate.passed
        assert gate.limit == 1e-2
        assert gate.value is not None
        assert 1e-5 < gate.value < 5e-3
    assert values["whole numbers differing"].passed
    assert values["top-1 differing"].verdict == "not judged"
    assert verified(MiscountedOnce, precision="bf16").passed is False


def test_nan_from_the_first_segment_on_is_found_in_half_precision_without_a_text():
    class Lost(ArrayStream):
        """Log-probabilities that are no numbers, which only a text would judge by their distribution."""

        def compute(self, x, states):
            outputs, after = super().compute(x, states)
            return outputs | {"words": outputs["words"] * np.float32(np.nan)}, after

    assert "drift of words" in failing(verified(Lost, precision="fp16"))


def test_too_coarse_an_arithmetic_fails_by_the_deviation():
    class Coarse(Rounded):
        bits = 0.1

    found = failing(verified(Coarse, precision="fp16"))
    assert "outputs RMS error (of the standard deviation)" in found
    assert "state RMS error (of the standard deviation)" in found


@pytest.mark.parametrize(
    ("size", "apart", "passed"),
    [(1e-5, -1.0, False), (1e-5, 1.02, True), (1e-3, 0.8, False), (1e-7, -1.0, None), (0.5, 1.0, None)],
)
def test_values_so_small_that_one_says_little_of_them_are_held_against_their_own_spread(size, apart, passed):
    """Below that they are rounding of larger ones, and above it the gate on the largest error judges them."""
    chain, _ = steady(40)
    values = size * np.random.default_rng(0).normal(size=(64,)).astype(np.float32)
    chain.outputs["y"] = errors = TensorErrors()
    errors.add((values, values * np.float32(apart)))
    gates = {gate.name: gate for gate in judge(MANIFEST, "fp32", "cpu", [chain], Bits(), real=True)}
    assert gates[OUTPUTS].passed or size > 1e-4
    found = gates.get("output y, small, RMS error (of the standard deviation)")
    assert (found and found.passed) is passed
