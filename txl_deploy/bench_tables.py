"""Show a measurement as plain data, as tables, as one line, or as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from txl_report.numbers import prefixed
from txl_report.schema.measurement import BUNDLE, Conditions, DeviceFloor, Machine, Measurement, Row

from txl_deploy.bench.floor import GOAL
from txl_deploy.console import facts_table, number, rows_table, stdout


def document_of(found: Measurement) -> dict[str, Any]:
    """Return the measurement as plain data, with a one-line verdict."""
    document: dict[str, Any] = msgspec.to_builtins(found)
    return document | {"verdict": verdict(found)}


def verdict(found: Measurement) -> str:
    """Summarise the result in one line."""
    parts = []
    for ours, *others in found.works:
        beside = [f"{other.ratio:.2g}× {other.competitor}" for other in others]
        if ours.task == "decode" and ours.of_bandwidth is not None:
            beside.insert(0, f"{ours.of_bandwidth:.0%} of what memory delivers")
        what = f"L {ours.segment_length}" if ours.task == "step" else ours.task
        sentence = f"{what} {ours.ms.p50:.3g} ms, {ours.per_second:,.0f} {ours.unit}/s"
        parts.append(sentence + (f" ({', '.join(beside)})" if beside else ""))
    return "; ".join(parts)


def show(found: Measurement) -> None:
    """Print the measurement's tables on stdout."""
    conditions = found.conditions
    kind = found.family if found.memory_form is None else f"{found.memory_form} memory"
    held = (
        f"state full: {_held(conditions)}"
        if conditions.memory_length is None
        else f"memory full: {min(conditions.memory_rows)} of {conditions.memory_length} rows"
    )
    stdout.print(
        facts_table(_place(f"{found.model_id[:12]}, {found.precision}, {kind}", found.machine, held, conditions))
    )
    for rows in found.works:
        stdout.print()
        columns = _STEP_COLUMNS if rows[0].task == "step" else _COLUMNS
        title = _TITLES[rows[0].task].format(rows[0].segment_length)
        stdout.print(rows_table(columns, [_cells(row) for row in rows], title))
    stdout.print()
    stdout.print(facts_table(_other_facts(found)))
    stdout.print()
    stdout.print(verdict(found), soft_wrap=True)


def _place(model: str, machine: Machine, held: str, conditions: Conditions) -> dict[str, object]:
    """Return rows that describe the model, the machine and the conditions of the measurement."""
    return {
        "model": model,
        "machine": f"{machine.cpu}, {machine.cores} cores, "
        + ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "conditions": f"{conditions.threads} threads, B {conditions.batch_size}, {held}; "
        f"{conditions.rounds} rounds of {conditions.slice_seconds:.2g} s each, in turns, "
        f"{conditions.warm_up_calls} calls to warm up, thread pools at rest",
        "memory reads": machine.read_method
        if machine.read_gb_per_second is None
        else f"{number(machine.read_gb_per_second)} GB/s ({machine.read_method})",
    }


def _held(conditions: Conditions) -> str:
    """Return the shapes of the state's tensors as text, or only their number if there are more than 4."""
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


def _cells(row: Row) -> tuple[str, ...]:
    size = row.bytes_per_step if row.bytes_per_token is None else row.bytes_per_token
    return (
        row.competitor,
        *(_short(value) for value in (row.ms.p50, row.ms.p90, row.ms.p99, row.per_second)),
        f"{row.ratio:.2f}×",
        prefixed(round(size or 0)),
        number(row.gb_per_second),
        "–" if row.of_bandwidth is None else f"{row.of_bandwidth:.0%}",
    )


def _short(value: float | None) -> str:
    return number(value) if value is None or value < 999.5 else f"{value:,.0f}"


