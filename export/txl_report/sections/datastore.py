"""Show the gain of a datastore on a text: losses with and without the store, by how often it has read the token."""

from __future__ import annotations

from txl_report.blocks import Block, Figure, Pairs, Paragraph, Section
from txl_report.charts.bars import Bar, named_bars
from txl_report.measuring.results import DatastoreMeasures, FrequencyLoss, Loss
from txl_report.numbers import counted, number, share, signed, whole
from txl_report.sections.common import height, table, titled, unit_of

COPIES = (
    "The rows of the text itself are hidden. Copies of parts of it elsewhere in the store are found, and cannot be "
    "excluded."
)
"""Note on copies of the text in the store, which make the store look better than it is."""


def datastore_section(found: DatastoreMeasures) -> Section:
    """Show the losses of a text with and without a datastore."""
    unit, alone, mixed = titled(unit_of(found.of_bytes)), found.without, found.mixed
    error = "" if found.gain_error is None else f" ± {number(found.gain_error)}"
    blocks: list[Block] = [
        Pairs(
            [
                ("Datastore", f"{found.name}, {counted(found.rows, 'position')}"),
                ("Measured on", f"{counted(alone.count, 'token')} of {whole(found.given)}, from empty memory"),
                (f"{unit} without", number(height(alone.nll, found.of_bytes), 4)),
                (f"{unit} with", number(height(mixed.nll, found.of_bytes), 4)),
                ("Gain per token", f"{signed(alone.nll - mixed.nll)}{error} nats"),
            ]
        ),
        _by_frequency(found),
        Paragraph(COPIES, quiet=True),
    ]
    return Section(
        "datastore",
        "What the datastore does",
        "Neighbours of what was read get a share of each prediction. Which tokens gain from them?",
        blocks,
    )


def _by_frequency(measures: DatastoreMeasures) -> Figure:
    unit, rows, bars = unit_of(measures.of_bytes), list[tuple[str, ...]](), list[Bar]()
    for group in measures.by_frequency:
        name, losses = _times(group), (group.without, group.mixed)
        pair = [height(loss.nll, measures.of_bytes) for loss in losses]
        for word, value, style in zip(("without", "with"), pair, (1, 2), strict=True):
            bars.append(Bar(f"read {name}, {word}", value, number(value), style))
        rows.append((name, whole(group.without.count), *map(number, pair), signed(_gain(*losses))))
    spread = share(sum(group.mixed.count for group in measures.by_frequency if group.first) / measures.without.count)
    return Figure(
        f"{titled(unit)} by how often the store has read the token",
        named_bars("datastore-frequency", f"{titled(unit)} by frequency", "Without the store and with it.", bars),
        table(
            "Losses by frequency",
            ("Times read", "Tokens", "Without", "With", "Gain, nats"),
            range(1, 5),
            rows,
        ),
        f"The store has read {spread} of the text’s tokens at least once; shorter bars are better.",
    )


def _times(group: FrequencyLoss) -> str:
    if group.last is None:
        return f"{whole(group.first)} times or more"
    return "never" if not group.last else f"{whole(group.first)} … {whole(group.last)} times"


def _gain(without: Loss, mixed: Loss) -> float:
    return without.nll - mixed.nll
