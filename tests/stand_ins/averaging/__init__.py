"""A family of models that only tests have: a decaying average of what was seen. It shows what adding a family takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Average:
    """A source that the family exports: average ← decay · average + (1 - decay) · values."""

    width: int
    decay: float
