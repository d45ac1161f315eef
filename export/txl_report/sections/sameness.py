"""Is it the same model: gates with their limits, chains, drift, how errors are spread, ranks, a text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from txl_report.blocks import Badge, Block, Figure, Heading, Pairs, Section, State
from txl_report.charts.bars import Bar, histogram, named_bars
from txl_report.charts.figure import STYLES
from txl_report.charts.lines import Series, line_chart
from txl_report.charts.scales import exact_scale, linear_scale, log_scale
from txl_report.facts.evidence import Chain, Curve, Evidence, Gate, Histogram, Ranks, Text
from txl_report.facts.gathering import Facts
from txl_report.facts.plain import Missing
from txl_report.numbers import counted, fixed, number, power_of_ten, share, whole
from txl_report.sections.common import gap, table

MOST_HISTOGRAMS = 8
MOST_CHAINS = 4 * STYLES
"""That are drawn, so many in a chart as can be told apart; a stranger's file may have any number of them."""
STATES: dict[str, State] = {"passed": "passed", "failed": "failed", "not judged": "none"}


def sameness_section(facts: Facts) -> Section:
    """What every verification found."""
    blocks: list[Block] = []
    for name, found in (("export", facts.exported), ("again", facts.repeated)):
        if isinstance(found, Missing):
            title = "Verification at export" if name == "export" else "A later verification"
            blocks.append(gap(title, found, facts.name))
        else:
            blocks += _verification(name, found)
    return Section(
        "same",
        "Is it the same model",
        "The bundle and the reference ran the same chains of segments, with the memory going on from one segment to "
        "the next, and every value was compared.",
        blocks,
    )


def verdict_of(evidence: Evidence | Missing) -> Badge:
    """The answer in three words."""
    if isinstance(evidence, Missing):
        return Badge("none", "Not verified")
    if not evidence.passed:
        return Badge("failed", "Verification failed")
    return Badge("passed", "Verified: the same model")


def verdict_by(evidence: Evidence | Missing) -> str:
    """By what, against what, and how many gates."""
    if isinstance(evidence, Missing):
        return evidence.reason
    counts = {word: sum(gate.verdict == word for gate in evidence.gates) for word in STATES}
    gates = f"{counts['passed']} gates passed, {counts['failed']} failed, {counts['not judged']} not judged"
    return f"{evidence.backend} in {evidence.precision}, against {evidence.reference}: {gates}."


def _verification(name: str, found: Evidence) -> list[Block]:
    blocks: list[Block] = [
        Heading("Verified at export" if name == "export" else f"Verified again: {found.by}"),
        Pairs(
            [
                ("Result", verdict_of(found)),
                ("Ran on", f"{found.backend}, {found.precision}"),
                ("Compared with", found.reference),
                *([("The chains read", found.ran_on)] if found.ran_on else []),
            ]
        ),
        table(
            "Gates: what was judged, what was reached, and the largest value that passes",
            ("Gate", "Verdict", "Reached", "Limit"),
            (2, 3),
            [(g.name, Badge(STATES[g.verdict], g.verdict), _reached(g), number(g.limit)) for g in found.gates],
        ),
    ]
    if found.chains:
        blocks += [_chains(found.chains), *_drift(name, found)]
    for index, each in enumerate(found.histograms[:MOST_HISTOGRAMS]):
        blocks.append(_histogram(f"{name}-errors-{index}", each))
    if found.ranks is not None:
        blocks.append(_ranks(found.ranks))
    if found.divergence is not None:
        spread = found.divergence
        said = [("mean", spread.mean), ("99.9 % of positions are below", spread.late), ("largest", spread.most)]
        rows = [(what, number(value)) for what, value in said]
        blocks.append(table("KL divergence from the reference, nats", ("Over all positions", "KL"), (1,), rows))
    if found.text is not None:
        blocks.append(_text(found.text))
    if found.sensitivity:
        blocks.append(_sensitivity(name, found.sensitivity))
    return blocks


def _reached(gate: Gate) -> str:
    """What a gate was judged on; a failed one without a number was infinite or none."""
    return "∞ or no number" if gate.value is None and gate.verdict == "failed" else number(gate.value)


