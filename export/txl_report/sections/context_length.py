"""Show the length of context that the architecture allows, and the length that the model uses by measurement."""

from __future__ import annotations

from txl_report.blocks import Block, Figure, Gap, Pairs, Paragraph, Section
from txl_report.charts.lines import Series, line_chart
from txl_report.charts.scales import exact_scale, linear_scale
from txl_report.facts.model import Context
from txl_report.facts.plain import Missing
from txl_report.measuring.results import ContextMeasure
from txl_report.numbers import counted, number, share, whole
from txl_report.sections.common import NO_TOKENS, gap, report_command, table

RULE = (
    "By the rule of Dai et al. 2019 a token counts with the smaller of its two losses, so losses that merely differ "
    "count as a gain and the length leans upwards. The paper compares a group of models; the numbers of this one model "
    "can be compared with the paper's in kind only."
)
"""Note on the rule by which the effective context is measured."""


def context_section(
    name: str, allowed: Context | Missing, found: ContextMeasure | Missing | None, option: str | None
) -> Section:
    """Show the theoretical context and the measured context."""
    blocks: list[Block] = []
    if isinstance(allowed, Context):
        text = f"{counted(allowed.tokens, 'token')}: {allowed.formula}"
        blocks.append(Pairs([("Architecture allows", text)]))
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


def length_of(found: ContextMeasure, length: int) -> str:
    """Write an effective context in tokens; as "at least" if it is the longest context that was compared."""
    return f"{'at least ' if length == found.longest else ''}{whole(length)}"


def _measured(measured: ContextMeasure) -> list[Block]:
    step = measured.step
    contexts = [index * step for index in range(len(measured.gains))]
    values = [gain * 100 for gain in measured.gains]
    rows = [(whole(context), share(gain)) for context, gain in zip(contexts, measured.gains, strict=True)]
    more, last = f"{counted(step, 'token')} more of context", f" … c + {whole(step)}" if step > 1 else ""
    return [
        Pairs(
            [
                ("Effective context", f"{length_of(measured, measured.length)} tokens"),
                ("Measured on", f"{counted(measured.used, 'token')} of {whole(measured.given)}"),
                ("Compared", f"the hardest tenth of {counted(measured.compared, 'token')} at every context"),
                ("A context of c", f"means c + 1{last} tokens, each equally often"),
            ]
        ),
        Figure(
            f"Gain of {more}",
            line_chart(
                "context-gain",
                f"Relative gain of {more}",
                f"From {number(max(values))} % at the most to {number(min(values))} %.",
                [Series("gain", list(zip(contexts, values, strict=True)))],
                exact_scale(0, contexts[-1]),
                linear_scale(values, zero=True),
                across_label="context, tokens",
                up_label="gain, %",
                level=(1.0, "1 %"),
            ),
            table("Relative gain by context", ("Context", "Gain"), range(2), rows),
            "Where the curve falls below 1 %, more context hardly helps: that is the effective context.",
        ),
        Paragraph(RULE, quiet=True),
    ]
