"""What memory does: loss by position in the segment, loss by memory length, and the gain of single tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from txl_report.blocks import Block, Figure, Gap, Heading, Pairs, Paragraph, Section
from txl_report.charts.lines import Series, line_chart
from txl_report.charts.scales import exact_scale, linear_scale
from txl_report.measuring.results import GainInContext, Loss, MemoryGain, MemoryLoss, PositionLoss, TextMeasures
from txl_report.numbers import NONE, counted, fixed, number, share, signed, whole
from txl_report.sections.common import NO_TOKENS, report_command, table
from txl_report.sections.passage import passage_block


def memory_section(name: str, found: TextMeasures | None, source: str, option: str | None) -> Section:
    """What was measured on a text, which is called `source`; `option` says how one is given, None if it cannot be."""
    blocks: list[Block]
    if found is None:
        why = "No text was given, so no loss was measured."
        blocks = [
            Gap("Losses on a text", *((NO_TOKENS,) if option is None else (why, (report_command(name, option),))))
        ]
    else:
        blocks = _measured(found, source)
    return Section(
        "memory",
        "What memory does",
        "The memory carries over what came before a segment. How much better are the predictions for it?",
        blocks,
    )


def _measured(found: TextMeasures, source: str) -> list[Block]:
    blocks: list[Block] = []
    if found.loss is None or found.by_position is None:
        return [Gap("Losses on a text", found.reasons.get("loss", "The model has no losses."))]
    cut = "" if found.used >= found.given else f"; the text has {whole(found.given)}, the rest was not read"
    blocks.append(
        Pairs(
            [
                ("Text", source),
                ("Tokens read", f"{whole(found.used)}{cut}"),
                ("Tokens that count", f"{whole(found.loss.count)}{_after(found)}"),
                ("Perplexity", f"{number(found.loss.perplexity, 4)} ({_nll(found.loss)})"),
            ]
        )
    )
    blocks += [Paragraph(note, quiet=True) for note in found.notes]
    blocks += [Heading("By position in the segment"), _by_position(found.by_position, found.segment_length)]
    blocks.append(Heading("By memory length"))
    if found.by_memory is None:
        blocks.append(Gap("Perplexity by memory length", found.reasons.get("by_memory", "")))
    else:
        blocks.append(_by_memory(found.by_memory))
    blocks.append(Heading("Token by token"))
    if found.gain is not None:
        blocks.append(_gain(found.gain))
    if found.passage:
        blocks.append(passage_block(found.passage))
    else:
        blocks.append(Gap("The gain of each token", found.reasons.get("passage", "")))
    if found.gain is not None:
        blocks += [
            _standing_out("Tokens that memory helped most", found.gain.most_gained),
            _standing_out("Tokens that memory harmed most", found.gain.most_lost),
        ]
    return blocks


def _after(found: TextMeasures) -> str:
    """What came before the tokens that count, in each piece of the text that was read."""
    if not found.memory_length:
        return ""
    pieces = f" in each of {whole(found.sequences)} pieces" if found.sequences > 1 else ""
    return f", after {whole(found.warm_up)}{pieces} to fill the memory"


def _nll(loss: Loss) -> str:
    error = "" if loss.error is None else f" ± {number(loss.error, 2)}"
    return f"loss {fixed(loss.nll, 4)}{error} nats per token"


def _by_position(losses: Sequence[PositionLoss], length: int) -> Figure:
    def position(each: PositionLoss) -> str:
        return whole(each.first) if each.first == each.last else f"{whole(each.first)} … {whole(each.last)}"

    values = [_finite(each.loss.perplexity) for each in losses]
    points = [((each.first + each.last) / 2, value) for each, value in zip(losses, values, strict=True)]
    rows = [
        (
            position(each),
            whole(each.loss.count),
            fixed(each.loss.nll, 4),
            _error(each.loss),
            number(each.loss.perplexity),
        )
        for each in losses
    ]
    return Figure(
        "Perplexity by position in the segment",
        line_chart(
            "position",
            "Perplexity by position in the segment",
            f"From {number(values[0])} at the first position to {number(values[-1])} at the last of {length}.",
            [Series("perplexity", points, [position(each) for each in losses])],
            exact_scale(0, max(length - 1, 1)),
            linear_scale(values, zero=True),
            across_label="position in the segment",
            up_label="perplexity",
        ),
        table(
            "Loss by position in the segment",
            ("Position", "Tokens", "Loss, nats", "±", "Perplexity"),
            (0, 1, 2, 3, 4),
            rows,
        ),
        "A model without memory is lost at the beginning of every segment. A level line says that the memory works.",
    )


def _by_memory(losses: Sequence[MemoryLoss]) -> Figure:
    points = [(each.rows, _finite(each.loss.perplexity)) for each in losses]
    values = [value for _, value in points]
    rows = [
        (
            whole(each.rows),
            fixed(each.loss.nll, 4),
            _error(each.loss),
            number(each.loss.perplexity, 4),
            signed(each.more),
            number(each.more_error, 2),
        )
        for each in losses
    ]
    return Figure(
        "Perplexity by memory length, over the same tokens",
        line_chart(
            "memory-length",
            "Perplexity by memory length",
            f"From {number(values[0])} with {counted(losses[0].rows, 'row')} to {number(values[-1])} with "
            f"{whole(losses[-1].rows)}.",
            [Series("perplexity", points)],
            exact_scale(0, max(each.rows for each in losses)),
            linear_scale(values),
            across_label="memory rows that may be filled",
            up_label="perplexity",
        ),
        table(
            "Loss by memory length; the last two columns say how much larger it is than with the whole memory",
            ("Rows", "Loss, nats", "±", "Perplexity", "More, nats", "± of it"),
            range(6),
            rows,
        ),
        "Measured by capping how many memory rows may be filled, with the same weights and the same tokens.",
    )


def _gain(found: MemoryGain) -> Pairs:
    error = "" if found.error is None else f" ± {number(found.error, 2)}"
    return Pairs(
        [
            ("Mean gain", f"{signed(found.mean)}{error} nats per token, {counted(found.count, 'token')}"),
            ("Tokens helped", f"{share(found.share_gained)} of all"),
            ("Made twice as likely", f"{share(found.doubled)} of all"),
        ]
    )


def _standing_out(caption: str, found: Sequence[GainInContext]) -> Block:
    rows = [
        (
            each.token.text if each.token.text is not None else str(each.token.token),
            signed(each.token.gain),
            fixed(each.token.with_memory),
            fixed(each.token.without_memory),
            each.before,
            each.after,
        )
        for each in found
    ]
    return table(caption, ("Token", "Gain", "Loss", "without", "Before it", "After it"), (1, 2, 3), rows, folded=True)


def _error(loss: Loss) -> str:
    return NONE if loss.error is None else number(loss.error, 2)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan
