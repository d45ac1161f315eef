"""Write tables as markdown, and print progress on the terminal; this module imports only Python's own library."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Table", "log"]


@dataclass
class Table:
    """A table that can be written as markdown: columns, rows, and a title above (or "")."""

    columns: tuple[str, ...]
    rows: list[tuple[object, ...]] = field(default_factory=list)
    title: str = ""

    def add(self, *cells: object) -> None:
        """Add one row; `markdown` writes floats with three digits and None as a dash."""
        self.rows.append(cells)

    def markdown(self) -> str:
        """Return the table as markdown, as the pages of docs/measurements have it."""
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
    """Print a message on stderr with the time of day, so that a long run shows its progress."""
    print(time.strftime("%H:%M:%S"), message, file=sys.stderr, flush=True)
