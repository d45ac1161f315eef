"""What the command line shows: progress and warnings on stderr, results on stdout, numbers as pictures."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


class Display:
    """Draws the stages of long work on stderr: elapsed time, and a bar where the number of steps is known.

    A `txl_runtime.listener.Listener`. Where stderr is no terminal, every finished stage is printed as one line.
    """

    def __init__(self) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), console=stderr, disable=not stderr.is_terminal)
        self._task: Any = None

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()

    def stage(self, title: str, total: int | None = None) -> None:
        """A new stage begins; `total` is the number of its steps, if they can be counted."""
        self._finish()
        self._task = self._progress.add_task(title, total=total)

    def advance(self, steps: int = 1) -> None:
        """Some steps of the stage are done."""
        self._progress.advance(self._task, steps)

    def warn(self, message: str) -> None:
        """One line a user should know."""
        stderr.print(f"note: {message}", markup=False, soft_wrap=True)

    def _finish(self) -> None:
        if self._task is None:
            return
        task = self._progress.tasks[-1]
        if self._progress.disable:
            stderr.print(f"{task.description}: {task.elapsed or 0:.1f} s", markup=False, soft_wrap=True)
        else:
            total = task.total if task.total is not None else 1
            self._progress.update(self._task, total=total, completed=total)
        self._task = None


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")


def facts_table(facts: Mapping[str, object]) -> Table:
    """Names and values, one per row."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        table.add_row(Text(name, style="bold"), value if isinstance(value, Text) else Text(str(value)))
    return table


def rows_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Table:
    """A plain table; columns of numbers are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        numbers = all(row[index][:1].isdigit() or row[index] == "–" for row in texts)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in texts:
        table.add_row(*row)
    return table


def number(value: float | None) -> str:
    """A measured number in three digits; a dash where nothing was measured."""
    return "–" if value is None else f"{value:.3g}"


def quantity(count: int, unit: str = "B") -> str:
    """Bytes or counts with a decimal prefix: 8.9 MB, 2.0 M."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {prefix}{unit}"
    return f"{count} {unit}".strip()


def curve(values: Sequence[float], title: str, rows: int = 6, width: int = 64) -> str:
    """Draw values as bars, in the order they are in: lines of text, the highest bar the largest finite value.

    Where a value is infinite or no number, its bar is marked with ! from top to bottom.
    """
    if not values:
        return ""
    chunk = -(-len(values) // width)
    parts = [values[start : start + chunk] for start in range(0, len(values), chunk)]
    bars = [max(part) if all(map(math.isfinite, part)) else math.inf for part in parts]
    top = max((bar for bar in bars if math.isfinite(bar)), default=0.0) or 1.0
    blocks = " ▁▂▃▄▅▆▇█"

    def cell(bar: float, row: int) -> str:
        return blocks[round(min(max(bar / top * rows - (row - 1), 0), 1) * 8)] if math.isfinite(bar) else "!"

    lines = [title]
    for row in range(rows, 0, -1):
        label = number(top) if row == rows else "0" if row == 1 else ""
        lines.append(f"{label:>9} ┤{''.join(cell(bar, row) for bar in bars)}")
    return "\n".join([*lines, f"{'':>9} └{'─' * len(bars)} segment 1 … {len(values)}"])
