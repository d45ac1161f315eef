"""Measure a bundle together with its competitors."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from txl_report.schema.measurement import Agreement, Conditions, Machine, Measurement, Row
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener, Silent

from txl_deploy.bench import timing
from txl_deploy.bench.competitor import Competitor, fill
from txl_deploy.bench.floor import Bandwidth, floor_of
from txl_deploy.bench.on_device import bandwidth_of, device_floors, saved_bytes
from txl_deploy.bench.overhead import overhead
from txl_deploy.bench.processes import measure_footprint, measure_load
from txl_deploy.bench.timing import interleave
from txl_deploy.bench.works import Task, Works
from txl_deploy.extras import version_of

ROUNDS = 5
"""Default number of rounds; each competitor has one turn per round."""
SHORTEST, LONGEST = 0.01, 600.0
"""Smallest and largest number of seconds for which a competitor may be timed at a task."""
AT_REST = f"before every slice, until all threads together use less than {timing.AT_REST:.0%} of a core"
"""Description of the wait before each slice, for the measurement's conditions."""


def bench(
    works: Works,
    others: Sequence[Competitor] = (),
    agreement: Mapping[str, Agreement] | None = None,
    *,
    threads: int,
    seconds: float = 2.0,
    rounds: int = ROUNDS,
    left_out: Mapping[str, str] | None = None,
    processes: bool = True,
    listener: Listener | None = None,
) -> Measurement:
    """Measure a bundle and its competitors.

    Args:
        works: the tasks of the bundle, which was opened with `threads`.
        others: competitors that have been compared with the bundle; the comparison also filled all states.
        agreement: the results of this comparison, by competitor.
        threads: number of threads of every competitor and of the measurement of memory.
        seconds: time for every competitor at every task, in seconds, all rounds together.
        rounds: number of turns of every competitor.
        left_out: for each competitor that cannot run here, the reason; the measurement lists these reasons.
        processes: True to measure load time and memory as well, in separate processes.
        listener: gets the stages and the progress of the measurement.

    Raises:
        UsageError: seconds or rounds are out of range.
    """
    listener, model, load, memory = listener or Silent(), works.model, None, None
    check_times(seconds, rounds)
    if processes:  # these processes open the model's backend, too
        listener.stage("load in fresh processes")
        load = measure_load(model.bundle.path, threads, backend=model.backend.name)
        listener.stage("memory of a fresh process")
        memory = measure_footprint(model.bundle.path, threads, backend=model.backend.name)
    if not others:
        fill(works.ours, model)
    bandwidth = bandwidth_of(model.backend, threads)
    everybody: list[Competitor] = [works.ours, *others]
    rows = time_tasks(works, everybody, works.tasks, bandwidth, seconds, rounds, listener)
    listener.stage("cost of Python")
    timing.come_to_rest()
    python, manifest = overhead(works), model.manifest
    saved = saved_bytes(model)
    shortest = floor_of(model.bundle, works.shortest.segment_length, saved)
    return Measurement(
        model_id=manifest.model_id,
        family=manifest.family_name,
        precision=manifest.precision,
        memory_form=works.memory_form,
        machine=machine_of(bandwidth, [other.name for other in others]),
        conditions=Conditions(
            threads=threads,
            batch_size=model.batch_size,
            rounds=rounds,
            slice_seconds=seconds / rounds,
            warm_up_calls=timing.WARM_UP_CALLS,
            rest=AT_REST,
            **works.conditions(),
        ),
        rows=rows,
        floor={task.kind: floor_of(model.bundle, task.segment_length, saved) for task in works.tasks},
        agreement=dict(agreement or {}),
        left_out=dict(left_out or {}),
        overhead=python,
        load=load,
        memory=memory,
        device_floors=device_floors(model, sum(shortest.values()), bandwidth),
    )


def check_times(seconds: float, rounds: int = ROUNDS) -> None:
    """Raise UsageError if `seconds` or `rounds` is out of range."""
    if not SHORTEST <= seconds <= LONGEST:
        raise UsageError(f"--seconds is {seconds:g}, expected {SHORTEST:g} … {LONGEST:g} per competitor and task")
    if rounds < 1:
        raise UsageError(f"rounds is {rounds}, expected at least 1")


def time_tasks(
    works: Works,
    competitors: Sequence[Competitor],
    tasks: Sequence[Task],
    bandwidth: Bandwidth | None,
    seconds: float,
    rounds: int,
    listener: Listener | None = None,
) -> tuple[Row, ...]:
    """Time competitors with full states, one task after the other; ratios are relative to the first competitor.

    `bandwidth` is measured once per round; without it, rows have no share of the memory's speed.
    """
    listener, rows = listener or Silent(), list[Row]()
    for task in tasks:
        listener.stage(f"time {task.kind}, L {task.segment_length}", rounds * len(competitors))
        timed = interleave(
            {other.name: works.call(other, task) for other in competitors},
            rounds=rounds,
            slice_seconds=seconds / rounds,
            between=bandwidth.measure if bandwidth else None,
            advance=listener.advance,
        )
        first = competitors[0].name
        for other in competitors:
            times = timed[other.name]
            p50, positions = times.times.p50, task.segment_length * works.model.batch_size
            size = other.step_bytes(task.segment_length)
            machine = bandwidth.serves(other.name, first) if bandwidth else None
            rows.append(
                Row(
                    task=task.kind,
                    segment_length=task.segment_length,
                    competitor=other.name,
                    description=other.description,
                    ms=times.times,
                    rounds=times.rounds,
                    ratio=p50 / timed[first].times.p50,
                    gb_per_second=size / p50 / 1e6,
                    of_bandwidth=size / p50 / 1e6 / machine if machine else None,
                    restless=times.restless,
                    foreign=times.foreign,
                    **works.rates(size, positions, positions / p50 * 1e3),
                )
            )
    return tuple(rows)


def machine_of(bandwidth: Bandwidth, others: Sequence[str]) -> Machine:
    """Describe this machine, and the versions of the libraries that the named competitors use."""
    torch = ["torch"] if any(name.startswith("torch") for name in others) else []
    return Machine(
        cpu=cpu_name(),
        cores=timing.available_cores(),
        system=f"{platform.system()} {platform.machine()}",
        read_gb_per_second=bandwidth.gb_per_second,
        read_measurements=tuple(bandwidth.measured),
        read_method=bandwidth.method,
        versions={"python": platform.python_version()}
        | {name: version_of(name) for name in ("txl-deploy", "onnxruntime", "numpy", *torch)},
    )


def cpu_name() -> str:
    """Return the processor's name, as the processor reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
