"""The parity ladder, as the design has it."""

from __future__ import annotations

import dataclasses

import pytest
from txl_runtime import BackendError, ladder
from txl_runtime.ladder import LADDER, LIMITS, Rung, no_drift_limit, rung

DEVICES = ["cuda", "tensorrt", "rtx"]


def test_fp32_has_the_strictest_limits_on_the_cpu_and_ten_times_the_error_on_a_device():
    assert rung("fp32", "cpu") == Rung(logprobs=1e-4, memory=1e-4, kl=1e-8, top1=None, perplexity=1e-4)
    for backend in DEVICES:
        assert rung("fp32", backend) == Rung(logprobs=1e-3, memory=1e-3, kl=1e-6, top1=None, perplexity=1e-4)


@pytest.mark.parametrize(
    ("precision", "kl", "top1", "perplexity", "deviation", "burst"),
    [
        ("fp16", 1e-4, 0.995, 1e-3, 1e-2, 1e-4),
        ("bf16", 1e-4, 0.995, 1e-3, 5e-2, 5e-4),
        ("int4", 3e-2, 0.92, 3e-2, None, None),
    ],
)
def test_lower_precisions_are_judged_by_their_distribution_and_deviation_wherever_they_run(
    precision, kl, top1, perplexity, deviation, burst
):
    expected = Rung(None, None, kl=kl, top1=top1, perplexity=perplexity, deviation=deviation, burst=burst)
    assert all(rung(precision, backend) == expected for backend in ("cpu", *DEVICES))


def test_int8_is_judged_by_deviation_too_on_a_device_and_fp8_as_int8():
    expected = Rung(None, None, kl=5e-3, top1=0.97, perplexity=5e-3)
    assert rung("int8", "cpu") == rung("int8", "native") == expected
    for backend in DEVICES:
        assert rung("int8", backend) == rung("fp8", backend) == dataclasses.replace(expected, deviation=5e-2)


def test_the_ladder_has_no_other_rungs():
    assert {precision for precision, _ in LADDER} == {"fp32", "fp16", "bf16", "int8", "fp8", "int4"}


def test_a_precision_without_a_rung_is_refused():
    with pytest.raises(BackendError, match=r"precision 'fp8' has no rung on the parity ladder; use fp32"):
        rung("fp8", "cpu")


@pytest.mark.parametrize(("early", "limit"), [(0.0, 1e-6), (2e-6, 4e-6), (1.0, 1.500001)])
def test_no_drift_is_half_as_much_again_and_a_millionth(early, limit):
    assert no_drift_limit(early) == pytest.approx(limit, rel=1e-12)


def test_limits_of_single_checks_stand_in_the_same_table():
    found = {name: row.value for name, row in LIMITS.items()}
    assert found == {
        "near tie": 0.02,
        "mask": 1e3,
        "drift": 1.5,
        "drift floor": 1e-6,
        "explained": 2.0,
        "gain": 0.02,
        "further": 2.0,
        "rows": 3.0,
    }
    assert ladder.BISECT == {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.15, "int8": 0.3, "int4": 1.0}


@pytest.mark.parametrize(
    ("precisions", "measure", "limit"),
    [
        ({"fp32"}, "max_abs", 1e-3),
        ({"fp32", "fp16"}, "kl", 2e-2),
        ({"int8", "fp16"}, "kl", 2e-2),
        ({"int4", "fp32"}, "kl", 0.2),
        ({"int8", "fp8"}, "kl", 2e-2),
        ({"fp4"}, "kl", 0.2),
    ],
)
def test_competitors_are_held_together_by_the_wider_of_their_limits(precisions, measure, limit):
    assert ladder.competitor_limit(precisions) == (measure, limit)
