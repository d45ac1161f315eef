"""All limits by which a bundle, an engine or a competitor is judged.

The parity ladder (`LADDER`) has one rung per precision and kind of backend. Its numeric limits hold over chained
segments, from an empty memory to a memory that has rolled over many times. Its limits on distributions and perplexity
need a trained model and real text; without text they are reported as not judged. Each limit outside the ladder belongs
to one check: drift, quantised matrices, the self-test, `verify --bisect`, the conformance list or `bench`.
"""

from __future__ import annotations

from dataclasses import dataclass

from txl_runtime.errors import BackendError


@dataclass(frozen=True)
class Limit:
    """A row of `LIMITS`: the number by which a check judges, and the reason for this number."""

    value: float
    reason: str


LIMITS: dict[str, Limit] = {
    "near tie": Limit(
        0.02,
        "nats between the reference's two best tokens: below it, which of them a bundle likes best says nothing",
    ),
    "mask": Limit(
        1e3,
        'the size from which on a value is compared relative to itself. One that stands for "never", such as -1e4 at a '
        "token that may not come, would hide any error beside it if all were relative to the largest",
    ),
    "drift": Limit(
        1.5, "times the early mean error that the late one may be: inputs of one quarter of a chain can be harder"
    ),
    "drift floor": Limit(1e-6, "a late mean error so small is rounding, however much larger than the early one"),
    "explained": Limit(
        2.0,
        "times the model's own rounding, float32 against float64, that its bundle's error may be before the bundle is "
        "at fault: a bundle orders its sums as the model does not, and rounds once more",
    ),
    "gain": Limit(
        0.02,
        "how far the size of a quantised matrix may be from its original's, relatively; 4 bits reach some thousandths",
    ),
    "further": Limit(
        2.0,
        "times what was reached where a bundle was made: its self-test may reach that elsewhere. In half precision "
        "a competitor may differ by so much of what the ladder has, and one chain by so much of all chains' divergence",
    ),
    "rows": Limit(
        3.0,
        "likewise of one row of log-probabilities or memory in half precision: right results that round elsewhere "
        "reach 1.9, wrong ones 3.7 and more",
    ),
}
"""Limits of single checks that are not on the `LADDER`, by name."""


def limit_of(name: str) -> float:
    """Return the number of the entry of `LIMITS` that has this name."""
    return LIMITS[name].value


BISECT = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.15, "int8": 0.3, "int4": 1.0}
"""Largest |Δ| that `verify --bisect` and the conformance list count as rounding, relative to max(1, largest |value|),
by precision; a wrong weight gives far more.
"""

COMPETITOR_FP32 = 1e-3
COMPETITOR_KL = {"fp16": 2e-2, "bf16": 2e-2, "int8": 2e-2, "fp8": 2e-2, "int4": 0.2}
"""For `bench`, between two computations of the same function: the largest |Δ| in fp32, and the largest KL divergence in
nats of lower precisions. Both allow for the rounding of each precision; a different function differs by 0.1 and more.
"""


@dataclass(frozen=True)
class Rung:
    """Limits of one precision on one kind of backend; None for a measure that is not limited.

    Attributes:
        logprobs: largest |Δ| of a log-probability, in nats; of any other output relative to max(1, largest |value|).
        memory: largest |Δ| of a value of memory or state, relative to max(1, largest |value| of the reference). For
            both see "mask" in `LIMITS`.
        kl: largest mean Kullback-Leibler divergence from the reference, in nats.
        top1: smallest share of positions at which the most probable token agrees, not counting near-ties.
        perplexity: largest relative difference of the perplexity on real text.
        burst: smallest mean error that counts as drift, as a share of the standard deviation. Errors of half precision
            come in bursts, and one quarter of a chain may have more bursts than the other quarters. None: use "drift
            floor" of `LIMITS`.
        deviation: largest root mean square of Δ of a state, or of an output that is no log-probability, relative to the
            standard deviation of the values.
    """

    logprobs: float | None
    memory: float | None
    kl: float
    top1: float | None
    perplexity: float
    deviation: float | None = None
    burst: float | None = None


