"""Reads what a verification wrote, a bundle's report.json or the output of `verify --json`, of this or older versions.

Fields that older versions did not write are optional; all others have to be there and agree with one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field
from txl_runtime.bundle.reading import REPORT, Bundle
from txl_runtime.errors import BundleError, UsageError

from txl_report.facts.evidence import (
    Chain,
    Counts,
    Curve,
    Divergence,
    Evidence,
    Gate,
    Histogram,
    Ranks,
    Reached,
    Text,
    Unit,
    Verdict,
)
from txl_report.facts.plain import Missing, some
from txl_report.schema.reading import (
    Amount,
    Number,
    Word,
    check_same,
    check_size,
    decode_document,
    read_document,
    short,
)

ADVICE = "write one with: txl-deploy verify BUNDLE --json > verify.json"
POINTS = 240
"""Of a curve at most; where there are more segments a point stands for several."""
CURVES = 8
"""Outputs of a chain whose curves are shown."""

_Values = Annotated[list[Number | None], Meta(max_length=2_000_000)]
_Edges = Annotated[list[Number], Meta(max_length=63)]


class _Gate(Struct):
    name: Word
    value: float | None = None
    limit: Number | None = None
    passed: bool | None = None


class _Tensor(Struct):
    exact: bool = False
    nats: bool = False
    largest: Number | None = None
    mean: _Values = []
    most: _Values = []


class _Chain(Struct):
    name: Word
    streams: Amount
    segments: Amount
    positions: Amount
    full_from: Amount | None = None
    agreeing: Amount = 0
    decided: Amount = 0
    max_logprobs: Number | None = None
    max_memory: Number | None = None
    mean_logprobs: _Values | None = None
    max_per_segment: _Values | None = None
    outputs: dict[Word, _Tensor] = field(default_factory=dict)
    states: dict[Word, _Tensor] = field(default_factory=dict)


class _Errors(Struct):
    unit: Unit
    counts: Counts


class _Ranks(Struct):
    positions: Annotated[int, Meta(ge=1, le=2**53)]
    within: Annotated[dict[str, Amount], Meta(max_length=16)]
    best: Annotated[int, Meta(ge=1, le=1000)]
    shared: Amount


class _Spread(Struct):
    ran_on: Word
    edges: _Edges
    errors: dict[Word, _Errors]
    kl_edges: _Edges
    kl: Counts | None = None
    ranks: _Ranks | None = None


class _Document(Struct):
    passed: bool
    backend: Word
    precision: Word
    gates: Annotated[list[_Gate], Meta(max_length=1000)]
    chains: Annotated[list[_Chain], Meta(max_length=1000)]
    reference: Word = ""
    model_id: Word = ""
    kl: Divergence | None = None
    spread: _Spread | None = None
    text: Text | None = None
    sensitivity: dict[Word, float | None] = field(default_factory=dict)


def evidence_of_bundle(bundle: Bundle) -> Evidence | Missing:
    """The verification that the export made; why there is none, where there is none."""
    again = "txl-deploy verify BUNDLE"
    record, model_id = bundle.manifest.files.get(REPORT), bundle.manifest.model_id
    if record is None:
        return Missing("The bundle was exported without a verification (--no-verify).")
    try:
        check_size(record.size)
        document = decode_document(bundle.read(REPORT), _Document)
        if (document.model_id or model_id, document.precision) != (model_id, bundle.manifest.precision):
            return Missing(f"{REPORT} is of another model or another precision than the bundle.", again)
        return _evidence(document, "export")
    except (BundleError, ValueError) as error:
        return Missing(f"{REPORT} cannot be read: {error}.", again)


def evidence_of_file(path: Path, bundle: Bundle) -> Evidence:
    """A verification that `verify --json` wrote, of this bundle.

    Raises:
        UsageError: the file is no such document, contradicts itself, or is of another model or precision.
    """
    expected = "what `txl-deploy verify --json` writes"
    document = read_document(path, _Document, expected, ADVICE)
    manifest = bundle.manifest
    wanted = manifest.model_id, str(manifest.precision)
    check_same(path, document.model_id, document.precision, wanted, "give a verification of this bundle")
    try:
        return _evidence(document, path.name)
    except ValueError as error:
        raise UsageError(f"{path}: {error}, expected {expected}; {ADVICE}") from None


def _evidence(document: _Document, by: str) -> Evidence:
    """Plain values of a document.

    Raises:
        ValueError: what it says of itself cannot be.
    """
    _check(document)
    spread = document.spread
    worst = sorted(document.sensitivity.items(), key=lambda item: -(math.inf if item[1] is None else item[1]))
    return Evidence(
        passed=document.passed,
        by=by,
        backend=document.backend,
        precision=document.precision,
        reference=document.reference,
        gates=some(Gate(gate.name, gate.value, gate.limit, _verdict(gate)) for gate in document.gates),
        chains=some(map(_chain, document.chains)),
        ran_on=(spread and spread.ran_on) or None,
        divergence=document.kl,
        histograms=some(_histograms(spread, document.text)),
        ranks=None if spread is None or spread.ranks is None else _ranks(spread.ranks),
        text=document.text,
        sensitivity=some(worst),
    )


def _check(document: _Document) -> None:
    """Raise ValueError where parts contradict one another: a page must not say what its numbers do not."""
    for gate in document.gates:
        reached = gate.value is not None and gate.limit is not None and gate.value <= gate.limit
        if gate.passed is not None and gate.limit is not None and gate.passed != reached:
            raise ValueError(f"gate {short(gate.name, 80)!r} does not follow from its value and its limit")
    if document.passed != all(gate.passed is not False for gate in document.gates):
        raise ValueError(f"passed is {str(document.passed).lower()}, and its gates say otherwise")
    for chain in document.chains:
        if chain.agreeing > chain.decided:
            raise ValueError(f"chain {short(chain.name, 80)!r} agrees at more positions than were decided")
    spread = document.spread
    if spread is None:
        return
    histograms = [(spread.edges, found.counts) for found in spread.errors.values()]
    histograms += [] if spread.kl is None else [(spread.kl_edges, spread.kl)]
    histograms += [(spread.edges, document.text.errors)] if document.text and document.text.errors else []
    if any(len(counts) != len(edges) + 1 or edges != sorted(set(edges)) for edges, counts in histograms):
        raise ValueError("the counts of its spread do not fit their edges")
    ranks = spread.ranks
    if ranks and (
        any(not number.isascii() or not number.isdecimal() or len(number) > 4 for number in ranks.within)
        or any(count > ranks.positions for count in ranks.within.values())
        or ranks.shared > ranks.positions * ranks.best
    ):
        raise ValueError("the ranks of its spread do not fit their positions")


def _verdict(gate: _Gate) -> Verdict:
    return "not judged" if gate.passed is None else "passed" if gate.passed else "failed"


def _chain(chain: _Chain) -> Chain:
    reached: list[Reached] = []
    curves: list[Curve] = []
    if chain.mean_logprobs is not None:
        reached.append(Reached("log-probabilities", chain.max_logprobs, "nats"))
        reached.append(Reached("memory", chain.max_memory, "relative"))
        curves.append(_curve("log-probabilities", "nats", chain.mean_logprobs, chain.max_per_segment or []))
    for kind, tensors in (("output", chain.outputs), ("state", chain.states)):
        reached += [Reached(f"{kind} {name}", one.largest, _unit(one)) for name, one in tensors.items()]
    for name, tensor in [(name, tensor) for name, tensor in chain.outputs.items() if not tensor.exact][:CURVES]:
        curves.append(_curve(f"output {name}", "nats" if tensor.nats else "relative", tensor.mean, tensor.most))
    states = [(name, tensor) for name, tensor in chain.states.items() if not tensor.exact]
    if states:
        name, tensor = max(states, key=lambda item: math.inf if item[1].largest is None else item[1].largest)
        curves.append(_curve(f"state {name}", "relative", tensor.mean, tensor.most))
    return Chain(
        name=chain.name,
        streams=chain.streams,
        segments=chain.segments,
        positions=chain.positions,
        full_from=chain.full_from,
        decided=chain.decided,
        agreeing=chain.agreeing,
        reached=some(reached),
        curves=tuple(curves),
    )


def _unit(tensor: _Tensor) -> Unit:
    return "values" if tensor.exact else "nats" if tensor.nats else "relative"


def _curve(name: str, unit: Unit, mean: Sequence[float | None], most: Sequence[float | None]) -> Curve:
    """A curve of at most `POINTS` points: of several segments, the mean of their means and the largest error."""
    at_once = max(1, -(-max(len(mean), len(most)) // POINTS))

    def points(values: Sequence[float | None], largest: bool) -> Iterator[float | None]:
        for first in range(0, len(values), at_once):
            part = [value for value in values[first : first + at_once] if value is not None]
            whole = len(part) == len(values[first : first + at_once])
            yield (max(part) if largest else sum(part) / len(part)) if whole else None

    return Curve(name, unit, tuple(points(mean, False)), tuple(points(most, True)), at_once)


def _histograms(spread: _Spread | None, text: Text | None) -> Iterator[Histogram]:
    if spread is None:
        return
    for name, found in spread.errors.items():
        yield _histogram(name, found.unit, spread.edges, found.counts)
    if spread.kl is not None:
        yield _histogram("KL divergence", "nats", spread.kl_edges, spread.kl)
    if text is not None and text.errors:
        yield _histogram("tokens of the text", "nats", spread.edges, text.errors)


def _histogram(name: str, unit: Unit, edges: Sequence[float], counts: Counts) -> Histogram:
    """Counts with the labels of their bins."""
    shown = [f"{edge:.0e}".replace("e-0", "e-").replace("1e+00", "1") for edge in edges]
    between = [f"{first} … {last}" for first, last in pairwise(shown)]
    labels = [f"< {shown[0]}", *between, f"≥ {shown[-1]}"] if edges else ["all"]
    return Histogram(name, unit, tuple(labels), counts)


def _ranks(ranks: _Ranks) -> Ranks:
    within = sorted((int(number), count / ranks.positions) for number, count in ranks.within.items())
    return Ranks(ranks.positions, tuple(within), ranks.best, ranks.shared / (ranks.positions * ranks.best))
