"""What several sections of the page say in the same way."""

from __future__ import annotations

from collections.abc import Sequence

from txl_report.blocks import Cell, Column, Gap, Table
from txl_report.facts.plain import Missing, quoted

NO_TOKENS = "The model reads no token ids, so a text has no losses that could be measured."


def gap(what: str, found: Missing, name: str = "BUNDLE") -> Gap:
    """Why something is not there, and the command that would add it to a bundle of this name."""
    command = found.command.replace("BUNDLE", quoted(name))
    return Gap(what, found.reason, (command,) if command else ())


def titled(name: str) -> str:
    """A name as a heading begins: its first letter large, the others as they are."""
    return name[:1].upper() + name[1:]


def report_command(name: str, *options: str) -> str:
    """The command that makes the page of a bundle again, with options."""
    return " ".join(["txl-deploy report", quoted(name), *options])


def table(
    caption: str, names: Sequence[str], numbers: Sequence[int], rows: Sequence[Sequence[Cell]], *, folded: bool = False
) -> Table:
    """A table whose columns of these indices hold numbers."""
    return Table(caption, [Column(name, index in numbers) for index, name in enumerate(names)], rows, folded)
