"""Reads what `bench --json` wrote, of a Transformer-XL or of any other step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Sha256
from txl_runtime.errors import UsageError

from txl_report.facts.plain import Row, some
from txl_report.facts.speed import Speed, Time, Work
from txl_report.schema.reading import Amount, Word, check_same, read_document, short

EXPECTED = "what `txl-deploy bench --json` writes"
ADVICE = "write one with: txl-deploy bench BUNDLE --json > bench.json"
BUNDLE = "bundle"
"""The name of the bundle among its competitors."""
BUSY = 0.05
"""Where other processes used more of the machine than this share during a slice, a reader is told."""
TITLES = {
    "decode": "all log-probabilities after every token",
    "prefill": "the next token after a segment",
    "score": "the nats of every token of a segment",
    "step": "all outputs of a segment",
}

_Positive = Annotated[float, Meta(gt=0, le=1e15)]
_Size = Annotated[float, Meta(ge=0, le=1e18)]
_Counted = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Names = Annotated[dict[Word, Word], Meta(max_length=100)]


class _Times(Struct):
    calls: Annotated[int, Meta(ge=1, le=2**53)]
    p50: _Positive
    p90: _Positive
    p99: _Positive


class _Row(Struct):
    task: Word
    segment_length: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    competitor: Word
    description: Word
    ms: _Times
    tokens_per_second: _Positive | None = None
    positions_per_second: _Positive | None = None
    of_bandwidth: _Size | None = None
    restless: _Counted = 0
    foreign: Annotated[float, Meta(ge=0, le=1)] | None = None


class _Machine(Struct):
    cpu: Word
    cores: Annotated[int, Meta(ge=1, le=2**20)]
    system: Word
    read_gb_per_second: _Size | None
    read_method: Word
    versions: _Names


class _Conditions(Struct):
    threads: Annotated[int, Meta(ge=1, le=2**20)]
    batch_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    rounds: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    slice_seconds: _Positive
    warm_up_calls: _Counted
    memory_length: _Counted | None = None
    memory_rows: Annotated[list[_Counted], Meta(max_length=100_000)] = []
    tokens: Word = ""
    inputs: Word = ""


class _Agreement(Struct):
    segments: _Counted
    limit: _Size
    measure: Word
    max_abs: float | None = None
    kl: float | None = None
    found: dict[Word, float | None] = field(default_factory=dict)


class _Overhead(Struct):
    in_step: _Size
    without_engine: _Size
    step: _Positive
    what: Word = "Python"


class _Load(Struct):
    total: _Size
    without_hashes: _Size
    process: _Size


class _Memory(Struct):
    weights: Amount
    state: Amount
    peak: Amount | None = None
    settled: Amount | None = None


class _Floor(Struct):
    by: Word
    bytes: Amount
    us: _Size | None


class _Document(Struct):
    model_id: Sha256
    precision: Word
    machine: _Machine
    conditions: _Conditions
    rows: Annotated[list[_Row], Meta(min_length=1, max_length=1000)]
    agreement: Annotated[dict[Word, _Agreement], Meta(max_length=100)] = field(default_factory=dict)
    left_out: _Names = field(default_factory=dict)
    overhead: _Overhead | None = None
    load: _Load | None = None
    memory: _Memory | None = None
    device_floors: Annotated[list[_Floor], Meta(max_length=10)] = []


def speed_of_file(path: Path, bundle: Bundle) -> Speed:
    """A measurement that `bench --json` wrote, of this bundle.

    Raises:
        UsageError: the file is no such document, contradicts itself, or is of another model or precision.
    """
    document = read_document(path, _Document, EXPECTED, ADVICE)
    manifest = bundle.manifest
    wanted = manifest.model_id, str(manifest.precision)
    check_same(path, document.model_id, document.precision, wanted, "give a measurement of this bundle")
    try:
        works = some(_works(document))
    except ValueError as error:
        raise UsageError(f"{path}: {error}, expected {EXPECTED}; {ADVICE}") from None
    machine, left_out = document.machine, document.left_out
    versions = ", ".join(f"{name} {found}" for name, found in machine.versions.items())
    return Speed(
        by=path.name,
        machine=(
            Row("processor", f"{machine.cpu}, {machine.cores} cores"),
            Row("system", machine.system),
            Row("versions", versions),
            Row("memory reads", _reads(machine)),
        ),
        conditions=tuple(_conditions(document.conditions)),
        works=works,
        facts=some(_once(document)),
        left_out=some(Row(name, why) for name, why in left_out.items()),
        cautions=tuple(_cautions(document.rows)),
    )


def _works(document: _Document) -> Iterator[Work]:
    """Every kind of work, the bundle's row first; ratios are computed, whatever the file says of them.

    Raises:
        ValueError: a kind of work has no row of the bundle or several, or a row has no rate.
    """
    alike: dict[tuple[str, int], list[_Row]] = {}
    for row in document.rows:
        alike.setdefault((row.task, row.segment_length), []).append(row)
    for (task, length), rows in alike.items():
        ours = [row for row in rows if row.competitor == BUNDLE]
        if len(ours) != 1 or len({row.competitor for row in rows}) < len(rows):
            raise ValueError(f"task {short(task, 80)!r} of L {length} has {len(ours)} rows of the bundle")
        others = [row for row in rows if row.competitor != BUNDLE]
        unit = "tokens" if ours[0].tokens_per_second is not None else "positions"
        times = some(_time(row, ours[0].ms.p50) for row in (*ours, *others))
        yield Work(task, TITLES.get(task, ""), length, unit, times)


def _time(row: _Row, best: float) -> Time:
    rate = row.tokens_per_second if row.tokens_per_second is not None else row.positions_per_second
    if rate is None:
        raise ValueError(f"a row of {short(row.competitor, 80)!r} has no rate")
    ms = row.ms
    if not ms.p50 <= ms.p90 <= ms.p99:
        raise ValueError(f"percentiles of {short(row.competitor, 80)!r} are not in order")
    return Time(
        name=row.competitor,
        description=row.description,
        p50=ms.p50,
        p90=ms.p90,
        p99=ms.p99,
        per_second=rate,
        ratio=ms.p50 / best,
        of_bandwidth=row.of_bandwidth,
    )


def _reads(machine: _Machine) -> str:
    if machine.read_gb_per_second is None:
        return machine.read_method
    return f"{machine.read_gb_per_second:.3g} GB/s ({machine.read_method})"


def _conditions(conditions: _Conditions) -> Iterator[Row]:
    yield Row("threads", str(conditions.threads))
    yield Row("sequences", str(conditions.batch_size))
    if conditions.memory_length is not None and conditions.memory_rows:
        yield Row("memory", f"full: {min(conditions.memory_rows)} of {conditions.memory_length} rows")
    yield Row(
        "timing",
        f"{conditions.rounds} rounds of {conditions.slice_seconds:.2g} s each, in turns, "
        f"{conditions.warm_up_calls} calls to warm up",
    )
    if read := conditions.tokens or conditions.inputs:
        yield Row("inputs", read)


def _once(document: _Document) -> Iterator[Row]:
    """What is measured once, and whether competitors compute the same."""
    if (python := document.overhead) is not None:
        yield Row(
            f"{python.what} per step",
            f"{python.in_step:.1f} µs of {python.step:.0f}, {python.without_engine:.1f} with an engine that does "
            "nothing",
        )
    for floor in (each for each in document.device_floors if each.us is not None):
        yield Row("floor of a step, computed", f"{floor.us:.3g} µs for {floor.bytes / 1e6:.1f} MB ({floor.by})")
    if (load := document.load) is not None:
        yield Row(
            "from loading to the first result",
            f"{load.total:.2f} s, files cached ({load.without_hashes:.2f} without hashes, {load.process:.2f} from "
            "starting Python)",
        )
    if (memory := document.memory) is not None and memory.peak is not None and memory.settled is not None:
        yield Row(
            "peak memory",
            f"{memory.peak / 1e6:.1f} MB, {memory.settled / 1e6:.1f} MB after loading; weights "
            f"{memory.weights / 1e6:.1f} MB, state {memory.state / 1e6:.1f} MB",
        )
    for name, agreed in document.agreement.items():
        found = {"log-probs max abs": agreed.max_abs, "KL": agreed.kl} | agreed.found
        reached = ", ".join(f"{what} {value:.3g}" for what, value in found.items() if value is not None)
        yield Row(
            f"{name} agrees",
            f"{reached}, {agreed.segments} segments ({agreed.measure} limit {agreed.limit:g})",
        )


def _cautions(rows: list[_Row]) -> Iterator[str]:
    busy = max((row.foreign for row in rows if row.foreign is not None), default=0.0)
    if busy > BUSY:
        yield f"Other processes used up to {busy:.0%} of the machine during a slice; measure again when it is idle."
    if restless := sorted({row.competitor for row in rows if row.restless}):
        yield f"Thread pools of others were still spinning when {', '.join(restless)} began a slice."
