"""How fast a bundle was measured to be, and its competitors beside it."""

from __future__ import annotations

from dataclasses import dataclass

from txl_report.facts.plain import Row


@dataclass(frozen=True)
class Time:
    """One competitor at one kind of work.

    Attributes:
        name: "bundle" for the bundle itself.
        description: what ran it.
        p50, p90, p99: milliseconds of single calls.
        per_second: tokens or positions of all sequences together, at the median.
        ratio: this median divided by the bundle's: how many times as fast the bundle is.
        of_bandwidth: share of what memory was measured to deliver; None where that was not measured.
    """

    name: str
    description: str
    p50: float
    p90: float
    p99: float
    per_second: float
    ratio: float
    of_bandwidth: float | None


@dataclass(frozen=True)
class Work:
    """One kind of work, done by the bundle and by competitors.

    Attributes:
        task: "decode", "prefill", "score", or "step" of a model of any other kind.
        title: what is done, as a sentence of a heading.
        segment_length: L.
        unit: what `Time.per_second` counts: "tokens" or "positions".
        times: the bundle first.
    """

    task: str
    title: str
    segment_length: int
    unit: str
    times: tuple[Time, ...]


@dataclass(frozen=True)
class Speed:
    """One measurement.

    Attributes:
        by: the name of the file.
        machine: where: processor, cores, system, versions.
        conditions: how: threads, batch size, what was full, rounds.
        works: every kind of work.
        facts: what is measured once: the cost of Python, time to load, memory.
        left_out: competitors that could not run there, and why.
        cautions: what tells a reader not to trust the numbers too far; none where nothing does.
    """

    by: str
    machine: tuple[Row, ...]
    conditions: tuple[Row, ...]
    works: tuple[Work, ...]
    facts: tuple[Row, ...]
    left_out: tuple[Row, ...]
    cautions: tuple[str, ...]
