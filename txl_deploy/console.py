"""Print for the command line: progress and warnings on stderr, results on stdout, and series of numbers as bars."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich import progress
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from txl_runtime.bundle.encoding import escaped, utf8

from txl_deploy import stopping
from txl_deploy.terminal import Messages

_WHOLE = 12
"""Maximum width, in characters, of a cell that is never folded; longer cells may be folded."""
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys (control characters, line ends, changes of direction), and surrogates."""


def plain(text: str, kept: str = "") -> str:
    """Make a stranger's text safe for a terminal: escape control characters, except those in `kept`."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in kept else escaped(found[0]), text)


class _Plain(Console):
    """A console that prints texts unchanged, without markup or emoji; controls except line ends are escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print on this console's stream."""
        super().print(*(plain(each, "\n") if isinstance(each, str) else each for each in objects), **options)

    def show_cursor(self, show: bool = True) -> bool:
        """Keep the cursor visible, because a run that is killed or suspended could not show it again."""
        return False


stderr = _Plain(file=Messages())
stdout = _Plain()


class Bar(progress.Progress):
    """A progress bar on stderr, if the cursor can move. Messages appear above the bar; results do not disturb it."""

    def __init__(self, *columns: progress.ProgressColumn) -> None:
        # 30 is the width of all columns except the title's
        room = Column(no_wrap=True, overflow="ellipsis", max_width=max(stderr.width - 30, 8))
        title = progress.TextColumn("{task.description}", markup=False, table_column=room)
        draws = stderr.is_terminal and not stderr.is_dumb_terminal and stderr.file.isatty()
        bar = progress.BarColumn(table_column=Column(min_width=4))
        columns = (progress.SpinnerColumn(), title, bar, *columns)
        super().__init__(*columns, console=stderr, disable=not draws, redirect_stdout=False)

    def start(self) -> None:
        """Begin to draw; if this is interrupted, stop drawing."""
        try:
            super().start()
        except BaseException:
            self.stop()
            raise


class Display:
    """A listener that draws the stages of long work on stderr: elapsed time, and a bar if the number of steps is known.

    It is a `txl_runtime.listener.Listener`. If stderr is no terminal, or a dumb terminal, each finished stage is a
    line.

    Args:
        of_bytes: True if steps are bytes: the display shows a share and the remaining time in place of their number.
    """

    def __init__(self, of_bytes: bool = False) -> None:
        whole = Column(no_wrap=True)
        counted = progress.TaskProgressColumn(table_column=whole), progress.TimeRemainingColumn(table_column=whole)
        columns = counted if of_bytes else (progress.MofNCompleteColumn(table_column=whole),)
        self._progress = Bar(*columns, progress.TimeElapsedColumn(table_column=whole))
        self._task: Any = None

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()

    def stage(self, title: str, total: int | None = None) -> None:
        """Begin a new stage; `total` is the stage's number of steps, if known."""
        stopping.require_going()
        self._finish()
        self._task = self._progress.add_task(plain(title), total=total)

    def advance(self, steps: float = 1) -> None:
        """Count `steps` more steps of the stage as done."""
        self._progress.advance(self._task, steps)

    def warn(self, message: str) -> None:
        """Print a warning of one line."""
        stderr.print(f"note: {message}", soft_wrap=True)

    def _finish(self) -> None:
        if self._task is None:
            return
        task = self._progress.tasks[-1]
        if self._progress.disable:
            stderr.print(f"{task.description}: {task.elapsed or 0:.1f} s", soft_wrap=True)
        else:
            total = task.total if task.total is not None else 1
            self._progress.update(self._task, total=total, completed=total)
        self._task = None


def print_json(document: object) -> None:
    """Print one JSON document on stdout, always in UTF-8; characters that a terminal obeys are escaped."""
    try:
        data = msgspec.json.encode(document)
    except UnicodeEncodeError:  # file names may be any bytes, but JSON texts may not
        data = msgspec.json.encode(utf8(msgspec.to_builtins(document)))
    sys.stdout.flush()
    text = _CONTROLS.sub(lambda found: _in_json(found[0]), msgspec.json.format(data).decode())
    sys.stdout.buffer.write(f"{text}\n".encode())
    sys.stdout.buffer.flush()


