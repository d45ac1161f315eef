"""Tables that become markdown, and progress on the terminal; imports only Python's own library."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Table", "log"]


@dataclass
class Table:
    """Rows that become markdown."""

    columns: tuple[str, ...]
    rows: list[tuple[object, ...]] = field(default_factory=list)
    title: str = ""

    def add(self, *cells: object) -> None:
        """Add one row; floats are shown with three digits."""
        self.rows.append(cells)

    def markdown(self) -> str:
        """Return the table as it stands in docs/measurements."""
        lines = [f"**{self.title}**", ""] if self.title else []
        lines += [_line(self.columns), _line(["---"] * len(self.columns))]
        return "\n".join([*lines, *(_line([_cell(cell) for cell in row]) for row in self.rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: object) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 999.5 else f"{cell:,.0f}"
    return str(cell)


def log(message: str) -> None:
    """Print progress on stderr with the time of day, so that long runs show that they are alive."""
    print(time.strftime("%H:%M:%S"), message, file=sys.stderr, flush=True)
