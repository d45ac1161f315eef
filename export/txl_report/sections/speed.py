"""Show the measured speed, and the bundle's engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from txl_runtime.bundle.engines.sidecar import Sidecar

from txl_report.blocks import Block, Figure, Gap, Heading, Pairs, Paragraph, Section
from txl_report.charts.bars import Bar, named_bars
from txl_report.facts.engines import Engine, Engines, built_for
from txl_report.facts.plain import Missing, quoted, some
from txl_report.numbers import NONE, fixed, number, share, size, whole
from txl_report.schema.measurement import Conditions, Machine, Measurement, Row
from txl_report.sections.common import gap, report_command, table, titled

TITLES = {
    "decode": "all log-probabilities after every token",
    "prefill": "the next token after a segment",
    "score": "the nats of every token of a segment",
    "step": "all outputs of a segment",
}
"""The result that each task computes, in words."""


def speed_section(name: str, found: Measurement | Missing, file: str = "") -> Section:
    """Show a measurement that `bench --json` wrote."""
    blocks: list[Block]
    if isinstance(found, Missing):
        bench = f"txl-deploy bench {quoted(name)} --json > bench.json"
        blocks = [Gap("Speed", found.reason, (bench, report_command(name, "--bench bench.json")))]
    else:
        measured = ("Measured by", f"txl-deploy bench, {file}")
        blocks = [Pairs([measured, *_machine(found.machine), *_conditions(found.conditions)])]
        blocks += [Paragraph(f"Caution: {each}") for each in _cautions(found)]
        blocks += [_work(index, rows) for index, rows in enumerate(some(found.works))]
        if once := list(_once(found)):
            blocks += [Heading("Measured once"), Pairs([(titled(what), value) for what, value in once])]
        if found.left_out:
            blocks += [Heading("Left out"), Pairs(list(found.left_out.items()))]
    return Section("speed", "Speed", "The bundle and its competitors did the same work in turns.", blocks)


def title_of(row: Row) -> str:
    """Return a title of a row's task and segment length."""
    return f"{titled(row.task)}, L {row.segment_length}: {TITLES.get(row.task, '')}"


def rate(row: Row) -> str:
    """Write tokens or positions per second."""
    return NONE if row.per_second is None else whole(round(row.per_second))