def _largest(chain: Chain) -> str:
    """The largest error of a chain: of log-probabilities where there are any, else of everything relative."""
    units = {each.unit for each in chain.reached}
    unit = "nats" if "nats" in units else "relative"
    values = [each.largest for each in chain.reached if each.unit == unit]
    if any(value is None for value in values):
        return "∞ or no number"
    return number(max((value for value in values if value is not None), default=None))


def _chains(chains: Sequence[Chain]) -> Block:
    rows = [
        (
            chain.name,
            whole(chain.streams),
            whole(chain.segments),
            whole(chain.positions),
            f"{whole(chain.agreeing)} of {whole(chain.decided)}" if chain.decided else number(None),
            _largest(chain),
        )
        for chain in chains
    ]
    names = ("Chain", "Sequences", "Segments", "Positions", "Same best token", "Largest |Δ|")
    return table("Chains: which segments ran, and how far apart the two sides were", names, (1, 2, 3, 4, 5), rows)


def _drift(name: str, found: Evidence) -> list[Block]:
    """The first chain curve by curve, and every chain beside it."""
    longest = found.chains[0]
    blocks: list[Block] = []
    if longest.curves:
        first = longest.curves[0]
        several = len(longest.curves) > 1
        curves = (
            [(f"{curve.name}, largest", curve.most) for curve in longest.curves]
            if several
            else [("largest of a segment", first.most), ("mean of a segment", first.mean)]
        )
        for some, of in _charts(len(curves)):
            part, title = f"{name}-drift-{some.start}", f"Drift: {longest.name}{of}"
            blocks.append(_curves(part, title, longest, first, curves[some], _limit(found.gates)))
    others = [chain for chain in found.chains if chain.curves]
    if len(others) > 1:
        for some, of in _charts(min(len(others), MOST_CHAINS)):
            blocks.append(_chains_beside(f"{name}-chains-{some.start}", others[some], others, of))
    return blocks


