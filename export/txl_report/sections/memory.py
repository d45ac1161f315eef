"""Show the effect of memory: loss by position in the segment, loss by memory length, and the gain of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from txl_report.blocks import Block, Figure, Gap, Heading, Opening, Pairs, Paragraph, Section
from txl_report.charts.lines import heights, line_chart
from txl_report.charts.scales import exact_scale, linear_scale
from txl_report.facts.plain import Missing
from txl_report.measuring.averages import BLOCK
from txl_report.measuring.results import Loss, MemoryGain, MemoryLoss, TextMeasures
from txl_report.numbers import counted, fixed, number, share, signed, whole
from txl_report.sections.common import (
    NO_TOKENS,
    gap,
    height,
    loss_curve,
    report_command,
    spread_note,
    table,
    titled,
    unit_of,
)
from txl_report.sections.passage import passage_block

POSITIONS = (
    "With no memory the first tokens of a segment have hardly anything before them. If the memory works, the curve "
    "with it lies below the other one, most of all at the left, and stays level."
)
"""Note below the curves of loss by position, with and without memory."""
ABOVE = "The picture at the top of the page shows the loss by position, and the passage that the memory helped most."
"""Note that refers to the page's opening, which shows the same picture."""
SURE = 2
"""Number of standard errors by which a mean gain must differ from 0 to be stated as an effect."""
ALONE = "There is no second curve without memory to hold this one against, so a level line proves little."
"""Note below the curve of loss by position if the loss without memory is unknown."""


def memory_section(name: str, found: TextMeasures | Missing | None, source: str, option: str | None) -> Section:
    """Show the measurements on the text `source`; `option` is the command's option for a text, None if
    there is none.
    """
    blocks: list[Block]
    if found is None:
        why = "No text was given, so no loss was measured."
        blocks = [
            Gap("Losses on a text", *((NO_TOKENS,) if option is None else (why, (report_command(name, option),))))
        ]
    elif isinstance(found, Missing):
        blocks = [gap("Losses on a text", found)]
    else:
        blocks = _measured(found, source)
    return Section(
        "memory",
        "What memory does",
        "The memory carries over what came before a segment. How much better are the predictions for it?",
        blocks,
    )


def opening_of(found: TextMeasures | Missing | None) -> Opening | None:
    """Make the page's opening: the loss by position with and without memory, beside the passage with most gain."""
    if not isinstance(found, TextMeasures) or not found.passage or found.gain is None or not found.by_memory:
        return None
    gain, unit = found.gain, unit_of(found.of_bytes)
    without, with_it = (
        number(height(each.loss.nll, found.of_bytes)) for each in (found.by_memory[0], found.by_memory[-1])
    )
    if gain.error is not None and abs(gain.mean) > SURE * gain.error:
        title = (
            f"Memory {'lowers' if gain.mean > 0 else 'raises'} {unit} from {without} to {with_it} on {_scope(found)}"
        )
    else:
        title = f"No sure effect of memory on {_scope(found)}: {unit} {without} without, {with_it} with it"
    return Opening(title, _by_position(found), passage_block(found.passage, gain))


def _scope(measures: TextMeasures) -> str:
    """Name the part of the text that was measured: "the text", or "the first 16,385 of 250,000 tokens"."""
    cut = measures.used < measures.given
    return f"the first {whole(measures.used)} of {counted(measures.given, 'token')}" if cut else "the text"


def _measured(measures: TextMeasures, source: str) -> list[Block]:
    blocks: list[Block] = []
    cut = (
        ""
        if measures.used >= measures.given
        else f"; the text has {whole(measures.given)}, and txl-deploy score takes all"
    )
    blocks.append(
        Pairs(
            [
                ("Text", source),
                ("Tokens read", f"{whole(measures.used)}{cut}"),
                ("Tokens that count", f"{whole(measures.loss.count)}{_after(measures)}"),
                ("Perplexity", f"{number(measures.loss.perplexity, 4)} ({_nll(measures.loss)})"),
                *([("Bits per byte", bits_of(measures.loss))] if measures.of_bytes else []),
                ("What ± means", f"one standard error, from blocks of {BLOCK} neighbouring tokens"),
            ]
        )
    )
    blocks += [Paragraph(note, quiet=True) for note in measures.notes]
    if measures.passage:
        blocks.append(Paragraph(ABOVE))
    else:
        blocks += [_by_position(measures), Gap("Losses with less memory", measures.reason)]
    if measures.by_memory is not None:
        blocks.append(_by_memory(measures.by_memory, measures.of_bytes))
    if measures.gain is not None:
        blocks += [Heading("Token by token"), _gain(measures.gain)]
    return blocks


