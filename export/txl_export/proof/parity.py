"""Holds the result of a verification: gates, the document for the report, and advice for a failed gate."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs, to_builtins
from numpy.typing import NDArray
from txl_report.schema.verification import VOCABULARY, Divergence, Errors, Gate, Spread, Text, Unit, Verification
from txl_runtime.errors import CheckError
from txl_runtime.ladder import limit_of

from txl_export.proof.comparing import ChainErrors
from txl_export.proof.decades import EDGES, KL_EDGES, counts_of
from txl_export.proof.ranks import RankCounts

AMPLIFIES = "it amplifies rounding: look whether its weights are trained, or too large"
"""Advice if the model differs between float32 and float64 as much as the bundle differs from the model."""


@dataclass(frozen=True)
class Parity:
    """A finished verification.

    Attributes:
        backend: a description of the engine.
        precision: the bundle's precision.
        reference: a description of the reference.
        chains, text, gates: the errors of each chain, the errors of the text or None, and the gates with judgements.
        sensitivity: for quantised weights, the KL divergence in nats of quantising only one layer, by layer; else {}.
        advice: what to do if a gate failed.
        model_id: the id of the model.
        ran_on: the kind of inputs: "random inputs", "real inputs" or "the text".
        words: the first difference between the compared vocabularies, and what to do; "" if they are equal.
    """

    backend: str
    precision: str
    reference: str
    chains: tuple[ChainErrors, ...]
    text: Text | None
    gates: tuple[Gate, ...]
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    advice: str = "see the table, and report the checkpoint's family and config"
    model_id: str = ""
    ran_on: str = ""
    words: str = ""

    @property
    def passed(self) -> bool:
        """True if no gate failed."""
        return not failing(self.gates)

    def with_gain(self, error: float) -> Parity:
        """Return a copy with a gate on `error`, the largest |gain - 1| of quantised matrices."""
        gate = Gate("quantised weights (gain)", error, limit_of("gain"), error <= limit_of("gain"))
        return replace(self, gates=(*self.gates, gate))

    def behind(self, fitted: int) -> Parity:
        """Return a copy which records that the text follows `fitted` tokens that int4 matrices were fitted to."""
        return self if self.text is None else replace(self, text=structs.replace(self.text, behind=fitted))

    def with_words(self, differing: Sequence[str] | None) -> Parity:
        """Return a copy with a gate on the differences of vocabularies; `differing` is None if none were compared."""
        advice = f"{differing[0]}; give --vocabulary the file that the export was given" if differing else ""
        count, passed = (None, None) if differing is None else (float(len(differing)), not differing)
        return replace(self, gates=(*self.gates, Gate(VOCABULARY, count, 0.0, passed)), words=advice)

    def require(self) -> None:
        """Raise ParityError with the names of the failed gates, if any failed."""
        if failed := failing(self.gates):
            cells = "; ".join(f"{gate.name} is {gate.value:.3g}, limit {gate.limit:.3g}" for gate in failed)
            raise ParityError(f"parity failed: {cells}; {self.gate_advice}", self)

    @property
    def gate_advice(self) -> str:
        """The advice for a failed gate; for quantised weights it names the layers to keep."""
        if self.words or not self.sensitivity:
            return self.words or self.advice
        worst = sorted(self.sensitivity, key=lambda layer: -self.sensitivity[layer])[:2]
        keeping = " ".join(f"--keep {layer}" for layer in worst)
        return f"{' and '.join(worst)} suffer most: keep them in float32 with {keeping}, or take more bits"

    def summary(self) -> dict[str, object]:
        """Return the value of each gate that has one, by name, for the manifest."""
        return {gate.name: gate.value for gate in self.gates if gate.value is not None}

    def verification(self) -> Verification:
        """Return the whole result in the form of report.json."""
        kl = [value for chain in self.chains for value in chain.kl]
        with np.errstate(invalid="ignore"):  # a quantile between two infinities is NaN
            largest = (float(value) for value in (np.mean(kl), np.quantile(kl, 0.999), np.max(kl))) if kl else ()
        return Verification(
            passed=self.passed,
            model_id=self.model_id,
            backend=self.backend,
            precision=self.precision,
            reference=self.reference,
            gates=self.gates,
            kl=Divergence(*largest) if kl else None,
            spread=self._spread(kl) if self.chains else None,
            chains=tuple(chain.row() for chain in self.chains),
            text=self.text,
            sensitivity=dict(self.sensitivity),
        )

    def document(self) -> dict[str, object]:
        """Return `verification` as JSON values, with lists in place of tuples."""
        document: dict[str, object] = json.loads(json.dumps(to_builtins(self.verification())))
        return document

    def _spread(self, kl: list[float]) -> Spread:
        """Return, over all chains, counts by decade of errors and of divergence, and the ranks."""
        kinds: dict[str, tuple[Unit, NDArray[np.int64]]] = {}
        ranks = RankCounts()
        for chain in self.chains:
            for name, (unit, counts) in chain.spread().items():
                kinds[name] = unit, counts + (kinds[name][1] if name in kinds else 0)
            ranks = ranks.joined(chain.ranks)
        errors = {name: Errors(unit, tuple(counts.tolist())) for name, (unit, counts) in kinds.items()}
        counted = tuple(counts_of(kl, KL_EDGES).tolist()) if kl else None
        return Spread(self.ran_on, EDGES, errors, KL_EDGES, counted, ranks.summary())


def failing(gates: Iterable[Gate]) -> list[Gate]:
    """Return the gates that failed; a gate without a judgement did not fail."""
    return [gate for gate in gates if gate.passed is False]


class ParityError(CheckError):
    """A verification has failed gates; `parity` is the whole result, `details` the part for --json."""

    def __init__(self, message: str, parity: Parity) -> None:
        super().__init__(message)
        self.parity = parity
        self.details = {"parity": parity.document()}
