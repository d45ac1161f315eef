"""Build blocks, texts and commands that several sections of the page share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from txl_report.blocks import Cell, Column, Gap, Table
from txl_report.charts.lines import BARS, Series
from txl_report.facts.plain import Missing, quoted
from txl_report.measuring.results import Loss

NO_TOKENS = "The model reads no token ids, so a text has no losses that could be measured."
"""Reason why no loss is measured for a model that reads no token ids."""


def gap(what: str, found: Missing, name: str = "BUNDLE") -> Gap:
    """Make the block for a missing fact: the reason, and the command that would add it to a bundle of this name."""
    command = found.command.replace("BUNDLE", quoted(name))
    return Gap(what, found.reason, (command,) if command else ())


def titled(name: str) -> str:
    """Return a name with its first letter in upper case, for a heading."""
    return name[:1].upper() + name[1:]


def height(nll: float, of_bytes: bool) -> float:
    """Convert a loss in nats to the unit of a chart: bits per byte if every token is a byte, else perplexity."""
    return nll / math.log(2) if of_bytes else math.exp(min(nll, 700.0))


def unit_of(of_bytes: bool) -> str:
    """Return the name of the chart's unit: "bits per byte" or "perplexity"."""
    return "bits per byte" if of_bytes else "perplexity"


def loss_curve(
    name: str, losses: Sequence[tuple[float, Loss]], places: Sequence[str] = (), *, of_bytes: bool = False
) -> Series:
    """Turn losses into a curve; if all errors are known, with bars of ± one standard error."""
    known = all(loss.error is not None for _, loss in losses)
    ends = [(loss.nll - (loss.error or 0.0), loss.nll + (loss.error or 0.0)) for _, loss in losses if known]
    return Series(
        name,
        [(x, height(loss.nll, of_bytes)) for x, loss in losses],
        places,
        [(height(low, of_bytes), height(high, of_bytes)) for low, high in ends],
    )


def spread_note(series: Series) -> str:
    """Describe the error band or error bars of a curve of losses, as a sentence that begins with a space."""
    drawn = "bar at each point" if len(series.points) <= BARS else "band"
    return f" The {drawn} is ± one standard error." if series.ends else " The tokens are too few for a standard error."


def report_command(name: str, *options: str) -> str:
    """Return the command that makes the page of a bundle again, with the given options."""
    return " ".join(["txl-deploy report", quoted(name), *options])


def table(
    caption: str, names: Sequence[str], numbers: Sequence[int], rows: Sequence[Sequence[Cell]], *, folded: bool = False
) -> Table:
    """Make a table; `numbers` are the indices of the columns that hold numbers."""
    return Table(caption, [Column(name, index in numbers) for index, name in enumerate(names)], rows, folded)
