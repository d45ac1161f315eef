"""What a verification found, whichever version wrote it: gates, chains, drift, how errors are spread, agreement.

A class whose fields stand in a report in the same form is a Struct, into which the report is decoded at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from txl_report.schema.reading import Amount, Number

Verdict = Literal["passed", "failed", "not judged"]
Counts = Annotated[tuple[Amount, ...], Meta(max_length=64)]
"""Of every bin of a histogram."""
Unit = Literal["nats", "relative", "values"]
"""Of an error: nats; relative to max(1, largest value of the reference so far); values that differ, of exact ones."""


@dataclass(frozen=True)
class Gate:
    """One judged number.

    Attributes:
        name: what was judged.
        value: what was reached; None where nothing was measured or, of a gate that failed, where it was infinite.
        limit: the largest value that passes.
        verdict: what became of it.
    """

    name: str
    value: float | None
    limit: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Curve:
    """Errors from segment to segment of one chain: a drift curve.

    Attributes:
        name: what was compared: "log-probabilities", or the name of an output or of a state.
        unit: of the errors.
        mean, most: by point, the mean and the largest error; None where it was infinite or no number.
        segments: how many segments a point stands for; the last point may stand for fewer.
    """

    name: str
    unit: Unit
    mean: tuple[float | None, ...]
    most: tuple[float | None, ...]
    segments: int


@dataclass(frozen=True)
class Reached:
    """The largest error of one compared thing over a whole chain; None where it was infinite or no number."""

    name: str
    largest: float | None
    unit: Unit


@dataclass(frozen=True)
class Chain:
    """One chain of segments.

    Attributes:
        name: what kind of segments.
        streams: sequences side by side.
        segments, positions: how much was compared.
        full_from: the first segment that met a full memory or state; None where none did, or nobody looked.
        decided, agreeing: positions that are no near-ties, and those of them at which the best token is the same.
        reached: the largest error of everything that was compared.
        curves: the drift curves: of log-probabilities, or of every output and of the state that is furthest off.
    """

    name: str
    streams: int
    segments: int
    positions: int
    full_from: int | None
    decided: int
    agreeing: int
    reached: tuple[Reached, ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Histogram:
    """How often a size of error occurred, by decades.

    Attributes:
        name: of what: "log-probabilities", the name of an output, "all states", "KL divergence", "tokens of the text".
        unit: of the errors.
        labels: of every bin: "< 1e-9", "1e-9 … 1e-8", …, "≥ 1".
        counts: of every bin.
    """

    name: str
    unit: Unit
    labels: tuple[str, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Ranks:
    """Where the reference's best tokens stand in the bundle's order, near-ties included.

    Attributes:
        positions: how many were looked at.
        within: pairs of a number of best tokens and the share of positions, 0 … 1, at which the reference's best
            token is among so many of the bundle's best.
        best: how many best tokens are compared by `overlap`: 10, or all of a smaller vocabulary.
        overlap: the mean share, 0 … 1, of the reference's `best` best tokens that are among the bundle's.
    """

    positions: int
    within: tuple[tuple[int, float], ...]
    best: int
    overlap: float


class Divergence(Struct, frozen=True):
    """Kullback-Leibler divergence over all positions of all chains, in nats; None where it was infinite."""

    mean: float | None
    late: float | None = field(name="p99.9")
    """The 99.9 % quantile."""
    most: float | None = field(name="max")


class Text(Struct, frozen=True):
    """One real text.

    Attributes:
        tokens: that were read.
        reference_nll, bundle_nll: mean negative log-likelihood per token, in nats.
        relative: |Δ perplexity| / perplexity of the reference.
        errors: how many tokens had an error of each size; none in older files.
    """

    tokens: Amount
    reference_nll: float | None
    bundle_nll: float | None = field(name="runtime_nll")
    relative: Number | None
    errors: Counts = ()


@dataclass(frozen=True)
class Evidence:
    """One verification.

    Attributes:
        passed: whether no gate failed.
        by: who verified: "export" or the name of the file that `verify --json` wrote.
        backend: what ran the bundle.
        precision: it was judged by.
        reference: what it was compared with.
        gates, chains: what was judged, and on what.
        ran_on: what the chains read: "random tokens", "the text", "random inputs", "real inputs"; None where the file
            is of a version that did not write it.
        divergence: None for a model without log-probabilities.
        histograms: how errors are spread, those of the chains before those of the text; none in older files.
        ranks: None for a model without log-probabilities, and in older files.
        text: None where no text was given.
        sensitivity: of quantised weights, pairs of a layer and the divergence that it causes alone, the largest first.
    """

    passed: bool
    by: str
    backend: str
    precision: str
    reference: str
    gates: tuple[Gate, ...]
    chains: tuple[Chain, ...]
    ran_on: str | None
    divergence: Divergence | None
    histograms: tuple[Histogram, ...]
    ranks: Ranks | None
    text: Text | None
    sensitivity: tuple[tuple[str, float | None], ...]