def _charts(curves: int) -> list[tuple[slice, str]]:
    """Which curves stand in each chart, in as few as can tell them apart, and what tells the charts' titles apart."""
    charts = -(-curves // STYLES)
    size = -(-curves // charts)
    said = [f", chart {index + 1} of {charts}" if charts > 1 else "" for index in range(charts)]
    return [(slice(index * size, min((index + 1) * size, curves)), of) for index, of in enumerate(said)]


def _limit(gates: Sequence[Gate]) -> tuple[float, str] | None:
    """The gate on single errors, which a drift curve is drawn below."""
    named = (gate for gate in gates if gate.limit and "log-probs max abs" in gate.name)
    return next(((gate.limit, f"limit {number(gate.limit)}") for gate in named if gate.limit), None)


def _curves(
    name: str,
    title: str,
    chain: Chain,
    first: Curve,
    curves: Sequence[tuple[str, Sequence[float | None]]],
    level: tuple[float, str] | None,
) -> Figure:
    step = first.segments
    values = [value for _, curve in curves for value in curve if value is not None]
    series = [Series(said, [(1 + i * step, _placed(y)) for i, y in enumerate(curve)]) for said, curve in curves]
    count = max((len(curve) for _, curve in curves), default=0)
    level = level if first.name == "log-probabilities" else None
    rows = [(whole(1 + i * step), *(number(_at(curve, i)) for _, curve in curves)) for i in range(count)]
    most = max(values, default=0.0)
    full = "" if not chain.full_from else f" Memory is full from segment {chain.full_from + 1} on."
    thinned = "" if step == 1 else f" A point stands for {step} segments."
    seen = f"Errors of {chain.segments} segments, the largest {number(most)} {first.unit}."
    return Figure(
        title,
        line_chart(
            name,
            title,
            seen,
            series,
            exact_scale(1, max(1 + (count - 1) * step, 2)),
            log_scale([*values, *([level[0]] if level else [])]),
            across_label="segment",
            up_label=f"|Δ|, {first.unit}, logarithmic",
            level=level,
        ),
        table(f"{title}, |Δ| by segment", ("Segment", *(said for said, _ in curves)), range(count and 9), rows),
        f"Does the error grow from segment to segment? A line that stays level says no.{full}{thinned}",
    )


def _chains_beside(name: str, chains: Sequence[Chain], every: Sequence[Chain], of: str) -> Figure:
    """Some chains in one chart, with the axes that all of them have; `of` tells the chart from the others."""
    curves = [chain.curves[0] for chain in chains]
    unit = every[0].curves[0].unit
    series = [
        Series(chain.name, [(1 + i * curve.segments, _placed(y)) for i, y in enumerate(curve.most)])
        for chain, curve in zip(chains, curves, strict=True)
    ]
    last = max(1 + (len(chain.curves[0].most) - 1) * chain.curves[0].segments for chain in every)
    largest = max((value for curve in curves for value in curve.most if value is not None), default=0.0)
    points = range(max(len(curve.most) for curve in curves))
    rows = [(whole(i + 1), *(number(_at(curve.most, i), 2) for curve in curves)) for i in points]
    names = [chain.name for chain in chains]
    title = f"Chains side by side{of}"
    return Figure(
        title,
        line_chart(
            name,
            f"Largest error by segment. {title}",
            f"{len(chains)} of {len(every)} chains: {'; '.join(names)}. The largest error {number(largest)} {unit}.",
            series,
            exact_scale(1, max(last, 2)),
            log_scale(value for chain in every for value in chain.curves[0].most if value is not None),
            across_label="segment",
            up_label=f"largest |Δ|, {unit}, logarithmic",
        ),
        table(f"Largest |Δ| by point of each curve{of}", ("Point", *names), range(9), rows),
    )


def _at(curve: Sequence[float | None], index: int) -> float | None:
    return curve[index] if index < len(curve) else None


def _placed(value: float | None) -> float:
    return math.nan if value is None else value


def _histogram(name: str, found: Histogram) -> Figure:
    total = sum(found.counts)
    bars = [Bar(_bin(label), count, whole(count)) for label, count in zip(found.labels, found.counts, strict=False)]
    filled = [label for label, count in zip(found.labels, found.counts, strict=False) if count]
    seen = f"{whole(total)} values, from {_powers(filled[0])} to {_powers(filled[-1])}." if filled else "No value."
    rows = [
        (_powers(label), whole(count), share(count / total if total else 0.0))
        for label, count in zip(found.labels, found.counts, strict=False)
    ]
    return Figure(
        f"How errors are spread: {found.name}",
        histogram(
            name,
            f"Histogram of errors of {found.name}",
            seen,
            bars,
            linear_scale([bar.value for bar in bars], zero=True),
            across_label=f"size of the error, {found.unit}",
            up_label="how many",
            labels=6,
        ),
        table(f"Errors of {found.name} by decades", ("Size", "How many", "Share"), (1, 2), rows),
        "Each bar between the first and the last is a decade; further left is closer.",
    )


def _bin(label: str) -> str:
    """The lower end of a decade, for which there is room below a bar."""
    return _powers(label).partition(" … ")[0]


def _powers(label: str) -> str:
    """1e-9 as 10⁻⁹."""
    return re.sub(r"1e([+-]?\d{1,3})", lambda found: power_of_ten(int(found[1])), label)


def _ranks(ranks: Ranks) -> Block:
    rows = [(f"the first {most}" if most > 1 else "the first", share(part)) for most, part in ranks.within]
    rows.append((f"the {ranks.best} best of both sides have in common, on average", share(ranks.overlap)))
    caption = f"The reference's best token is among the bundle's best, {whole(ranks.positions)} positions"
    return table(caption, ("Among", "Share of positions"), (1,), rows)


def _text(text: Text) -> Pairs:
    def perplexity(nll: float | None) -> str:
        return number(None if nll is None else math.exp(min(nll, 700.0)), 5)

    return Pairs(
        [
            ("Text", f"{counted(text.tokens, 'token')} from its start; other perplexities on this page are of others"),
            ("Loss of the bundle", f"{fixed(text.bundle_nll, 7)} nats, perplexity {perplexity(text.bundle_nll)}"),
            ("Loss of the reference", f"{fixed(text.reference_nll, 7)} nats"),
            ("Perplexity differs by", share(text.relative)),
        ]
    )


def _sensitivity(name: str, found: Sequence[tuple[str, float | None]]) -> Figure:
    bars = [Bar(layer, kl if kl is not None else 0.0, number(kl)) for layer, kl in found]
    seen = f"{found[0][0]} suffers most: {number(found[0][1])} nats."
    return Figure(
        "What quantising each layer alone costs",
        named_bars(f"{name}-sensitivity", "KL divergence that each layer causes alone", seen, bars),
        table("KL divergence by layer", ("Layer", "KL mean, nats"), (1,), [(n, number(kl)) for n, kl in found]),
    )
