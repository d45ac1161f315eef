"""How far back the model looks: what its architecture allows, and what was measured."""

from __future__ import annotations

from txl_report.blocks import Block, Figure, Gap, Heading, Pairs, Paragraph, Section
from txl_report.charts.lines import Series, heights, line_chart
from txl_report.charts.scales import exact_scale, linear_scale
from txl_report.facts.model import Context
from txl_report.facts.plain import Missing
from txl_report.measuring.results import ContextMeasure, EffectiveContext
from txl_report.numbers import counted, fixed, number, share, whole
from txl_report.sections.common import NO_TOKENS, gap, loss_curve, report_command, spread_note, table


def context_section(
    name: str, allowed: Context | Missing, found: ContextMeasure | Missing | None, option: str | None
) -> Section:
    """The theoretical context, and beside it the measured one."""
    blocks: list[Block] = []
    if isinstance(allowed, Context):
        said = f"{counted(allowed.tokens, 'token')}: {allowed.formula}"
        blocks.append(Pairs([("Architecture allows", said)]))
    else:
        blocks.append(gap("Theoretical context", allowed))
    if found is None and option is None:
        blocks.append(Gap("Measured effective context", NO_TOKENS))
    elif found is None:
        why = "How much of its context the model uses was not measured; that takes a text and some time."
        blocks.append(Gap("Measured effective context", why, (report_command(name, f"{option} --context"),)))
    elif isinstance(found, Missing):
        blocks.append(gap("Measured effective context", found))
    else:
        blocks += _measured(found)
    return Section(
        "context",
        "Effective context",
        "What the architecture allows is one thing; how far back more context still helps is another.",
        blocks,
    )


def length_of(found: EffectiveContext) -> str:
    """An effective context in tokens, as a lower bound where the measurement ended before it."""
    return f"{'at least ' if found.at_least else ''}{whole(found.length)}"


def plain_length_of(found: EffectiveContext) -> str:
    """The same by plain losses, where only what more context makes better on average counts."""
    return f"{'at least ' if found.plain_at_least else ''}{whole(found.plain_length)}"


def _meaning(step: int) -> str:
    """What a length of context stands for."""
    return "means c + 1 tokens" if step == 1 else f"means c + 1 … c + {whole(step)} tokens, each equally often"


def _measured(found: ContextMeasure) -> list[Block]:
    rows = [
        (
            "all tokens" if each.share == 1 else f"hardest {share(each.share)}",
            whole(each.count),
            length_of(each),
            f"{whole(each.low)} … {'≥ ' if each.high_at_least else ''}{whole(each.high)}",
            plain_length_of(each),
        )
        for each in found.lengths
    ]
    blocks: list[Block] = [
        Pairs(
            [
                ("Measured on", f"{counted(found.used, 'token')} of {whole(found.given)}"),
                ("Compared", f"{whole(found.compared)} tokens at every context, steps of {whole(found.step)}"),
                ("Longest context", counted(found.longest, "token")),
                ("A context of c", _meaning(found.step)),
            ]
        ),
        table(
            "Measured effective context, in tokens: the first length from which more context gains less than 1 %",
            ("Tokens", "How many", "Effective context", "90 % of draws", "By plain losses"),
            (1, 2, 3, 4),
            rows,
        ),
        _gains(found),
        _losses(found),
    ]
    blocks += (
        [Heading("How to read this"), *(Paragraph(note, quiet=True) for note in found.notes)] if found.notes else []
    )
    return blocks


def _gains(found: ContextMeasure) -> Figure:
    named = [("all tokens" if each.share == 1 else f"hardest {share(each.share)}", each) for each in found.lengths]
    series = [Series(name, [(gain.context, gain.gain * 100) for gain in each.gains]) for name, each in named]
    contexts = [gain.context for gain in found.lengths[0].gains]
    rows = [
        (whole(context), *(share(each.gains[index].gain) for _, each in named))
        for index, context in enumerate(contexts)
    ]
    values = [point[1] for each in series for point in each.points]
    return Figure(
        f"What {whole(found.step)} more {'token' if found.step == 1 else 'tokens'} of context gain",
        line_chart(
            "context-gain",
            f"Relative gain of {found.step} more {'token' if found.step == 1 else 'tokens'} of context",
            f"From {number(max(values, default=0.0))} % at the most to {number(min(values, default=0.0))} %.",
            series,
            exact_scale(min(contexts, default=0), max(contexts, default=1)),
            linear_scale(values, zero=True),
            across_label="context, tokens",
            up_label="gain, %",
            level=(1.0, "1 %"),
        ),
        table("Relative gain by context", ("Context", *(name for name, _ in named)), range(4), rows),
        "Where a curve falls below 1 %, more context hardly helps: that is the effective context.",
    )


def _losses(found: ContextMeasure) -> Figure:
    losses = found.losses
    series = [loss_curve("perplexity", [(each.context, each.loss) for each in losses])]
    rows = [
        (whole(each.context), fixed(each.loss.nll, 4), number(each.loss.error, 2), number(each.loss.perplexity, 4))
        for each in losses
    ]
    return Figure(
        "Perplexity by length of context, over the same tokens",
        line_chart(
            "context-loss",
            "Perplexity by length of context",
            f"From {number(losses[0].loss.perplexity)} with {losses[0].context} tokens to "
            f"{number(losses[-1].loss.perplexity)} with {losses[-1].context}.",
            series,
            exact_scale(min(each.context for each in losses), max(each.context for each in losses)),
            linear_scale(heights(series)),
            across_label="context, tokens",
            up_label="perplexity",
        ),
        table("Loss by context", ("Context", "Loss, nats", "±", "Perplexity"), range(4), rows),
        f"All points are of the same tokens.{spread_note(series[0])} Differences between points are surer than that.",
    )
