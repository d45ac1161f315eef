"""How fast it was measured to be, and what engines it has."""

from __future__ import annotations

from txl_report.blocks import Block, Figure, Gap, Heading, Pairs, Paragraph, Section
from txl_report.charts.bars import Bar, named_bars
from txl_report.facts.engines import EngineFacts, Engines
from txl_report.facts.plain import Missing, quoted
from txl_report.facts.speed import Speed, Work
from txl_report.numbers import NONE, fixed, number, share, size, whole
from txl_report.sections.common import gap, report_command, table, titled


def speed_section(name: str, found: Speed | Missing) -> Section:
    """What a file of `bench --json` says."""
    blocks: list[Block]
    if isinstance(found, Missing):
        bench = f"txl-deploy bench {quoted(name)} --json > bench.json"
        blocks = [Gap("Speed", found.reason, (bench, report_command(name, "--bench bench.json")))]
    else:
        rows = [("Measured by", f"txl-deploy bench, {found.by}")]
        rows += [(titled(row.name), row.text) for row in (*found.machine, *found.conditions)]
        blocks = [Pairs(rows), *(Paragraph(f"Caution: {each}") for each in found.cautions)]
        for index, work in enumerate(found.works):
            blocks.append(_work(index, work))
        if found.facts:
            blocks += [Heading("Measured once"), Pairs([(titled(row.name), row.text) for row in found.facts])]
        if found.left_out:
            blocks += [Heading("Left out"), Pairs([(row.name, row.text) for row in found.left_out])]
    return Section("speed", "Speed", "The bundle and its competitors did the same work in turns.", blocks)


def title_of(work: Work) -> str:
    """What was done, and in segments of how many positions."""
    return f"{titled(work.task)}, L {work.segment_length}: {work.title}"


def _work(index: int, work: Work) -> Figure:
    title = title_of(work)
    bars = [
        Bar(time.name, time.p50, f"{number(time.p50)} ms", 1 if time.name == "bundle" else 2) for time in work.times
    ]
    ours = work.times[0] if work.times else None
    seen = f"{ours.name} takes {number(ours.p50)} ms." if ours else "Nothing was measured."
    rows = [
        (
            time.name,
            number(time.p50),
            number(time.p90),
            number(time.p99),
            whole(round(time.per_second)),
            f"{fixed(time.ratio)} ×",
            NONE if time.of_bandwidth is None else share(time.of_bandwidth),
            time.description,
        )
        for time in work.times
    ]
    names = (
        "Competitor",
        "Median, ms",
        "90 %",
        "99 %",
        f"{work.unit.capitalize()}/s",
        "Times the bundle's",
        "Of memory's speed",
        "What ran",
    )
    return Figure(
        title,
        named_bars(f"speed-{index}", title, seen, bars),
        table(f"{title}; milliseconds of a call", names, range(1, 7), rows),
        "Median time of a call; shorter is faster.",
    )


def engines_section(name: str, found: Engines | Missing) -> Section:
    """The engines of the bundle: kernels, fusion, what is in place, what was checked where."""
    blocks: list[Block]
    if isinstance(found, Missing):
        blocks = [gap("Engines", found, name)]
    else:
        blocks = [table("Engines", ENGINE_COLUMNS, (2, 5, 6), [_engine(each) for each in found.engines])]
        for each in found.engines:
            if each.fused_kernels or each.layers:
                blocks += [Heading(each.file), *_inside(each)]
        blocks += [Paragraph(problem) for problem in found.problems]
    return Section(
        "engines", "Engines", "What a vendor's compiler made of each program, and what was checked of it.", blocks
    )


ENGINE_COLUMNS = (
    "Engine",
    "Program",
    "Size",
    "Built by",
    "Built for",
    "Kernels",
    "Attention in one kernel",
    "States in place",
    "Checked",
)


def _engine(found: EngineFacts) -> tuple[str, ...]:
    return (
        found.file,
        f"{found.program}, {found.update}, {found.precision}",
        size(found.bytes),
        f"{found.built_by}, {number(found.seconds)} s",
        found.built_for,
        whole(found.kernels),
        NONE if found.kernels is None else f"{found.fused_attention} of {found.attention_layers}",
        f"{found.in_place} updated, {found.read_in_place} read, {found.copying} copied",
        "; ".join(found.verified_on) or "not checked on a device",
    )


def _inside(found: EngineFacts) -> list[Block]:
    fused = ", ".join(found.fused_kernels) or NONE
    caption = f"Layers of {found.file}, in the order in which they run"
    return [
        Pairs([("Fused attention", fused)]),
        table(caption, ("Layer", "Kind"), (), found.layers, folded=True),
    ]
