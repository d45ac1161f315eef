"""The whole measurement of a Transformer-XL's bundle, and of its competitors beside it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model

from txl_deploy.bench import timing
from txl_deploy.bench.agreement import Agreement, agree
from txl_deploy.bench.competitor import BundleCompetitor, Competitor, Maker, StepCompetitor, fill
from txl_deploy.bench.floor import Bandwidth, Bytes, DeviceFloor, bytes_of_step
from txl_deploy.bench.on_device import bandwidth_of, device_floors
from txl_deploy.bench.overhead import Overhead, overhead
from txl_deploy.bench.processes import Footprint, LoadTime, measure_footprint, measure_load
from txl_deploy.bench.timing import Percentiles, Work, interleave, random_tokens

BUNDLE = "bundle"
"""The name of the bundle among its competitors."""

ROUNDS = 5
SHORTEST, LONGEST = 0.01, 600.0
AT_REST = f"before every slice, until all threads together use less than {timing.AT_REST:.0%} of a core"
TOKENS = 16
"""How many different segments the calls of a task go through in turns."""


class Task(Struct, frozen=True, kw_only=True):
    """A kind of work: what is asked for after each segment of `segment_length` tokens.

    `decode` asks for the log-probabilities after one token, `prefill` for the most likely next token after a segment
    and nothing else, `score` for the nats of every token of a segment.
    """

    kind: str
    segment_length: int


class Row(Struct, frozen=True, kw_only=True):
    """One competitor at one task.

    Attributes:
        ms: of single calls.
        rounds: the median of each round, ms.
        tokens_per_second: of all sequences together, at the median.
        ratio: this median divided by the bundle's: how many times as fast the bundle is.
        bytes_per_token: what has to be read at least, per token of a call.
        gb_per_second: those bytes divided by the median time.
        of_bandwidth: gb_per_second divided by what its memory was measured to deliver in the same run; None where that
            was not measured: a competitor's on the CPU, where the bundle runs on a device.
        restless, foreign: see `txl_deploy.bench.timing.Timed`.
    """

    task: str
    segment_length: int
    competitor: str
    description: str
    ms: Percentiles
    rounds: tuple[float, ...]
    tokens_per_second: float
    ratio: float
    bytes_per_token: float
    gb_per_second: float
    of_bandwidth: float | None
    restless: int
    foreign: float | None


class Machine(Struct, frozen=True, kw_only=True):
    """Where it was measured."""

    cpu: str
    cores: int
    system: str
    read_gb_per_second: float | None
    read_measurements: tuple[float, ...]
    read_method: str
    versions: dict[str, str]


class Conditions(Struct, frozen=True, kw_only=True):
    """How it was measured."""

    threads: int
    batch_size: int
    memory_length: int
    memory_rows: tuple[int, ...]
    rounds: int
    slice_seconds: float
    warm_up_calls: int
    rest: str
    tokens: str = "uniformly random ids"


class Report(Struct, frozen=True, kw_only=True):
    """Everything that `bench` found; None for what was not measured."""

    model_id: str
    precision: str
    memory_form: str
    machine: Machine
    conditions: Conditions
    rows: tuple[Row, ...]
    floor: dict[str, Bytes]
    agreement: dict[str, Agreement]
    left_out: dict[str, str]
    overhead: Overhead | None
    load: LoadTime | None
    memory: Footprint | None
    device_floors: tuple[DeviceFloor, ...] = ()


def tasks_of(model: Model) -> tuple[Task, ...]:
    """Decode with L = 1, prefill and scoring with the longest segments."""
    longest = model.segment_lengths[0]
    long = (Task(kind="prefill", segment_length=longest),) if longest > 1 else ()
    return (Task(kind="decode", segment_length=1), *long, Task(kind="score", segment_length=longest))


def bench(
    model: Model,
    competitors: Mapping[str, Maker] | None = None,
    *,
    threads: int,
    seconds: float = 2.0,
    rounds: int = ROUNDS,
    left_out: Mapping[str, str] | None = None,
    processes: bool = True,
    listener: Listener | None = None,
) -> Report:
    """Measure a bundle and its competitors.

    Args:
        model: the bundle, opened with `threads`.
        competitors: by name; each is made when its turn to be checked comes.
        threads: how many every competitor and the measurement of memory use.
        seconds: how long every competitor is timed at every task, all rounds together.
        rounds: how many turns every competitor has.
        left_out: competitors that cannot run here, and why; they are noted in the report.
        processes: whether load time and memory are measured too, in processes of their own.
        listener: hears of stages and progress.

    Raises:
        UsageError: seconds or rounds are out of range.
        CheckError: a competitor does not compute what the bundle computes.
    """
    heard = listener or Silent()
    check_times(seconds, rounds)
    load, memory = in_fresh_processes(model, threads, heard) if processes else (None, None)
    ours = BundleCompetitor(BUNDLE, model)
    others: list[Competitor] = []
    agreement: dict[str, Agreement] = {}
    heard.stage("check that competitors agree", len(competitors or {}))
    for name, make in (competitors or {}).items():
        other, precision = make()
        agreement[name] = agree(ours, other, model, precision)
        others.append(other)
        heard.advance()

    bandwidth, tasks = bandwidth_of(model.backend, threads), tasks_of(model)
    if not others:
        fill(ours, model)  # where there are others, comparing them has filled every memory
    rows = time_tasks(model, [ours, *others], tasks, bandwidth, seconds, rounds, heard)
    heard.stage("cost of Python")
    timing.come_to_rest()
    python = overhead(model)
    m = model.manifest
    return Report(
        model_id=m.model_id,
        precision=m.precision,
        memory_form=m.transformer_xl.memory,
        machine=machine_of(bandwidth, others),
        conditions=Conditions(
            threads=threads,
            batch_size=m.batch_size,
            memory_length=m.memory_length,
            memory_rows=tuple(ours.stream.fill.tolist()),
            rounds=rounds,
            slice_seconds=seconds / rounds,
            warm_up_calls=timing.WARM_UP_CALLS,
            rest=AT_REST,
        ),
        rows=rows,
        floor={task.kind: bytes_of_step(model.bundle, task.segment_length) for task in tasks},
        agreement=agreement,
        left_out=dict(left_out or {}),
        overhead=python,
        load=load,
        memory=memory,
        device_floors=device_floors(model, bytes_of_step(model.bundle, 1).total, bandwidth),
    )


def check_times(seconds: float, rounds: int) -> None:
    """Raise UsageError unless so long and so often can be measured."""
    if not SHORTEST <= seconds <= LONGEST:
        raise UsageError(f"--seconds is {seconds:g}, expected {SHORTEST:g} … {LONGEST:g} per competitor and task")
    if rounds < 1:
        raise UsageError(f"rounds is {rounds}, expected at least 1")


def in_fresh_processes(model: Model, threads: int, heard: Listener) -> tuple[LoadTime, Footprint]:
    """Load time and memory of processes of their own, which open the backend that the model has."""
    heard.stage("load in fresh processes")
    load = measure_load(model.bundle.path, threads, backend=model.backend.name)
    heard.stage("memory of a fresh process")
    return load, measure_footprint(model.bundle.path, threads, backend=model.backend.name)


def time_tasks(
    model: Model,
    competitors: list[Competitor],
    tasks: tuple[Task, ...],
    bandwidth: Bandwidth | None,
    seconds: float,
    rounds: int,
    heard: Listener | None = None,
) -> tuple[Row, ...]:
    """Time competitors with full memories at one task after the other; all are compared with the first.

    `bandwidth` is measured once per round; without it, rows do not say what share of it they reach.
    """
    listener, rows = heard or Silent(), []
    for task in tasks:
        listener.stage(f"time {task.kind}, L {task.segment_length}", rounds * len(competitors))
        works = {other.name: _work(other, task, model) for other in competitors}
        timed = interleave(
            works,
            rounds=rounds,
            slice_seconds=seconds / rounds,
            between=bandwidth.measure if bandwidth else None,
            advance=listener.advance,
        )
        ours = timed[competitors[0].name].times.p50
        for other in competitors:
            found = timed[other.name]
            size, tokens = other.step_bytes(task.segment_length), task.segment_length * model.batch_size
            reached = size / found.times.p50 / 1e6
            machine = bandwidth.serves(other.name, competitors[0].name) if bandwidth else None
            rows.append(
                Row(
                    task=task.kind,
                    segment_length=task.segment_length,
                    competitor=other.name,
                    description=other.description,
                    ms=found.times,
                    rounds=found.rounds,
                    tokens_per_second=tokens / found.times.p50 * 1e3,
                    ratio=found.times.p50 / ours,
                    bytes_per_token=size / tokens,
                    gb_per_second=reached,
                    of_bandwidth=reached / machine if machine else None,
                    restless=found.restless,
                    foreign=found.foreign,
                )
            )
    return tuple(rows)


def _work(competitor: Competitor, task: Task, model: Model) -> Work:
    """One call of a task; consecutive calls take consecutive segments."""
    shape = (TOKENS, model.batch_size, task.segment_length + (task.kind == "score"))
    tokens = random_tokens(model.manifest.vocab_size, shape, seed=1)
    calls = {"decode": competitor.logprobs, "prefill": competitor.next_token, "score": competitor.score}
    call = calls[task.kind]
    return lambda index: call(tokens[index % TOKENS])


def machine_of(bandwidth: Bandwidth, others: Sequence[Competitor | StepCompetitor]) -> Machine:
    """What is known of this machine, and what of it these competitors use."""
    torch = ["torch"] if any(other.name.startswith("torch") for other in others) else []
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
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def version_of(package: str) -> str:
    """The installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
