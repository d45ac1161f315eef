"""Define the document that `bench --json` writes: the speed of a bundle, of a Transformer-XL or of any other step.

`Measurement` is the whole document: its fields have the names of the JSON's keys. Limits are checked when a file is
read (`decode_measurement`). A field that applies only to some models is None, "" or empty for all other models.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct
from txl_runtime.bundle.tables import Sha256

from txl_report.schema.reading import Amount, Word, decode_document, short

BUNDLE = "bundle"
"""The bundle's own name in the list of competitors."""
BUSY = 0.05
"""Share of the machine, 0 … 1, used by other processes during a slice, above which the reader is warned."""

Positive = Annotated[float, Meta(gt=0, le=1e15)]
"""A measured time or rate, above 0."""
Size = Annotated[float, Meta(ge=0, le=1e18)]
"""A measured amount, not below 0."""
Counted = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A count that fits into 32 bits."""
Texts = Annotated[dict[Word, Word], Meta(max_length=100)]
"""Short texts by name, at most 100, because a stranger's file may hold any number."""


class Percentiles(Struct, frozen=True, kw_only=True):
    """Times of single calls in milliseconds, over all rounds."""

    calls: Annotated[int, Meta(ge=1, le=2**53)]
    p50: Positive
    p90: Positive
    p99: Positive
    best: float = 0.0


class Row(Struct, frozen=True, kw_only=True):
    """A competitor at one kind of work.

    Attributes:
        task: the result that is computed for each segment of `segment_length` tokens: for a Transformer-XL "decode",
            "prefill" or "score", for any other model "step".
        description: the program that ran.
        ms: times of single calls.
        rounds: the median of each round, in milliseconds.
        tokens_per_second, positions_per_second: rate of all sequences together, at the median time; tokens for a
            Transformer-XL, positions for any other step.
        ratio: this row's median divided by the bundle's median: 2.0 if the bundle is twice as fast.
        bytes_per_token, bytes_per_step: smallest number of bytes that must be read, per token for a Transformer-XL, per
            step for any other model.
        gb_per_second: these bytes divided by the median time, in GB/s.
        of_bandwidth: gb_per_second divided by the memory speed that was measured in the same run; None if no speed was
            measured, e.g. for a competitor on the CPU while the bundle runs on a device.
        restless: number of slices that began before the process had come to rest.
        foreign: the largest share of the machine, 0 … 1, that other processes used during a slice; None except on
            Linux.
    """

    task: Word
    segment_length: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    competitor: Word
    description: Word
    ms: Percentiles
    rounds: tuple[float, ...] = ()
    tokens_per_second: Positive | None = None
    positions_per_second: Positive | None = None
    ratio: float = 1.0
    bytes_per_token: float | None = None
    bytes_per_step: int | None = None
    gb_per_second: float = 0.0
    of_bandwidth: Size | None = None
    restless: Counted = 0
    foreign: Annotated[float, Meta(ge=0, le=1)] | None = None

    @property
    def unit(self) -> str:
        """Return the unit of `per_second`."""
        return "positions" if self.tokens_per_second is None else "tokens"

    @property
    def per_second(self) -> float | None:
        """Return tokens or positions per second; None only if a file's row has neither."""
        return self.positions_per_second if self.tokens_per_second is None else self.tokens_per_second


class Machine(Struct, frozen=True, kw_only=True):
    """The machine of the measurement, with the speed of reading memory: the median, and all measurements of it."""

    cpu: Word
    cores: Annotated[int, Meta(ge=1, le=2**20)]
    system: Word
    read_gb_per_second: Size | None
    read_measurements: tuple[float, ...] = ()
    read_method: Word
    versions: Texts


class Conditions(Struct, frozen=True, kw_only=True):
    """The conditions of the measurement.

    Attributes:
        memory_length, memory_rows: for a Transformer-XL, the memory length and each sequence's number of filled rows.
        state: for any other step, the shapes of the carried state, by name.
        rest: the sign by which the process was judged to be at rest.
        tokens, inputs: a description of the input: `tokens` for a Transformer-XL, `inputs` for any other step.
    """

    threads: Annotated[int, Meta(ge=1, le=2**20)]
    batch_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    memory_length: Counted | None = None
    memory_rows: Annotated[tuple[Counted, ...], Meta(max_length=100_000)] = ()
    state: dict[Word, tuple[int, ...]] = {}
    rounds: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    slice_seconds: Positive
    warm_up_calls: Counted
    rest: Word = ""
    tokens: Word = ""
    inputs: Word = ""