LADDER: dict[tuple[str, str], Rung] = {
    ("fp32", "cpu"): Rung(logprobs=1e-4, memory=1e-4, kl=1e-8, top1=None, perplexity=1e-4),
    ("fp32", "device"): Rung(logprobs=1e-3, memory=1e-3, kl=1e-6, top1=None, perplexity=1e-4),
    ("fp16", "any"): Rung(logprobs=None, memory=None, kl=1e-4, top1=0.995, perplexity=1e-3, deviation=1e-2, burst=1e-4),
    ("bf16", "any"): Rung(logprobs=None, memory=None, kl=1e-4, top1=0.995, perplexity=1e-3, deviation=5e-2, burst=5e-4),
    ("int8", "device"): Rung(logprobs=None, memory=None, kl=5e-3, top1=0.97, perplexity=5e-3, deviation=5e-2),
    ("fp8", "device"): Rung(logprobs=None, memory=None, kl=5e-3, top1=0.97, perplexity=5e-3, deviation=5e-2),
    ("int8", "any"): Rung(logprobs=None, memory=None, kl=5e-3, top1=0.97, perplexity=5e-3),
    ("int4", "any"): Rung(logprobs=None, memory=None, kl=3e-2, top1=0.92, perplexity=3e-2),
}
"""The parity ladder: limits by (precision, kind of backend); "any" stands for every backend."""


def rung(precision: str, backend: str) -> Rung:
    """Return the limits for a precision on a backend; `backend` is "cpu", "native" or the name of a device backend."""
    place = "cpu" if backend in ("cpu", "native") else "device"
    limits = LADDER.get((precision, place)) or LADDER.get((precision, "any"))
    if limits is None:
        raise BackendError(f"precision {precision!r} has no rung on the parity ladder; use fp32")
    return limits


def float32_limit() -> float:
    """Return the largest error of an output or state in float32 on the CPU that counts as rounding."""
    memory = rung("fp32", "cpu").memory
    assert memory is not None, "float32 is judged by its largest error"
    return memory


def explained(own: float) -> float:
    """Return the largest error of a bundle that the model's own rounding error `own` (float32 against float64)
    explains.
    """
    return limit_of("explained") * own


def no_drift_limit(early_mean: float, floor: float | None = None) -> float:
    """Return the largest mean error late in a chain that is no drift: "drift" of `LIMITS` times the early mean error,
    plus a floor.
    """
    return limit_of("drift") * early_mean + (limit_of("drift floor") if floor is None else floor)


def chain_limit(precision: str, real: bool) -> float:
    """Return the largest mean divergence of a single chain in a precision below float32.

    The mean over all chains would hide one bad chain; the worst chain of a correct bundle reaches 1.9 times that mean.
    On random inputs the ladder does not judge distributions below float32, so the limit for competitors holds
    (`COMPETITOR_KL`): rounding stays far below it, and a different function does not.

    Args:
        real: whether the inputs are real text.
    """
    return limit_of("further") * rung(precision, "any").kl if real else COMPETITOR_KL[precision]


def competitor_limit(precisions: set[str]) -> tuple[str, float]:
    """Return (measure "max_abs" or "kl", limit) by which `bench` compares competitors of these precisions."""
    lower = precisions - {"fp32"}
    widest = max(COMPETITOR_KL.values())
    most = max((COMPETITOR_KL.get(name, widest) for name in lower), default=COMPETITOR_FP32)
    return ("kl" if lower else "max_abs"), most


def competitor_step_limit(precision: str) -> tuple[str, float]:
    """Return (measure, limit) by which `bench` compares a step of this precision with its PyTorch module.

    The measure is "max_abs", relative to max(1, largest |value|), in fp32; else "deviation", as on the ladder (`Rung`).
    """
    deviation = rung(precision, "any").deviation
    return ("max_abs", COMPETITOR_FP32) if deviation is None else ("deviation", limit_of("further") * deviation)
