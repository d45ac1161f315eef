"""Show whether the error grows: drift curves of a verification's chains, each with a line style of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from txl_report.blocks import Block, Figure
from txl_report.charts.figure import STYLES
from txl_report.charts.lines import Series, line_chart
from txl_report.charts.scales import exact_scale, log_scale
from txl_report.facts.plain import some
from txl_report.numbers import number, whole
from txl_report.schema.verification import LOGPROBS, MEMORY, Chain, Gate, Tensor, Unit, Verification, as_size
from txl_report.sections.common import table

POINTS = 240
"""Maximum number of points of a curve; if a chain has more segments, a point stands for several."""
CURVES = 8
"""Maximum number of outputs of one chain whose curves are shown."""
MOST_CHAINS = 4 * STYLES
"""Maximum number of chains that are drawn: four charts with one chain per line style. A file may list more."""


@dataclass(frozen=True)
class Curve:
    """The errors of one chain, segment by segment.

    Attributes:
        name: the name of the output or state.
        unit: unit of the errors.
        mean, most: mean and largest error for each point; None if infinite or NaN.
        segments: number of segments for which a point stands; the last point may stand for fewer.
    """

    name: str
    unit: Unit
    mean: Sequence[float | None]
    most: Sequence[float | None]
    segments: int


def curves_of(chain: Chain) -> list[Curve]:
    """Return the curve of a Transformer-XL's log-probabilities; else the curves of all outputs and the worst state."""
    if set(chain.outputs) == {LOGPROBS} and set(chain.states) == {MEMORY}:
        return [_curve(LOGPROBS, chain.outputs[LOGPROBS])]
    outputs = [(f"output {name}", tensor) for name, tensor in chain.outputs.items() if not tensor.exact]
    states = [(f"state {name}", tensor) for name, tensor in chain.states.items() if not tensor.exact]
    furthest = sorted(states, key=lambda state: -as_size(state[1].largest))[:1]
    return [_curve(name, tensor) for name, tensor in (*outputs[:CURVES], *furthest)]


def _curve(name: str, tensor: Tensor) -> Curve:
    """Make a curve of at most `POINTS` points, each with the mean and the largest error of its segments."""
    at_once = max(1, -(-max(len(tensor.mean), len(tensor.most)) // POINTS))

    def points(values: Sequence[float | None], largest: bool) -> Iterator[float | None]:
        for first in range(0, len(values), at_once):
            part = [value for value in values[first : first + at_once] if value is not None]
            whole = len(part) == len(values[first : first + at_once])
            yield (max(part) if largest else sum(part) / len(part)) if whole else None

    return Curve(name, tensor.unit, tuple(points(tensor.mean, False)), tuple(points(tensor.most, True)), at_once)


def drift(name: str, found: Verification) -> list[Block]:
    """Draw the curves of the first chain, and then all chains side by side."""
    chains = some(found.chains)
    drawn = [curves_of(chain) for chain in chains]
    blocks: list[Block] = []
    if drawn[0]:
        longest, first = chains[0], drawn[0][0]
        curves = [(f"{curve.name}, largest", curve.most) for curve in drawn[0]]
        if len(curves) == 1:
            curves = [("largest of a segment", first.most), ("mean of a segment", first.mean)]
        for part, of in _charts(len(curves)):
            title = f"Drift: {longest.name}{of}"
            level = _limit(found.gates) if first.unit == "nats" else None
            blocks.append(_curves(f"{name}-drift-{part.start}", title, longest, first, curves[part], level))
    beside = [(chain.name, curves[0]) for chain, curves in zip(chains, drawn, strict=True) if curves]
    if len(beside) > 1:
        for part, of in _charts(min(len(beside), MOST_CHAINS)):
            blocks.append(_chains_beside(f"{name}-chains-{part.start}", beside[part], beside, of))
    return blocks


def _charts(curves: int) -> list[tuple[slice, str]]:
    """Divide curves among as few charts as possible, with unique styles in each: (slice, suffix of the title)."""
    charts = -(-curves // STYLES)
    size = -(-curves // charts)
    endings = [f", chart {index + 1} of {charts}" if charts > 1 else "" for index in range(charts)]
    return [(slice(index * size, min((index + 1) * size, curves)), of) for index, of in enumerate(endings)]


def _limit(gates: Sequence[Gate]) -> tuple[float, str] | None:
    """Return the limit on single errors that a drift curve must stay below, and its name; None without such a gate."""
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
    series = [Series(label, [(1 + i * step, _placed(y)) for i, y in enumerate(curve)]) for label, curve in curves]
    count = max((len(curve) for _, curve in curves), default=0)
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
        table(f"{title}, |Δ| by segment", ("Segment", *(label for label, _ in curves)), range(count and 9), rows),
        f"Does the error grow from segment to segment? A line that stays level says no.{full}{thinned}",
    )


def _chains_beside(
    name: str, chains: Sequence[tuple[str, Curve]], every: Sequence[tuple[str, Curve]], of: str
) -> Figure:
    """Draw some of the chains in one chart, with axes that fit all chains; `of` is the suffix of the chart's title."""
    unit = every[0][1].unit
    series = [
        Series(called, [(1 + i * curve.segments, _placed(y)) for i, y in enumerate(curve.most)])
        for called, curve in chains
    ]
    last = max(1 + (len(curve.most) - 1) * curve.segments for _, curve in every)
    largest = max((value for _, curve in chains for value in curve.most if value is not None), default=0.0)
    points = range(max(len(curve.most) for _, curve in chains))
    rows = [(whole(i + 1), *(number(_at(curve.most, i), 2) for _, curve in chains)) for i in points]
    names = [called for called, _ in chains]
    title = f"Chains side by side{of}"
    return Figure(
        title,
        line_chart(
            name,
            f"Largest error by segment. {title}",
            f"{len(chains)} of {len(every)} chains: {'; '.join(names)}. The largest error {number(largest)} {unit}.",
            series,
            exact_scale(1, max(last, 2)),
            log_scale(value for _, curve in every for value in curve.most if value is not None),
            across_label="segment",
            up_label=f"largest |Δ|, {unit}, logarithmic",
        ),
        table(f"Largest |Δ| by point of each curve{of}", ("Point", *names), range(9), rows),
    )


def _at(curve: Sequence[float | None], index: int) -> float | None:
    return curve[index] if index < len(curve) else None


def _placed(value: float | None) -> float:
    return math.nan if value is None else value