def _other_facts(measurement: Measurement) -> dict[str, object]:
    """Return the figures that are measured only once (Python, loading, memory), agreement, and cautions."""
    if measurement.memory_form is None:
        shortest = min(row.segment_length for row in measurement.rows)
        facts = _once(measurement, f"step of L {shortest}", "result", "long and short segments")
    else:
        facts = _once(measurement, "decode step", "token", "decode and prefill")
    for name, agreed in measurement.agreement.items():
        reached = ", ".join(f"{what} {number(value)}" for what, value in agreed.reached.items())
        after = "" if agreed.seconds is None else f", after {agreed.seconds:.1f} s"
        facts[f"{name} agrees"] = (
            f"{reached}, {agreed.segments} segments ({agreed.measure} limit {agreed.limit:g}){after}"
        )
    if measurement.busy is not None:
        share = f"others used up to {measurement.busy:.0%} of the machine during a slice"
        facts["not idle"] = f"{share}: measure again when it is idle"
    if measurement.restless:
        names = ", ".join(measurement.restless)
        facts["not at rest"] = f"thread pools of others were still spinning when {names} began a slice"
    return facts


def _once(measurement: Measurement, step: str, first: str, ran: str) -> dict[str, object]:
    facts: dict[str, object] = {}
    if (python := measurement.overhead) is not None:
        facts[f"{python.what} per {step}"] = (
            f"{python.in_step:.1f} µs of {python.step:.0f} ({python.share:.1%}); "
            f"{python.without_engine:.1f} with an engine that does nothing"
        )
        if python.put is not None:
            facts[f"launches per {step}"] = f"{python.put:.1f} µs to put it in, {python.put / python.step:.1%} of it"
    # on the CPU, there are no device_floors
    for name, floor in zip(("measured", "stated"), measurement.device_floors, strict=False):
        facts[f"floor by {name} speed, computed"] = _floor(floor)
    if (load := measurement.load) is not None:
        facts[f"load → first {first}"] = (
            f"{load.total:.2f} s, files cached ({load.without_hashes:.2f} without hashes, "
            f"{load.process:.2f} from starting Python)"
        )
    if (memory := measurement.memory) is not None:
        facts["peak memory"] = (
            "not measured: this system has no /proc/self/smaps"
            if memory.peak is None or memory.settled is None
            else f"{prefixed(memory.peak)}, {prefixed(memory.settled)} after loading, {ran} "
            f"(private, and shared pages once); weights {prefixed(memory.weights)}, state {prefixed(memory.state)}, "
            f"{prefixed(memory.before or 0)} before loading"
        )
    return facts


def _floor(floor: DeviceFloor) -> str:
    if floor.us is None:
        return floor.by
    each = f"{floor.us_per_kernel:.3g} for each of {floor.kernels} kernels" if floor.kernels else "kernels not listed"
    speed = f"{prefixed(floor.bytes)} at {number(floor.gb_per_second)} GB/s ({floor.by})"
    return f"{number(floor.us)} µs a step, {speed}; {number(floor.goal_us)} at {GOAL:.0%} of it, {each}"


def panels(found: Measurement) -> list[Callable[[Any], None]]:
    """Return a function per task, which draws each competitor's milliseconds and the shortest possible time."""
    read, held = found.machine.read_gb_per_second, "state" if found.memory_form is None else "memory"

    def panel(rows: list[Row]) -> Callable[[Any], None]:
        task, length = rows[-1].task, rows[-1].segment_length

        def paint(axes: Any) -> None:
            colors = ["tab:blue" if row.competitor == BUNDLE else "tab:gray" for row in rows]
            late = [[0.0] * len(rows), [row.ms.p90 - row.ms.p50 for row in rows]]
            axes.barh([row.competitor for row in rows], [row.ms.p50 for row in rows], color=colors, xerr=late)
            end = 1.3 * max(row.ms.p50 for row in rows)  # an error bar may reach beyond the picture, but a bar may not
            for row in rows:
                text = f" {row.ms.p50:.3g} ms" + ("" if row.competitor == BUNDLE else f", {row.ratio:.2g}×")
                axes.text(min(row.ms.p90, end), row.competitor, text, va="center")
            axes.set_xlim(0, 1.2 * end)
            if task in ("decode", "step") and read:
                floor = sum(found.floor[task].values()) / read / 1e6
                axes.axvline(floor, color="tab:red", linestyle="--", label=f"reading its bytes once: {floor:.3g} ms")
                axes.legend(loc="lower right")
            axes.set_title(f"{task}, L {length}, {held} full, {found.conditions.threads} threads", loc="left")
            axes.set_xlabel("ms per call, median; whisker to p90")

        return paint

    return [panel(rows[::-1]) for rows in found.works]
