"""What a verification found: chains of segments, a text, the gates they were judged by, and whether all passed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from txl_runtime.errors import CheckError
from txl_runtime.ladder import GAIN

from txl_export.proof.decades import EDGES, KL_EDGES, Decades, decades_of, joined
from txl_export.proof.ranks import Ranks

DRIFT_ROWS = 64
"""The drift of a chain is not judged on quarters of fewer rows: those say more of their tokens than of the memory."""

AMPLIFIES = "it amplifies rounding: look whether its weights are trained, or too large"
"""What is said of a model that is as far from itself, between float32 and float64, as its bundle is from it."""


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
        ranks: where the reference's best tokens stand, near-ties included.
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
    ranks: Ranks = field(default_factory=Ranks)

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

    def spread(self) -> dict[str, tuple[str, Decades]]:
        """By what was compared: the unit of its errors, "nats" or "relative", and how they are spread."""
        return {}

    def document(self) -> dict[str, object]:
        """Everything as plain JSON but the divergence of single positions, and what all chains have in common."""
        return {name: value for name, value in vars(self).items() if name not in ("kl", "ranks", "errors")}


@dataclass
class ChainResult(Chain):
    """One chain of a Transformer-XL: how far apart the runtime and the reference were.

    Attributes:
        max_logprobs, max_memory: largest |Δ|; memory relative to max(1, largest |value| of the reference so far).
        mean_logprobs: per segment, mean |Δ|: the drift curve.
        max_per_segment: per segment, largest |Δ| of a log-probability.
        errors: how |Δ| of log-probabilities is spread.
    """

    max_logprobs: float = 0.0
    max_memory: float = 0.0
    mean_logprobs: list[float] = field(default_factory=list)
    max_per_segment: list[float] = field(default_factory=list)
    errors: Decades = field(default_factory=Decades)

    def spread(self) -> dict[str, tuple[str, Decades]]:
        """See `Chain`."""
        return {"log-probabilities": ("nats", self.errors)}

    @property
    def early_and_late(self) -> tuple[float, float] | None:
        """Mean |Δ| over the first and the last quarter of the segments that met a full memory; None if too few did."""
        return self.early_and_late_of(self.mean_logprobs)


@dataclass(frozen=True)
class TextResult:
    """The mean negative log-likelihood of one text, by the reference and by the runtime.

    `errors` counts sizes of |Δ| of the log-probabilities of its tokens, by decades (`spread.EDGES`).
    """

    tokens: int
    reference_nll: float
    runtime_nll: float
    errors: tuple[int, ...] = ()

    @property
    def relative(self) -> float:
        """|Δ perplexity| / perplexity of the reference."""
        return abs(math.expm1(self.runtime_nll - self.reference_nll))

    def document(self) -> dict[str, object]:
        """Everything, as plain JSON."""
        return {**vars(self), "errors": list(self.errors), "relative": self.relative}


@dataclass(frozen=True)
class Gate:
    """One judged number. `passed` is None where there was nothing to judge it on, or no limit to judge it by."""

    name: str
    value: float | None
    limit: float | None
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
        model_id: which model it is.
        ran_on: what the chains read, for people: "random tokens", "the text", ….
    """

    backend: str
    precision: str
    reference: str
    chains: tuple[Chain, ...]
    text: TextResult | None
    gates: tuple[Gate, ...]
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    advice: str = "see the table, and report the checkpoint's family and config"
    model_id: str = ""
    ran_on: str = ""

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
            raise ParityError(f"parity failed: {cells}; {self.told}", self)

    @property
    def told(self) -> str:
        """What to do where a gate failed: of quantised weights, which layers to keep."""
        if not self.sensitivity:
            return self.advice
        worst = sorted(self.sensitivity, key=lambda layer: -self.sensitivity[layer])[:2]
        keeping = " ".join(f"--keep {layer}" for layer in worst)
        return f"{' and '.join(worst)} suffer most: keep them in float32 with {keeping}, or take more bits"

    def summary(self) -> dict[str, object]:
        """The few numbers that go into the manifest."""
        return {gate.name: gate.value for gate in self.gates if gate.value is not None}

    def document(self) -> dict[str, object]:
        """Everything, as plain JSON."""
        return {
            "passed": self.passed,
            "model_id": self.model_id,
            "backend": self.backend,
            "precision": self.precision,
            "reference": self.reference,
            "gates": [{**vars(gate), "verdict": gate.verdict} for gate in self.gates],
            "kl": _quantiles([value for chain in self.chains for value in chain.kl]),
            "spread": self._spread(),
            "chains": [chain.document() for chain in self.chains],
            "text": None if self.text is None else self.text.document(),
            "sensitivity": dict(self.sensitivity),
        }

    def _spread(self) -> dict[str, object] | None:
        """How errors, divergence and agreement are spread over all chains; None where there are no chains."""
        if not self.chains:
            return None
        kinds: dict[str, tuple[str, list[Decades]]] = {}
        for chain in self.chains:
            for name, (unit, decades) in chain.spread().items():
                kinds.setdefault(name, (unit, []))[1].append(decades)
        errors = {name: {"unit": unit, "counts": joined(parts).document()} for name, (unit, parts) in kinds.items()}
        kl, ranks = [value for chain in self.chains for value in chain.kl], Ranks()
        for chain in self.chains:
            ranks = ranks.joined(chain.ranks)
        return {
            "ran_on": self.ran_on,
            "edges": list(EDGES),
            "errors": errors,
            "kl_edges": list(KL_EDGES),
            "kl": decades_of(kl, KL_EDGES).document() if kl else None,
            "ranks": ranks.document(),
        }


def _quantiles(kl: Sequence[float]) -> dict[str, float] | None:
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
