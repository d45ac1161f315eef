"""A measurement, shown: as plain data, as tables, in one line, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from txl_deploy.bench.floor import GOAL, DeviceFloor
from txl_deploy.bench.measuring import BUNDLE, Conditions, Machine, Report, Row
from txl_deploy.bench.steps import StepConditions, StepReport, StepRow
from txl_deploy.console import facts_table, number, quantity, rows_table, stdout


def report_document(report: Report | StepReport) -> dict[str, Any]:
    """The report as plain data, with its verdict."""
    document: dict[str, Any] = msgspec.to_builtins(report)
    return document | {"verdict": verdict(report)}


def verdict(report: Report | StepReport) -> str:
    """The result in one line."""
    parts = []
    if isinstance(report, StepReport):
        for found in (row for row in report.rows if row.competitor == BUNDLE):
            beside = (other for other in report.rows if other.segment_length == found.segment_length)
            ratios = [f"{other.ratio:.2g}× {other.competitor}" for other in beside if other.competitor != BUNDLE]
            said = f"L {found.segment_length} {found.ms.p50:.3g} ms, {found.positions_per_second:,.0f} positions/s"
            parts.append(said + (f" ({', '.join(ratios)})" if ratios else ""))
        return "; ".join(parts)
    for row in (row for row in report.rows if row.competitor == BUNDLE):
        compared = (other for other in report.rows if other.task == row.task and other.competitor != BUNDLE)
        others = [f"{other.ratio:.2g}× {other.competitor}" for other in compared]
        said = f"{row.task} {row.ms.p50:.3g} ms, {row.tokens_per_second:,.0f} tokens/s"
        if row.task == "decode" and row.of_bandwidth is not None:
            others.insert(0, f"{row.of_bandwidth:.0%} of what memory delivers")
        parts.append(said + (f" ({', '.join(others)})" if others else ""))
    return "; ".join(parts)


def show(report: Report | StepReport) -> None:
    """Tables on stdout."""
    conditions, steps = report.conditions, isinstance(report, StepReport)
    kind = report.family if isinstance(report, StepReport) else f"{report.memory_form} memory"
    held = (
        f"memory full: {min(conditions.memory_rows)} of {conditions.memory_length} rows"
        if isinstance(conditions, Conditions)
        else f"state full: {_held(conditions)}"
    )
    stdout.print(
        facts_table(_place(f"{report.model_id[:12]}, {report.precision}, {kind}", report.machine, held, conditions))
    )
    for task, length in dict.fromkeys((row.task, row.segment_length) for row in report.rows):
        stdout.print()
        cells = [_cells(row) for row in report.rows if (row.task, row.segment_length) == (task, length)]
        stdout.print(rows_table(_STEP_COLUMNS if steps else _COLUMNS, cells, _TITLES[task].format(length)))
    stdout.print()
    stdout.print(facts_table(_other_facts(report)))
    stdout.print()
    stdout.print(verdict(report), soft_wrap=True)


def _place(model: str, machine: Machine, held: str, conditions: Conditions | StepConditions) -> dict[str, object]:
    """What was measured, and where and how."""
    return {
        "model": model,
        "machine": f"{machine.cpu}, {machine.cores} cores, "
        + ", ".join(f"{name} {found}" for name, found in machine.versions.items()),
        "conditions": f"{conditions.threads} threads, B {conditions.batch_size}, {held}; "
        f"{conditions.rounds} rounds of {conditions.slice_seconds:.2g} s each, in turns, "
        f"{conditions.warm_up_calls} calls to warm up, thread pools at rest",
        "memory reads": machine.read_method
        if machine.read_gb_per_second is None
        else f"{number(machine.read_gb_per_second)} GB/s ({machine.read_method})",
    }


def _held(conditions: StepConditions) -> str:
    """The shapes of the state; of many tensors how many there are."""
    shapes = [f"{name} {' × '.join(map(str, shape))}" for name, shape in conditions.state.items()]
    return ", ".join(shapes) if len(shapes) <= 4 else f"{len(shapes)} tensors"


_COLUMNS = ("ms", "p50", "p90", "p99", "tokens/s", "ratio", "B/token", "GB/s", "of reads")
_STEP_COLUMNS = (*_COLUMNS[:4], "positions/s", "ratio", "B/step", *_COLUMNS[7:])
_TITLES = {
    "step": "steps: all outputs of segments of {}",
    "decode": "decode: all log-probabilities after every token",
    "prefill": "prefill: the next token after segments of {}",
    "score": "score: the nats of every token, in segments of {}",
}


def _cells(row: Row | StepRow) -> tuple[str, ...]:
    rate, size = (
        (row.tokens_per_second, row.bytes_per_token)
        if isinstance(row, Row)
        else (row.positions_per_second, row.bytes_per_step)
    )
    return (
        row.competitor,
        *(_short(value) for value in (row.ms.p50, row.ms.p90, row.ms.p99, rate)),
        f"{row.ratio:.2f}×",
        quantity(round(size)),
        number(row.gb_per_second),
        "–" if row.of_bandwidth is None else f"{row.of_bandwidth:.0%}",
    )


def _short(value: float) -> str:
    return number(value) if value < 999.5 else f"{value:,.0f}"


def _other_facts(report: Report | StepReport) -> dict[str, object]:
    """What is measured once (Python, loading, memory), and what tells a reader how far to trust the rest."""
    if isinstance(report, StepReport):
        shortest = min(row.segment_length for row in report.rows)
        facts = _once(report, f"step of L {shortest}", "result", "long and short segments")
        for name, other in report.agreement.items():
            facts[f"{name} agrees"] = (
                ", ".join(f"{output} {number(value)}" for output, value in other.found.items())
                + f", {other.segments} segments ({other.measure} limit {other.limit:g}), after {other.seconds:.1f} s"
            )
        return facts | _trust(report.rows)
    facts = _once(report, "decode step", "token", "decode and prefill")
    for name, agreed in report.agreement.items():
        facts[f"{name} agrees"] = (
            f"log-probs max abs {number(agreed.max_abs)}, KL {number(agreed.kl)}, "
            f"{agreed.segments} segments ({agreed.measure} limit {agreed.limit:g})"
        )
    return facts | _trust(report.rows)


def _once(report: Report | StepReport, step: str, first: str, ran: str) -> dict[str, object]:
    facts: dict[str, object] = {}
    if (python := report.overhead) is not None:
        facts[f"{python.what} per {step}"] = (
            f"{python.in_step:.1f} µs of {python.step:.0f} ({python.share:.1%}); "
            f"{python.without_engine:.1f} with an engine that does nothing"
        )
    for name, floor in zip(("measured", "stated"), report.device_floors, strict=False):  # neither on the CPU
        facts[f"floor by {name} speed, computed"] = _floor(floor)
    if (load := report.load) is not None:
        facts[f"load → first {first}"] = (
            f"{load.total:.2f} s, files cached ({load.without_hashes:.2f} without hashes, "
            f"{load.process:.2f} from starting Python)"
        )
    if (memory := report.memory) is not None:
        facts["peak memory"] = (
            "not measured: this system has no /proc/self/smaps"
            if memory.peak is None or memory.settled is None
            else f"{quantity(memory.peak)}, {quantity(memory.settled)} after loading, {ran} "
            f"(private, and shared pages once); weights {quantity(memory.weights)}, state {quantity(memory.state)}, "
            f"{quantity(memory.before or 0)} before loading"
        )
    return facts


def _floor(floor: DeviceFloor) -> str:
    if floor.us is None:
        return floor.by
    each = f"{floor.us_per_kernel:.3g} for each of {floor.kernels} kernels" if floor.kernels else "kernels not listed"
    speed = f"{quantity(floor.bytes)} at {number(floor.gb_per_second)} GB/s ({floor.by})"
    return f"{number(floor.us)} µs a step, {speed}; {number(floor.goal_us)} at {GOAL:.0%} of it, {each}"


def _trust(rows: Sequence[Row | StepRow]) -> dict[str, object]:
    facts: dict[str, object] = {}
    busy = max((row.foreign for row in rows if row.foreign is not None), default=None)
    if busy is not None and busy > 0.05:
        facts["not idle"] = f"others used up to {busy:.0%} of the machine during a slice: measure again when it is idle"
    if any(row.restless for row in rows):
        names = sorted({row.competitor for row in rows if row.restless})
        facts["not at rest"] = f"thread pools of others were still spinning when {', '.join(names)} began a slice"
    return facts


def panels(report: Report | StepReport) -> list[Callable[[Any], None]]:
    """One panel per kind of work: milliseconds per competitor, and the shortest time that reading memory allows."""
    read, held = report.machine.read_gb_per_second, "state" if isinstance(report, StepReport) else "memory"

    def panel(task: str, length: int) -> Callable[[Any], None]:
        rows = [row for row in report.rows if (row.task, row.segment_length) == (task, length)][::-1]
        floors = {"step": report.floor} if isinstance(report, StepReport) else {"decode": report.floor["decode"]}

        def paint(axes: Any) -> None:
            colors = ["tab:blue" if row.competitor == BUNDLE else "tab:gray" for row in rows]
            late = [[0.0] * len(rows), [row.ms.p90 - row.ms.p50 for row in rows]]
            axes.barh([row.competitor for row in rows], [row.ms.p50 for row in rows], color=colors, xerr=late)
            end = 1.3 * max(row.ms.p50 for row in rows)  # a whisker may leave the picture, a bar may not
            for row in rows:
                text = f" {row.ms.p50:.3g} ms" + ("" if row.competitor == BUNDLE else f", {row.ratio:.2g}×")
                axes.text(min(row.ms.p90, end), row.competitor, text, va="center")
            axes.set_xlim(0, 1.2 * end)
            if task in floors and read:
                floor = floors[task].total / read / 1e6
                axes.axvline(floor, color="tab:red", linestyle="--", label=f"reading its bytes once: {floor:.3g} ms")
                axes.legend(loc="lower right")
            axes.set_title(f"{task}, L {length}, {held} full, {report.conditions.threads} threads", loc="left")
            axes.set_xlabel("ms per call, median; whisker to p90")

        return paint

    tasks = dict.fromkeys((row.task, row.segment_length) for row in report.rows)
    return [panel(task, length) for task, length in tasks]