class Agreement(Struct, frozen=True, kw_only=True):
    """The difference between a competitor's results and the bundle's, over chained segments.

    Attributes:
        segments: number of segments compared; the first one starts with the state of new streams.
        max_abs, kl: for a Transformer-XL's log-probabilities: the largest difference and the mean Kullback-Leibler
            divergence, in nats.
        found: for any other step, the value of `measure` for each output; for integers and booleans, the number of
            values that differed.
        limit: the largest allowed value of `measure`; integers must be equal.
        measure: for log-probabilities "max_abs" if both compute in fp32, else "kl"; for outputs "max_abs" relative to
            max(1, largest value) in fp32, else "deviation".
        seconds: time that the comparison took, in seconds; for a competitor that compiles, mostly compiling.
    """

    segments: Counted
    max_abs: float | None = None
    kl: float | None = None
    found: dict[Word, float | None] = {}
    limit: Size
    measure: Word
    seconds: float | None = None

    @property
    def reached(self) -> dict[str, float]:
        """Return all measured differences, by name."""
        differences = {"log-probs max abs": self.max_abs, "KL": self.kl} | self.found
        return {name: value for name, value in differences.items() if value is not None}


class Overhead(Struct, frozen=True, kw_only=True):
    """The cost of Python per step, in microseconds (medians).

    Attributes:
        in_step: time that the stream's method spends outside the engine's call. It is measured around real calls, so
            caches are as cold as the engine leaves them. On a device a call returns before its work is done, so there
            `in_step` is the same as `without_engine`.
        without_engine: time of a step whose engine does nothing: the same code with warm caches. On a device this
            includes the driver's calls, and waiting for the copies of a step to and from the device.
        step: a whole step with its engine.
        share: in_step / step.
        what: the name of the measured part, e.g. "Python".
        put: on a device, time until the whole step is in the queue, launches included; None if not measured.
    """

    in_step: Size
    without_engine: Size
    step: Positive
    share: float = 0.0
    what: Word = "Python"
    put: Size | None = None


class LoadTime(Struct, frozen=True, kw_only=True):
    """Seconds to the first result, as medians over new processes. The files were read before, so they are cached.

    Attributes:
        load: time of `txl_runtime.load`, which checks the SHA-256 of every file.
        first_token: time to open a stream, feed a token and draw a token; for other steps, to run a shortest segment.
        total: load and first_token together.
        process: time from starting Python to the result, including imports.
        without_hashes: like `total`, but loaded with verify_files=False.
        runs: number of processes of each kind that were measured.
    """

    load: float = 0.0
    first_token: float = 0.0
    total: Size
    process: Size
    without_hashes: Size
    runs: int = 0


class Footprint(Struct, frozen=True, kw_only=True):
    """Bytes of physical memory of a process that loads a bundle and runs segments; None if not measured.

    The numbers are read from /proc/self/smaps. Private pages and shared pages of files (mapped weights, libraries)
    count. A page of a file counts once, even if it is mapped twice or also by different processes.

    Attributes:
        before: memory after importing Python, numpy and the engine, before loading.
        peak: the largest of samples taken every 20 ms from loading to the end.
        settled: memory after decode and prefill; for any other step, after its longest and its shortest segments.
        private: the part of `settled` that belongs to no file or was changed.
        high_water: the kernel's own maximum (VmHWM). It misses no peak, but counts a page once per mapping.
        weights, state: sizes of the weight file and of one stream's state, for comparison.
    """

    before: int | None = None
    peak: Amount | None = None
    settled: Amount | None = None
    private: int | None = None
    high_water: int | None = None
    weights: Amount
    state: Amount


