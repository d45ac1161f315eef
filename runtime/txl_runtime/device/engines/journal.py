"""What a library says while it works, through its logger."""

from __future__ import annotations

from dataclasses import dataclass, field

ERROR = 1
LONGEST = 400


@dataclass
class Journal:
    """The part of a library's messages that is used: its errors, and the last list of layers that it printed."""

    errors: list[str] = field(default_factory=list)
    layers: str = ""

    def add(self, severity: int, text: str) -> None:
        """Take one message; severities count as TensorRT's do, 0 is the worst."""
        if severity <= ERROR:
            self.errors.append(text)
        elif "LayerType:" in text and "Name:" in text:
            self.layers = text

    def complaints(self) -> str:
        """All errors in one line; of a long one its end, where the cause stands. Empty when there was none."""
        return " ".join(" ".join(self.errors).split())[-LONGEST:]