def _after(measures: TextMeasures) -> str:
    """Describe the tokens that ran before the counted ones in each piece of the text."""
    if not measures.memory_length:
        return ""
    pieces = f" in each of {whole(measures.sequences)} pieces" if measures.sequences > 1 else ""
    return f", after {whole(measures.warm_up)}{pieces} to fill the memory"


def _nll(loss: Loss) -> str:
    error = "" if loss.error is None else f" ± {number(loss.error, 2)}"
    return f"loss {fixed(loss.nll, 4)}{error} nats per token"


def bits_of(loss: Loss) -> str:
    """Write a loss in bits per token, which is bits per byte if every token is a byte."""
    error = "" if loss.error is None else f" ± {number(loss.error / math.log(2), 2)}"
    return f"{fixed(loss.nll / math.log(2), 3)}{error}"


def _by_position(measures: TextMeasures) -> Figure:
    losses, length, unit = measures.by_position, measures.segment_length, unit_of(measures.of_bytes)
    curves = {"with the whole memory": [each.loss for each in losses]}
    if without := [each.without for each in losses if each.without is not None]:
        curves["with no memory"] = without
    middles = [(each.first + each.last) / 2 for each in losses]
    places = [
        whole(each.first) if each.first == each.last else f"{whole(each.first)} … {whole(each.last)}" for each in losses
    ]
    series = [
        loss_curve(label, list(zip(middles, curve, strict=True)), places, of_bytes=measures.of_bytes)
        for label, curve in curves.items()
    ]
    rows = [
        (place, whole(counts[0].count), *(label for loss in counts for label in _cells_of(loss)))
        for place, *counts in zip(places, *curves.values(), strict=True)
    ]
    names = ("Loss, nats", "±", "Perplexity", "Loss without memory", "± of it", "Perplexity without")
    seen = [f"{each.name} from {number(each.points[0][1])} to {number(each.points[-1][1])}" for each in series]
    return Figure(
        titled(f"{unit} by position in the segment"),
        line_chart(
            "position",
            titled(f"{unit} by position in the segment"),
            f"From the first position to the last of {length}: {', '.join(seen)}.",
            series,
            exact_scale(0, max(length - 1, 1)),
            linear_scale(heights(series), zero=True),
            across_label="position in the segment",
            up_label=unit,
        ),
        table("Loss by position in the segment", ("Position", "Tokens", *names[: 3 * len(curves)]), range(8), rows),
        (POSITIONS if without else ALONE) + spread_note(series[0]),
    )


def _by_memory(losses: Sequence[MemoryLoss], of_bytes: bool) -> Figure:
    unit = unit_of(of_bytes)
    series = [loss_curve(unit, [(each.rows, each.loss) for each in losses], of_bytes=of_bytes)]
    rows = [
        (whole(each.rows), *_cells_of(each.loss, 4), signed(each.more), number(each.more_error, 2)) for each in losses
    ]
    return Figure(
        titled(f"{unit} by memory length"),
        line_chart(
            "memory-length",
            titled(f"{unit} by memory length"),
            f"From {number(series[0].points[0][1])} with {counted(losses[0].rows, 'row')} to "
            f"{number(series[0].points[-1][1])} with {whole(losses[-1].rows)}.",
            series,
            exact_scale(0, max(each.rows for each in losses)),
            linear_scale(heights(series)),
            across_label="memory rows that may be filled",
            up_label=unit,
        ),
        table(
            "Loss by memory length; the last two columns say how much larger it is than with the whole memory",
            ("Rows", "Loss, nats", "±", "Perplexity", "More, nats", "± of it"),
            range(6),
            rows,
        ),
        "Measured by capping how many memory rows may be filled, with the same weights and the same tokens."
        + spread_note(series[0])
        + " Differences between points are surer than that, because their tokens are the same; the table has them.",
    )


def _gain(gain: MemoryGain) -> Pairs:
    error = "" if gain.error is None else f" ± {number(gain.error, 2)}"
    return Pairs(
        [
            ("Mean gain", f"{signed(gain.mean)}{error} nats per token, {counted(gain.count, 'token')}"),
            ("Tokens helped", f"{share(gain.share_gained)} of all"),
            ("Made twice as likely", f"{share(gain.doubled)} of all"),
        ]
    )


def _cells_of(loss: Loss, digits: int = 3) -> tuple[str, str, str]:
    return fixed(loss.nll, 4), number(loss.error, 2), number(loss.perplexity, digits)
