"""What a library says while it works, through its logger."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Journal"]

ERROR = 1


@dataclass
class Journal:
    """As far as it matters: errors, and the final list of layers."""

    errors: list[str] = field(default_factory=list)
    layers: str = ""

    def add(self, severity: int, text: str) -> None:
        """One message; severities count as TensorRT's, 0 is the worst."""
        if severity <= ERROR:
            self.errors.append(text)
        elif "LayerType:" in text and "Name:" in text:
            self.layers = text
