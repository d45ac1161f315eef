"""The parity ladder: how close is close enough, per precision and backend. The only such table in the code.

Numeric limits hold over chained segments, memory empty to many times rolled over. Distribution and task limits need a
trained model and real text; without it they are reported as not judged. Drift: the mean error over the last quarter
of segments against the first quarter after the memory was full.
"""

from __future__ import annotations

from dataclasses import dataclass

from txl_runtime.errors import BackendError

__all__ = ["NEAR_TIE", "Rung", "no_drift_limit", "rung"]

NEAR_TIE = 0.02
"""Nats between the reference's two best tokens below which the first place is a coin toss."""


@dataclass(frozen=True)
class Rung:
    """Limits of one precision on one kind of backend; None where the ladder sets none.

    Attributes:
        logprobs: largest |Δ| of a log-probability, in nats.
        memory: largest |Δ| of a memory value, relative to max(1, largest |value| of the reference).
        kl: mean Kullback-Leibler divergence from the reference, in nats.
        top1: share of positions, near-ties aside, whose most probable token agrees.
        perplexity: relative difference of the perplexity on real text.
    """

    logprobs: float | None
    memory: float | None
    kl: float
    top1: float | None
    perplexity: float


LADDER: dict[tuple[str, str], Rung] = {
    ("fp32", "cpu"): Rung(logprobs=1e-4, memory=1e-4, kl=1e-8, top1=None, perplexity=1e-4),
    ("fp32", "device"): Rung(logprobs=1e-3, memory=1e-3, kl=1e-6, top1=None, perplexity=1e-4),
    ("fp16", "any"): Rung(logprobs=None, memory=None, kl=1e-4, top1=0.995, perplexity=1e-3),
    ("bf16", "any"): Rung(logprobs=None, memory=None, kl=1e-4, top1=0.995, perplexity=1e-3),
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


def no_drift_limit(early_mean: float) -> float:
    """The largest late mean error that is no drift, given the early one."""
    return 1.5 * early_mean + 1e-6
