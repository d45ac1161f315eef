"""The whole measurement of a bundle of any family: its steps, one kind of work for every segment length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Array

from txl_deploy.bench import timing
from txl_deploy.bench.competitor import BundleSteps, StepCompetitor
from txl_deploy.bench.driving import random_inputs, until_full
from txl_deploy.bench.floor import DeviceFloor, StepBytes, bytes_of_any_step
from txl_deploy.bench.measuring import AT_REST, ROUNDS, Machine, check_times, in_fresh_processes, machine_of
from txl_deploy.bench.on_device import bandwidth_of, device_floors
from txl_deploy.bench.overhead import Overhead, overhead
from txl_deploy.bench.processes import Footprint, LoadTime
from txl_deploy.bench.timing import Percentiles, Timed, Work, interleave

SEGMENTS = 16
"""How many different segments the calls of a task go through in turns."""


class StepAgreement(Struct, frozen=True, kw_only=True):
    """How far a competitor's outputs are from the bundle's, over chained segments.

    Attributes:
        segments: how many were compared; the first of them starts with the state of new streams.
        found: by output, what `measure` reached; of whole numbers and truths, how many differed.
        limit: the largest value that it may have; whole numbers may not differ.
        measure: "max_abs" relative to max(1, largest value) in fp32, else "deviation".
        seconds: that it took; of a competitor that compiles, nearly all of it is compiling.
    """

    segments: int
    found: dict[str, float]
    limit: float
    measure: str
    seconds: float


class StepRow(Struct, frozen=True, kw_only=True):
    """One competitor at segments of one length.

    Attributes:
        ms: of single calls.
        rounds: the median of each round, ms.
        positions_per_second: of all sequences together, at the median.
        ratio: this median divided by the bundle's: how many times as fast the bundle is.
        bytes_per_step: what has to be read at least.
        gb_per_second: those bytes divided by the median time.
        of_bandwidth: gb_per_second divided by what its memory was measured to deliver in the same run; None where that
            was not measured: a competitor's on the CPU, where the bundle runs on a device.
        restless, foreign: see `txl_deploy.bench.timing.Timed`.
    """

    task: str = "step"
    segment_length: int
    competitor: str
    description: str
    ms: Percentiles
    rounds: tuple[float, ...]
    positions_per_second: float
    ratio: float
    bytes_per_step: int
    gb_per_second: float
    of_bandwidth: float | None
    restless: int
    foreign: float | None


class StepConditions(Struct, frozen=True, kw_only=True):
    """How it was measured; `state` has the shapes of what was carried along."""

    threads: int
    batch_size: int
    state: dict[str, tuple[int, ...]]
    rounds: int
    slice_seconds: float
    warm_up_calls: int
    rest: str = AT_REST
    inputs: str = "normal values, uniformly random ids"


class StepReport(Struct, frozen=True, kw_only=True):
    """Everything that `bench` found; None for what was not measured."""

    model_id: str
    family: str
    precision: str
    machine: Machine
    conditions: StepConditions
    rows: tuple[StepRow, ...]
    floor: StepBytes
    agreement: dict[str, StepAgreement]
    left_out: dict[str, str]
    overhead: Overhead | None
    load: LoadTime | None
    memory: Footprint | None
    device_floors: tuple[DeviceFloor, ...] = ()


def bench_steps(
    model: Model,
    ours: BundleSteps,
    others: Sequence[StepCompetitor] = (),
    agreement: Mapping[str, StepAgreement] | None = None,
    *,
    threads: int,
    seconds: float = 2.0,
    rounds: int = ROUNDS,
    left_out: Mapping[str, str] | None = None,
    processes: bool = True,
    listener: Listener | None = None,
) -> StepReport:
    """Measure the steps of a bundle and its competitors.

    Args:
        model: the bundle, opened with `threads`.
        ours: its own stream.
        others: competitors that were compared with it, so that the states of all are full.
        agreement: what that comparison gave.
        threads, seconds, rounds, left_out, processes, listener: as `txl_deploy.bench.measuring.bench`.

    Raises:
        UsageError: seconds or rounds are out of range.
    """
    heard = listener or Silent()
    check_times(seconds, rounds)
    load, memory = in_fresh_processes(model, threads, heard) if processes else (None, None)
    if not others:
        fill_steps(model, ours.stream)
    bandwidth, everybody, rows = bandwidth_of(model.backend, threads), [ours, *others], []
    for length in model.segment_lengths:
        heard.stage(f"time steps, L {length}", rounds * len(everybody))
        timed = interleave(
            {other.name: _work(model, other, length) for other in everybody},
            rounds=rounds,
            slice_seconds=seconds / rounds,
            between=bandwidth.measure,
            advance=heard.advance,
        )
        best = timed[ours.name].times.p50
        delivered = {other.name: bandwidth.serves(other.name, ours.name) for other in everybody}
        rows += [_row(model, other, length, timed[other.name], best, delivered[other.name]) for other in everybody]
    heard.stage("cost of Python")
    timing.come_to_rest()
    python = overhead(model, drive=shortest_steps)
    return StepReport(
        model_id=model.manifest.model_id,
        family=model.manifest.family_name,
        precision=model.manifest.precision,
        machine=machine_of(bandwidth, others),
        conditions=StepConditions(
            threads=threads,
            batch_size=model.batch_size,
            state={name: array.shape for name, array in ours.stream.state().items()},
            rounds=rounds,
            slice_seconds=seconds / rounds,
            warm_up_calls=timing.WARM_UP_CALLS,
        ),
        rows=tuple(rows),
        floor=bytes_of_any_step(model.bundle),
        agreement=dict(agreement or {}),
        left_out=dict(left_out or {}),
        overhead=python,
        load=load,
        memory=memory,
        device_floors=device_floors(model, bytes_of_any_step(model.bundle).total, bandwidth),
    )


def fill_steps(model: Model, stream: Stream) -> None:
    """Fill a stream's state with random segments."""
    for inputs in until_full(stream, model.manifest):
        stream.run(inputs)


def shortest_steps(model: Model, stream: Stream) -> Work:
    """Segments of the shortest length when the state is full: where Python counts most."""
    fill_steps(model, stream)
    segments = _segments(model, model.segment_lengths[-1])
    return lambda index: stream.run(segments[index % SEGMENTS])


def _segments(model: Model, length: int) -> list[dict[str, Array]]:
    return [random_inputs(model.manifest, length, seed) for seed in range(SEGMENTS)]


def _work(model: Model, competitor: StepCompetitor, length: int) -> Work:
    """One step; consecutive calls take consecutive segments."""
    segments = _segments(model, length)
    return lambda index: competitor.run(segments[index % SEGMENTS])


def _row(
    model: Model, competitor: StepCompetitor, length: int, found: Timed, best: float, machine: float | None
) -> StepRow:
    reached = competitor.step_bytes / found.times.p50 / 1e6
    return StepRow(
        segment_length=length,
        competitor=competitor.name,
        description=competitor.description,
        ms=found.times,
        rounds=found.rounds,
        positions_per_second=length * model.batch_size / found.times.p50 * 1e3,
        ratio=found.times.p50 / best,
        bytes_per_step=competitor.step_bytes,
        gb_per_second=reached,
        of_bandwidth=reached / machine if machine else None,
        restless=found.restless,
        foreign=found.foreign,
    )
