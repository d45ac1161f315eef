"""Describes a package's model: the adapter that makes the model, its weights and its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class Adapted:
    """The model of a package, given by adapter, weights and config.

    Attributes:
        name: the adapter's name.
        weights: a checkpoint of the package, or a state dict in memory.
        config: the arguments of the package's constructor, or a JSON file of them; None if the checkpoint contains
            them.
        facts: further facts from the training, for `StepSpec.facts`.
        told: a sentence for the user that names the files of this model; "" if the user named them.
    """

    name: str
    weights: Any
    config: str | Path | Mapping[str, Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    told: str = ""

    @property
    def file(self) -> str | None:
        """The name of the file of weights; None for a state dict in memory."""
        return Path(self.weights).name if isinstance(self.weights, str | Path) else None
