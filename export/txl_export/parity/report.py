"""What a verification found: chains of segments, a text, the gates they were judged by, and whether all passed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from txl_runtime.errors import CheckError
from txl_runtime.ladder import GAIN

DRIFT_ROWS = 64
"""The drift of a chain is not judged on quarters of fewer rows: those say more of their tokens than of the memory."""


@dataclass
class Chain:
    """One chain of segments: what was run, whatever the model.

    Attributes:
        name: what kind of segments.
        streams: sequences side by side.
        segments: segments run.
        positions: rows compared.
        rows: per segment, rows compared.
        full_from: first segment that met a full memory or state; None if none did.
        kl: per position, KL divergence of the runtime from the reference, nats.
        agreeing, decided: positions where the best token agrees, of those that are no near-ties.
    """

    name: str
    streams: int
    segments: int = 0
    positions: int = 0
    rows: list[int] = field(default_factory=list)
    full_from: int | None = None
    kl: list[float] = field(default_factory=list)
    agreeing: int = 0
    decided: int = 0

    def early_and_late_of(self, curve: Sequence[float]) -> tuple[float, float] | None:
        """Mean of a curve over the first and the last quarter of the segments that met a full state; None if too few
        did.
        """
        means, rows = (np.array(values[self.full_from or 0 :]) for values in (curve, self.rows))
        quarter = len(means) // 4
        ends = (slice(0, quarter), slice(len(means) - quarter, None))
        if self.full_from is None or quarter < 2 or min(rows[end].sum() for end in ends) < DRIFT_ROWS:
            return None
        early, late = (float(np.average(means[end], weights=rows[end])) for end in ends)
        return early, late

    def document(self) -> dict[str, object]:
        """Everything but the divergence of single positions, as plain JSON."""
        return {name: value for name, value in vars(self).items() if name != "kl"}


@dataclass
class ChainResult(Chain):
    """One chain of a Transformer-XL: how far apart the runtime and the reference were.

    Attributes:
        max_logprobs, max_memory: largest |Δ|; memory relative to max(1, largest |value| of the reference so far).
        mean_logprobs: per segment, mean |Δ|: the drift curve.
        max_per_segment: per segment, largest |Δ| of a log-probability.
    """

    max_logprobs: float = 0.0
    max_memory: float = 0.0
    mean_logprobs: list[float] = field(default_factory=list)
    max_per_segment: list[float] = field(default_factory=list)

    @property
    def early_and_late(self) -> tuple[float, float] | None:
        """Mean |Δ| over the first and the last quarter of the segments that met a full memory; None if too few did."""
        return self.early_and_late_of(self.mean_logprobs)


@dataclass(frozen=True)
class TextResult:
    """The mean negative log-likelihood of one text, by the reference and by the runtime."""

    tokens: int
    reference_nll: float
    runtime_nll: float

    @property
    def relative(self) -> float:
        """|Δ perplexity| / perplexity of the reference."""
        return abs(math.expm1(self.runtime_nll - self.reference_nll))


@dataclass(frozen=True)
class Gate:
    """One judged number. `passed` is None where there was nothing to judge it on."""

    name: str
    value: float | None
    limit: float
    passed: bool | None

    @property
    def verdict(self) -> str:
        """For people."""
        return {True: "passed", False: "FAILED", None: "not judged"}[self.passed]


@dataclass(frozen=True)
class Parity:
    """A finished verification.

    Attributes:
        backend: description of the engine.
        precision: of the bundle.
        reference: what it was compared with.
        chains, text, gates: what was run and judged.
        sensitivity: for quantised weights, the KL divergence that each layer causes alone.
        advice: what to do where a gate failed.
    """

    backend: str
    precision: str
    reference: str
    chains: tuple[Chain, ...]
    text: TextResult | None
    gates: tuple[Gate, ...]
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    advice: str = "see the table, and report the checkpoint's family and config"

    @property
    def passed(self) -> bool:
        """Whether no gate failed."""
        return all(gate.passed is not False for gate in self.gates)

    def with_gain(self, error: float) -> Parity:
        """The same with a gate on how faithfully matrices were quantised."""
        gate = Gate("quantised weights (gain)", error, GAIN, error <= GAIN)
        return replace(self, gates=(*self.gates, gate))

    def require(self) -> None:
        """Raise ParityError, naming the failing gates, unless all passed."""
        failing = [gate for gate in self.gates if gate.passed is False]
        if failing:
            cells = "; ".join(f"{gate.name} is {gate.value:.3g}, limit {gate.limit:.3g}" for gate in failing)
            advice = self.advice
            if self.sensitivity:
                worst = sorted(self.sensitivity, key=lambda layer: -self.sensitivity[layer])[:2]
                keeping = " ".join(f"--keep {layer}" for layer in worst)
                advice = f"{' and '.join(worst)} suffer most: keep them in float32 with {keeping}, or take more bits"
            raise ParityError(f"parity failed: {cells}; {advice}", self)

    def summary(self) -> dict[str, object]:
        """The few numbers that go into the manifest."""
        return {gate.name: gate.value for gate in self.gates if gate.value is not None}

    def document(self) -> dict[str, object]:
        """Everything, as plain JSON."""
        return {
            "passed": self.passed,
            "backend": self.backend,
            "precision": self.precision,
            "reference": self.reference,
            "gates": [{**vars(gate), "verdict": gate.verdict} for gate in self.gates],
            "kl": _spread([value for chain in self.chains for value in chain.kl]),
            "chains": [chain.document() for chain in self.chains],
            "text": None if self.text is None else {**vars(self.text), "relative": self.text.relative},
            "sensitivity": dict(self.sensitivity),
        }


def _spread(kl: Sequence[float]) -> dict[str, float] | None:
    """How divergence is distributed over positions; None for a model without log-probabilities."""
    if not kl:
        return None
    with np.errstate(invalid="ignore"):  # between infinities
        return {"mean": float(np.mean(kl)), "p99.9": float(np.quantile(kl, 0.999)), "max": float(np.max(kl))}


class ParityError(CheckError):
    """Gates failed; `parity` is the whole verification, `details` what --json shows of it."""

    def __init__(self, message: str, parity: Parity) -> None:
        super().__init__(message)
        self.parity = parity
        self.details = {"parity": parity.document()}
