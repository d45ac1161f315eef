"""How close is close enough: every limit that a bundle, an engine or a competitor is judged by stands here.

The parity ladder (`LADDER`) has one rung per precision and kind of backend. Its numeric limits hold over chained
segments, from an empty memory to one that has rolled over many times. Its distribution and task limits need a trained
model and real text; without text they are reported as not judged. The other limits belong to one check each: drift,
quantised matrices, the self-test, `verify --bisect` and `bench`.
"""

from __future__ import annotations

from dataclasses import dataclass

from txl_runtime.errors import BackendError

NEAR_TIE = 0.02
"""Where the reference's two best tokens are less than this many nats apart, which of them comes first says nothing."""

GAIN = 0.02
"""How far the size of a quantised matrix may be from its original's, relatively; 4 bits reach some thousandths."""

FURTHER = 2.0
"""A quantised bundle's self-test may be this many times as far from the reference as it was where it was made, and a
bundle in half precision from a competitor as the ladder has it."""

ROWS = 3.0
"""The self-test, in half precision: so many times as far from the reference as where the bundle was made a row of
log-probabilities or of memory may be. Right results that round elsewhere reach 1.9, wrong ones 3.7 and more."""

EXPLAINED = 2.0
"""A failed bundle is at some distance from its model. The model in float32 is at some distance from itself in float64.
Where the first distance is at most twice the second, the message says that the model amplifies rounding. The check has
failed all the same."""

MASK = 1e3
"""A value of this size and more is compared relative to itself, and says nothing of how large the other values of its
tensor are: one that stands for "never", such as -1e4 at a token that may not come, would hide any error beside it."""

AMPLIFIED = 5e-5
"""Half of the limit of float32. An output or state whose float32 is further than this from its float64, relative to
max(1, largest value), has no half left for the bundle's own rounding: it is compared segment by segment."""

DRIFT_SLACK = 5e-7
"""Half of the smallest drift that counts. Beside an amplified tensor, a tensor whose own drift between float32 and
float64 comes this close to the limit drifts by itself, because a bundle rounds once more than the module does."""

FAR_INPUTS = 1e-2
"""Inputs a hundred times as large as usual round a hundred times as coarsely: 1e-4 becomes 1e-2. A graph that does
something else with them, such as an overflow or a bound, differs by far more."""

COMPARABLE = 1e-3
"""With such inputs a value is compared where the module's float32 and float64 agree to this, relative to max(1, value).
Elsewhere the module itself does not say what is right."""

HIDDEN_NAN = 0.0
"""A bundle on the CPU shows NaN wherever its module does: no value may be a number there."""

BISECT = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.15, "int8": 0.3, "int4": 1.0}
"""`verify --bisect`: the largest |Δ|, relative to max(1, largest |value|), that is rounding; a wrong weight gives far
more."""

COMPETITOR_FP32 = 1e-3
COMPETITOR_KL = {"fp16": 2e-2, "bf16": 2e-2, "int8": 2e-2, "int4": 0.2}
"""`bench`: the largest |Δ| in fp32, and the largest KL divergence of other precisions, between two that compute the
same function. Wide enough for the rounding of each precision; another function differs by 0.1 and more."""


@dataclass(frozen=True)
class Rung:
    """Limits of one precision on one kind of backend; None where the ladder sets none.

    Attributes:
        logprobs: largest |Δ| of a log-probability, in nats; of any other output relative to max(1, largest |value|).
        memory: largest |Δ| of a value of memory or state, relative to max(1, largest |value| of the reference).
            For both see `MASK`.
        kl: mean Kullback-Leibler divergence from the reference, in nats.
        top1: share of positions, near-ties aside, whose most probable token agrees.
        perplexity: relative difference of the perplexity on real text.
        burst: the mean error that counts as drift at least, as a share of the standard deviation. Half precision errs
            in bursts, of which one quarter of a chain may hold more than another. None: 1e-6 (`no_drift_limit`).
        deviation: root of the mean squared Δ of a state, or of an output that is no log-probability, relative to the
            standard deviation of its values.
        attention: largest |Δ| of an attention probability, where a bundle tells them. Only float32 on the CPU has a
            limit. Elsewhere a score takes over the rounding of weights and memory, times how large the model's scores
            are: no number is right for all models, so what was reached is recorded and not judged.
    """

    logprobs: float | None
    memory: float | None
    kl: float
    top1: float | None
    perplexity: float
    deviation: float | None = None
    burst: float | None = None
    attention: float | None = None


LADDER: dict[tuple[str, str], Rung] = {
    ("fp32", "cpu"): Rung(logprobs=1e-4, memory=1e-4, kl=1e-8, top1=None, perplexity=1e-4, attention=1e-5),
    ("fp32", "device"): Rung(logprobs=1e-3, memory=1e-3, kl=1e-6, top1=None, perplexity=1e-4),
    ("fp16", "any"): Rung(logprobs=None, memory=None, kl=1e-4, top1=0.995, perplexity=1e-3, deviation=1e-2, burst=1e-4),
    ("bf16", "any"): Rung(logprobs=None, memory=None, kl=1e-4, top1=0.995, perplexity=1e-3, deviation=5e-2, burst=5e-4),
    ("int8", "any"): Rung(logprobs=None, memory=None, kl=5e-3, top1=0.97, perplexity=5e-3),
    ("int4", "any"): Rung(logprobs=None, memory=None, kl=3e-2, top1=0.92, perplexity=3e-2),
}


def rung(precision: str, backend: str) -> Rung:
    """The limits for a precision on a backend ("cpu", or any name of a device backend)."""
    place = "cpu" if backend == "cpu" else "device"
    found = LADDER.get((precision, place)) or LADDER.get((precision, "any"))
    if found is None:
        raise BackendError(f"precision {precision!r} has no rung on the parity ladder; use fp32")
    return found


def no_drift_limit(early_mean: float, floor: float = 1e-6) -> float:
    """The largest late mean error that is no drift, given the early one and what is too small to say anything."""
    return 1.5 * early_mean + floor


def competitor_limit(precisions: set[str]) -> tuple[str, float]:
    """What `bench` compares two competitors of these precisions by ("max_abs" or "kl"), and the limit of that."""
    lower = precisions - {"fp32"}
    limit = max((COMPETITOR_KL.get(name, max(COMPETITOR_KL.values())) for name in lower), default=COMPETITOR_FP32)
    return ("kl" if lower else "max_abs"), limit


def competitor_step_limit(precision: str) -> tuple[str, float]:
    """What `bench` compares any step of this precision with its module by, and the limit of that.

    "max_abs", relative to max(1, largest |value|), in fp32; else "deviation", as on the ladder (see `Rung`).
    """
    deviation = rung(precision, "any").deviation
    return ("max_abs", COMPETITOR_FP32) if deviation is None else ("deviation", FURTHER * deviation)