def _machine(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "Processor", f"{machine.cpu}, {machine.cores} cores"
    yield "System", machine.system
    yield "Versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    speed = "" if machine.read_gb_per_second is None else f"{machine.read_gb_per_second:.3g} GB/s "
    yield "Memory reads", f"{speed}({machine.read_method})" if speed else machine.read_method


def _conditions(conditions: Conditions) -> Iterator[tuple[str, str]]:
    yield "Threads", str(conditions.threads)
    yield "Sequences", str(conditions.batch_size)
    if conditions.memory_length is not None and conditions.memory_rows:
        yield "Memory", f"full: {min(conditions.memory_rows)} of {conditions.memory_length} rows"
    turns = f"{conditions.rounds} rounds of {conditions.slice_seconds:.2g} s each, in turns"
    yield "Timing", f"{turns}, {conditions.warm_up_calls} calls to warm up"
    if read := conditions.tokens or conditions.inputs:
        yield "Inputs", read


def _cautions(measurement: Measurement) -> Iterator[str]:
    if measurement.busy is not None:
        used = f"Other processes used up to {measurement.busy:.0%} of the machine during a slice"
        yield f"{used}; measure again when it is idle."
    if measurement.restless:
        yield f"Thread pools of others were still spinning when {', '.join(measurement.restless)} began a slice."


def _once(measurement: Measurement) -> Iterator[tuple[str, str]]:
    """Yield the figures that were measured only once, and the agreement of competitors with the bundle."""
    if (python := measurement.overhead) is not None:
        yield (
            f"{python.what} per step",
            f"{python.in_step:.1f} µs of {python.step:.0f}, {python.without_engine:.1f} with an engine that does "
            "nothing",
        )
    for floor in (each for each in measurement.device_floors if each.us is not None):
        yield "floor of a step, computed", f"{floor.us:.3g} µs for {floor.bytes / 1e6:.1f} MB ({floor.by})"
    if (load := measurement.load) is not None:
        yield (
            "from loading to the first result",
            f"{load.total:.2f} s, files cached ({load.without_hashes:.2f} without hashes, {load.process:.2f} from "
            "starting Python)",
        )
    if (memory := measurement.memory) is not None and memory.peak is not None and memory.settled is not None:
        yield (
            "peak memory",
            f"{memory.peak / 1e6:.1f} MB, {memory.settled / 1e6:.1f} MB after loading; weights "
            f"{memory.weights / 1e6:.1f} MB, state {memory.state / 1e6:.1f} MB",
        )
    for name, agreed in measurement.agreement.items():
        reached = ", ".join(f"{what} {value:.3g}" for what, value in agreed.reached.items())
        yield f"{name} agrees", f"{reached}, {agreed.segments} segments ({agreed.measure} limit {agreed.limit:g})"


def _work(index: int, rows: Sequence[Row]) -> Figure:
    """Show one kind of work, the bundle first. Ratios are computed here; the file's own are ignored."""
    ours, title = rows[0], title_of(rows[0])
    bars = [Bar(row.competitor, row.ms.p50, f"{number(row.ms.p50)} ms", 1 if row is ours else 2) for row in some(rows)]
    seen = f"{ours.competitor} takes {number(ours.ms.p50)} ms."
    cells = [
        (
            row.competitor,
            number(row.ms.p50),
            number(row.ms.p90),
            number(row.ms.p99),
            rate(row),
            f"{fixed(row.ms.p50 / ours.ms.p50)} ×",
            NONE if row.of_bandwidth is None else share(row.of_bandwidth),
            row.description,
        )
        for row in some(rows)
    ]
    names = (
        "Competitor",
        "Median, ms",
        "90 %",
        "99 %",
        f"{ours.unit.capitalize()}/s",
        "Times the bundle's",
        "Of memory's speed",
        "What ran",
    )
    return Figure(
        title,
        named_bars(f"speed-{index}", title, seen, bars),
        table(f"{title}; milliseconds of a call", names, range(1, 7), cells),
        "Median time of a call; shorter is faster.",
    )


def engines_section(name: str, found: Engines | Missing) -> Section:
    """Show the bundle's engines: kernels, fusion, states updated in place, and the checks on each device."""
    blocks: list[Block]
    if isinstance(found, Missing):
        blocks = [gap("Engines", found, name)]
    else:
        blocks = [table("Engines", ENGINE_COLUMNS, (2, 5, 6), [_engine(each) for each in found.engines])]
        for file, engine in found.engines:
            if engine.fused_kernels or engine.layers:
                blocks += [Heading(file), *_inside(file, engine)]
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


def _engine(facts: Engine) -> tuple[str, ...]:
    file, engine = facts
    identity = engine.identity
    return (
        file,
        f"{identity.program}, {identity.update}, {identity.precision}",
        size(engine.bytes),
        f"{identity.flavour} {identity.version}, {number(engine.seconds)} s",
        built_for(identity.compute_capabilities, identity.device, identity.platform),
        whole(engine.kernels),
        NONE if engine.kernels is None else f"{engine.fused_attention} of {engine.attention_layers}",
        f"{engine.in_place} updated, {engine.read_in_place} read, {engine.copying} copied",
        "; ".join(some(engine.verified_on)) or "not checked on a device",
    )


def _inside(file: str, engine: Sidecar) -> list[Block]:
    fused = ", ".join(some(engine.fused_kernels)) or NONE
    caption = f"Layers of {file}, in the order in which they run"
    return [
        Pairs([("Fused attention", fused)]),
        table(caption, ("Layer", "Kind"), (), some(engine.layers), folded=True),
    ]