def _in_json(character: str) -> str:
    """Escape a character in JSON's notation, so that readers get the same text; line ends are layout, and stay."""
    return character if character == "\n" else json.dumps(character)[1:-1]


def text_writer() -> Callable[[bytes], None]:
    """Return a function that writes a model's text to stdout piece by piece.

    A pipe or a file receives the bytes unchanged. A terminal receives only complete characters, and control characters
    are escaped, because a model may write anything.
    """
    from txl_runtime.streaming.texts import TextStream

    text = TextStream()

    def write(piece: bytes) -> None:
        if sys.stdout.isatty():
            sys.stdout.write(plain(text.feed(piece), "\n\t"))
            sys.stdout.flush()
        else:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()

    return write


def facts_table(facts: Mapping[str, object]) -> Table:
    """Make a table of two columns from names and values."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(plain(name), style="bold"), value if isinstance(value, Text) else Text(plain(str(value))))
    return table


def rows_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Table | Text:
    """Make a plain table with numbers aligned to the right. If the table is too wide, each row becomes its own table.

    If only the first column lacks room, so that its cells would take three lines, each first cell gets a line of its
    own, with the other cells of the row below it.
    """
    texts = [[cell if isinstance(cell, Text) else Text(plain(str(cell))) for cell in row] for row in rows]
    cells = [[row[index].plain for row in texts] for index in range(len(columns))]
    numbers = [all(cell[:1].isdigit() or cell == "–" for cell in column) for column in cells]
    widths = [max(map(cell_len, (name.strip(), *column))) for name, column in zip(columns, cells, strict=True)]
    room = stdout.width - sum(widths[1:]) - 2 * len(widths[1:])
    if title is None and len(columns) > 1 and room >= 0 and widths[0] > 2 * room:
        return _beneath(columns, texts, numbers, widths)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    least = sum(min(width, _WHOLE) + 2 for width in widths) - 2
    if stdout.width < least or (room < 0 and all(numbers[1:])):
        table.show_header = False
        for _ in range(2):
            table.add_column(overflow="fold")
        for row in texts:
            for heading, cell in zip(columns, row, strict=True):
                table.add_row(Text(heading.strip(), style="bold"), cell)
            table.add_row("", "")
        return table
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers[index] else "left", overflow="fold")
    for row in texts:
        table.add_row(*row)
    return table


def _beneath(
    columns: Sequence[str], texts: Sequence[Sequence[Text]], numbers: Sequence[bool], widths: Sequence[int]
) -> Text:
    """Put the first cell of every row on a line of its own, and the row's other cells on the next line, in columns."""
    headings = [Text(heading.strip(), style="bold") for heading in columns]
    lines = [Text("")] if columns[0].startswith("\n") else []
    for name, *others in (headings, *texts):
        for cell, width, is_number in zip(others, widths[1:], numbers[1:], strict=True):
            cell.align("right" if is_number else "left", width)
        lines += [name, Text("  ").join([Text(""), *others])]
    return Text("\n").join(lines)


def number(value: object) -> str:
    """Return a number as text with three digits, None as a dash, and any other value unchanged as text."""
    return "–" if value is None else f"{value:.3g}" if isinstance(value, int | float) else str(value)


def curve(values: Sequence[float], title: str, rows: int = 6, width: int = 64) -> str:
    """Draw values as bars of text, in their order; the highest bar is the largest finite value.

    An infinite value or NaN is a column of ! from top to bottom. If all values are 0, the result is a sentence. On a
    narrow terminal there are fewer bars, and each bar is the largest of several values.
    """
    if not values:
        return ""
    if not any(values):
        return f"{title}: 0 in {f'all {len(values)} segments' if len(values) > 1 else 'the only segment'}"
    width = max(min(width, stdout.width - 11), 8)
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
    return "\n".join([*lines, f"{'':>9} └{'─' * len(bars)}", f"{'':>11}segment 1 … {len(values)}"])