class DeviceFloor(Struct, frozen=True, kw_only=True):
    """The shortest possible time of a step on a device, computed from the memory's speed if all bytes are read once.

    Attributes:
        by: the source of the speed, or the reason why it is unknown; values computed from it are then None.
        us, goal_us: microseconds of a step at that speed, and at the share of that speed that is the goal;
            `us_per_kernel` is `goal_us` divided by `kernels`.
        kernels: number of the step's kernels, from the engine's sidecar; None if no complete list exists.
    """

    by: Word
    gb_per_second: float | None = None
    bytes: Amount
    us: Size | None
    goal_us: float | None = None
    kernels: int | None = None
    us_per_kernel: float | None = None


class Measurement(Struct, kw_only=True):
    """Everything that `bench` measured; a value that was not measured is None.

    Attributes:
        family: "transformer_xl", or the family of any other step; "" for a Transformer-XL in files of version 0.8.
        memory_form: "kv" or "hidden", for a Transformer-XL.
        rows: one row per kind of work and competitor, the bundle first.
        floor: for each task, the smallest number of bytes that a step of the bundle reads, by kind of data.
        agreement: the difference from the bundle, by competitor.
        left_out: for each competitor that could not run, the reason.
        device_floors: for the shortest step, at the measured and at the stated memory speed; empty on the CPU.
    """

    model_id: Sha256
    family: Word = ""
    precision: Word
    memory_form: Word | None = None
    machine: Machine
    conditions: Conditions
    rows: Annotated[tuple[Row, ...], Meta(min_length=1, max_length=1000)]
    floor: dict[Word, dict[Word, Amount]] = {}
    agreement: Annotated[dict[Word, Agreement], Meta(max_length=100)] = {}
    left_out: Texts = {}
    overhead: Overhead | None = None
    load: LoadTime | None = None
    memory: Footprint | None = None
    device_floors: Annotated[tuple[DeviceFloor, ...], Meta(max_length=10)] = ()

    @property
    def works(self) -> list[list[Row]]:
        """Group the rows by kind of work and segment length, the bundle's row first in each group."""
        alike: dict[tuple[str, int], list[Row]] = {}
        for row in self.rows:
            alike.setdefault((row.task, row.segment_length), []).append(row)
        return [sorted(rows, key=lambda row: row.competitor != BUNDLE) for rows in alike.values()]

    @property
    def busy(self) -> float | None:
        """Return the largest share of the machine used by other processes during a slice, if above `BUSY`;
        else None.
        """
        most = max((row.foreign for row in self.rows if row.foreign is not None), default=0.0)
        return most if most > BUSY else None

    @property
    def restless(self) -> list[str]:
        """List the competitors that began a slice while another process's threads were still spinning."""
        return sorted({row.competitor for row in self.rows if row.restless})


class _Read(Measurement, kw_only=True):
    """A measurement whose `floor` is ignored: it has two forms in older files, and no reader of files shows it."""

    floor: Any = None


def decode_measurement(data: bytes) -> Measurement:
    """Decode a measurement of this or an older version from its JSON.

    Raises:
        ValueError: the document is too long, not JSON, or of a different structure; the message is one line.
    """
    read = decode_document(data, _Read)
    fields = {name: getattr(read, name) for name in Measurement.__struct_fields__}
    return Measurement(**(fields | {"floor": {}}))


def check_measurement(found: Measurement) -> None:
    """Refuse a measurement that contradicts itself.

    Raises:
        ValueError: a kind of work has no row of the bundle or several, or a row has no rate or unordered percentiles.
    """
    for rows in found.works:
        names = [row.competitor for row in rows]
        if names.count(BUNDLE) != 1 or len(set(names)) < len(names):
            task, length = rows[0].task, rows[0].segment_length
            raise ValueError(f"task {short(task, 80)!r} of L {length} has {names.count(BUNDLE)} rows of the bundle")
        for row in rows:
            if row.per_second is None:
                raise ValueError(f"a row of {short(row.competitor, 80)!r} has no rate")
            if not row.ms.p50 <= row.ms.p90 <= row.ms.p99:
                raise ValueError(f"percentiles of {short(row.competitor, 80)!r} are not in order")
