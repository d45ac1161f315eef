"""What a verification found, and whether it passed: the report's document, and what to do where a gate failed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import to_builtins
from numpy.typing import NDArray
from txl_report.schema.verification import VOCABULARY, Divergence, Errors, Gate, Spread, Text, Unit, Verification
from txl_runtime.errors import CheckError
from txl_runtime.ladder import limit_of

from txl_export.proof.comparing import ChainErrors
from txl_export.proof.decades import EDGES, KL_EDGES, counts_of
from txl_export.proof.ranks import RankCounts

AMPLIFIES = "it amplifies rounding: look whether its weights are trained, or too large"
"""What is said of a model that is as far from itself, between float32 and float64, as its bundle is from it."""


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
        ran_on: what the chains read, for people: "random inputs", "the text", ….
        words: where the vocabulary differs first from the one it was compared with, and what to do.
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
        """Whether no gate failed."""
        return not failing(self.gates)

    def with_gain(self, error: float) -> Parity:
        """The same with a gate on how faithfully matrices were quantised."""
        gate = Gate("quantised weights (gain)", error, limit_of("gain"), error <= limit_of("gain"))
        return replace(self, gates=(*self.gates, gate))

    def with_words(self, differing: Sequence[str] | None) -> Parity:
        """The same with a gate on the vocabulary, by what differs in it; None where it was not compared."""
        told = f"{differing[0]}; give --vocabulary the file that the export was given" if differing else ""
        count, passed = (None, None) if differing is None else (float(len(differing)), not differing)
        return replace(self, gates=(*self.gates, Gate(VOCABULARY, count, 0.0, passed)), words=told)

    def require(self) -> None:
        """Raise ParityError, naming the failing gates, unless all passed."""
        if failed := failing(self.gates):
            cells = "; ".join(f"{gate.name} is {gate.value:.3g}, limit {gate.limit:.3g}" for gate in failed)
            raise ParityError(f"parity failed: {cells}; {self.told}", self)

    @property
    def told(self) -> str:
        """What to do where a gate failed: of quantised weights, which layers to keep."""
        if self.words or not self.sensitivity:
            return self.words or self.advice
        worst = sorted(self.sensitivity, key=lambda layer: -self.sensitivity[layer])[:2]
        keeping = " ".join(f"--keep {layer}" for layer in worst)
        return f"{' and '.join(worst)} suffer most: keep them in float32 with {keeping}, or take more bits"

    def summary(self) -> dict[str, object]:
        """The few numbers that go into the manifest."""
        return {gate.name: gate.value for gate in self.gates if gate.value is not None}

    def verification(self) -> Verification:
        """Everything, as report.json has it."""
        kl = [value for chain in self.chains for value in chain.kl]
        with np.errstate(invalid="ignore"):  # between infinities
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
            chains=tuple(chain.found() for chain in self.chains),
            text=self.text,
            sensitivity=dict(self.sensitivity),
        )

    def document(self) -> dict[str, object]:
        """Everything, as plain JSON: lists in place of tuples."""
        found: dict[str, object] = json.loads(json.dumps(to_builtins(self.verification())))
        return found

    def _spread(self, kl: list[float]) -> Spread:
        """How errors, divergence and agreement are spread over all chains."""
        kinds: dict[str, tuple[Unit, NDArray[np.int64]]] = {}
        ranks = RankCounts()
        for chain in self.chains:
            for name, (unit, counts) in chain.spread().items():
                kinds[name] = unit, counts + (kinds[name][1] if name in kinds else 0)
            ranks = ranks.joined(chain.ranks)
        errors = {name: Errors(unit, tuple(counts.tolist())) for name, (unit, counts) in kinds.items()}
        counted = tuple(counts_of(kl, KL_EDGES).tolist()) if kl else None
        return Spread(self.ran_on, EDGES, errors, KL_EDGES, counted, ranks.found())


def failing(gates: Iterable[Gate]) -> list[Gate]:
    """The gates that failed."""
    return [gate for gate in gates if gate.passed is False]


class ParityError(CheckError):
    """Gates failed; `parity` is the whole verification, `details` what --json shows of it."""

    def __init__(self, message: str, parity: Parity) -> None:
        super().__init__(message)
        self.parity = parity
        self.details = {"parity": parity.document()}
