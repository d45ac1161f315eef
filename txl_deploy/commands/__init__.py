"""One module per verb: wiring, tables and progress, no numerics."""

from __future__ import annotations

__all__: list[str] = []
