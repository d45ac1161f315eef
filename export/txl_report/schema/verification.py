"""Define the result of a verification, as a bundle's report.json and the output of `verify --json` hold it.

`Verification` is the whole document: its fields are in the file with the same names and in the same order. `verify`
builds it; limits are checked when a file is read (`decode_verification`). A number that is infinite or NaN is null in
the file, and None after reading.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import force_setattr

from txl_report.schema.reading import Amount, Number, Word, decode_document, short

Unit = Literal["nats", "relative", "values"]
"""Unit of an error: nats; relative to max(1, largest reference value so far); for exact values, the number
of values that differ.
"""
Counts = Annotated[tuple[Amount, ...], Meta(max_length=64)]
"""Count of each bin of a histogram: below the first edge, between neighbouring edges, and from the last edge on."""
Edges = Annotated[tuple[Number, ...], Meta(max_length=63)]
"""Edges between the bins of a histogram, ascending."""
Values = Annotated[list[Number | None], Meta(max_length=2_000_000)]
"""One value per segment."""
Names = Annotated[tuple[Word, ...], Meta(max_length=100_000)]
"""Names of tensors, with a limit because a stranger may have written the file."""

LOGPROBS, MEMORY = "logprobs", "memory"
"""Names of the output and the state in a Transformer-XL's chain; version 0.8 wrote them without names."""

VOCABULARY = "vocabulary differing"
"""Name of the gate on the bundle's vocabulary, the only gate that compares no numbers of the model."""


def as_size(value: float | None) -> float:
    """Return the size of an error; None, which in a file stands for infinity or NaN, becomes infinity."""
    return math.inf if value is None else value


class Gate(Struct, frozen=True):
    """A number that is judged by a limit.

    Attributes:
        name: the quantity that was judged.
        value: the measured value; None if nothing was measured or, in a gate that failed, if it was infinite.
        limit: the largest value that passes; None if there is no limit.
        passed: None if there was no value to judge, or no limit to judge it by.
        verdict: "passed", "FAILED" or "not judged", always derived from `passed`; the file's own word is ignored.
    """

    name: Word
    value: float | None = None
    limit: Number | None = None
    passed: bool | None = None
    verdict: Word = ""

    def __post_init__(self) -> None:
        force_setattr(self, "verdict", {True: "passed", False: "FAILED", None: "not judged"}[self.passed])


class Tensor(Struct):
    """An output or state of a chain, compared with the reference's.

    Attributes:
        exact: True for integers and booleans, which must be equal.
        nats: True for log-probabilities, whose differences are absolute.
        largest: largest |Δ| relative to max(1, largest |value| of the reference so far); for log-probabilities,
            undivided |Δ|; for exact values, the number of values that differed.
        mean: mean error of each compared segment: the drift curve.
        most: largest error of each compared segment.
        shapes: number of segments in which the tensor's shape differed from the reference's.
        scale: max(1, largest |value| of the reference); 1 for log-probabilities.
        reached: the largest value of the reference, for integers.
    """

    exact: bool = False
    nats: bool = False
    largest: Number | None = None
    mean: Values = []
    most: Values = []
    shapes: Amount = 0
    scale: Number | None = 1.0
    reached: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | UnsetType = UNSET

    @property
    def unit(self) -> Unit:
        """Return the unit of the tensor's errors."""
        return "values" if self.exact else "nats" if self.nats else "relative"


class Chain(Struct):
    """A chain of segments.

    Attributes:
        name: the kind of segments.
        streams: number of sequences side by side.
        segments: number of segments run.
        positions: number of positions compared, in all segments and sequences.
        rows: number of positions compared in each segment.
        full_from: index of the first segment that began with a full memory or state; None if no segment did, or if
            this was not checked.
        agreeing, decided: number of positions where the best token agrees, and number of positions without a near-tie.
        outputs, states: the compared tensors, by name.
        every: interval, in segments, at which states are compared; they are also compared after the last segment.
        targets: number of tokens that were predicted within a segment, if the model reads only tokens.
        theirs, ours: negative log-likelihood of these tokens by the reference and by the bundle, in nats.
        filling: names of states that were not full at the chain's end, or full for less than half of the chain.
        counting: names of integer states that were still changing in one direction at the chain's end.
    """

    name: Word
    streams: Amount
    segments: Amount
    positions: Amount
    rows: Annotated[list[Amount], Meta(max_length=2_000_000)] = []
    full_from: Amount | None = None
    agreeing: Amount = 0
    decided: Amount = 0
    outputs: dict[Word, Tensor] = {}
    states: dict[Word, Tensor] = {}
    every: Amount = 1
    targets: Amount = 0
    theirs: float | None = 0.0
    ours: float | None = 0.0
    filling: Names = ()
    counting: Names = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that were compared."""
        return (*self.outputs.values(), *self.states.values())


class Divergence(Struct, frozen=True):
    """Kullback-Leibler divergence over all positions of all chains, in nats; None if it was infinite.

    Attributes:
        mean: the mean over all positions.
        late: the 99.9 % quantile; "p99.9" in the file.
        most: the largest value; "max" in the file.
    """

    mean: float | None
    late: float | None = field(name="p99.9")
    most: float | None = field(name="max")


class Errors(Struct, frozen=True):
    """A histogram of errors; the edges of its bins are in the `Spread`."""

    unit: Unit
    counts: Counts


class Ranks(Struct, frozen=True):
    """The ranks of the reference's best tokens in the bundle's order, near-ties included.

    Attributes:
        positions: number of positions compared.
        within: for each k, the number of positions where the reference's best token is among the bundle's k best
            tokens, e.g. {"1": 980, "10": 1000}.
        best: number of best tokens that `shared` compares: 10, or all tokens of a smaller vocabulary.
        shared: number of the reference's `best` tokens that are also among the bundle's, summed over positions.
    """

    positions: Annotated[int, Meta(ge=1, le=2**53)]
    within: Annotated[dict[str, Amount], Meta(max_length=16)]
    best: Annotated[int, Meta(ge=1, le=1000)]
    shared: Amount


class Spread(Struct, frozen=True):
    """The spread of errors, divergence and agreement over all chains.

    Attributes:
        ran_on: the chains' input: "random tokens", "the text", "random inputs", "real inputs".
        edges: edges between the bins of errors, one fewer than bins.
        errors: histograms by the name of the compared tensor; states may share a histogram.
        kl_edges: edges between the bins of `kl`.
        kl: histogram of the divergence, in nats; None for a model without log-probabilities.
        ranks: None for a model without log-probabilities.
    """

    ran_on: Word
    edges: Edges
    errors: dict[Word, Errors]
    kl_edges: Edges
    kl: Counts | None = None
    ranks: Ranks | None = None


class Text(Struct, frozen=True, kw_only=True):
    """The comparison on a real text.

    Attributes:
        tokens: number of tokens read.
        reference_nll, runtime_nll: mean negative log-likelihood per token, in nats.
        errors: histogram of the tokens' errors, with the edges of the `Spread`; empty in older files.
        relative: |Δ perplexity| / perplexity of the reference.
        behind: number of tokens before those that were read, to which the bundle's matrices are fitted.
    """

    tokens: Amount
    reference_nll: float | None
    runtime_nll: float | None
    errors: Counts = ()
    relative: Number | None
    behind: Amount = 0


class Verification(Struct, kw_only=True):
    """A verification of a bundle.

    Attributes:
        passed: True if no gate failed.
        model_id: the bundle's model id; "" in older files.
        backend: the backend that ran the bundle.
        precision: the precision whose limits were used.
        reference: the reference with which the bundle was compared.
        gates: the judged numbers, in the order of the limits' table.
        kl: None for a model without log-probabilities.
        spread: None if there are no chains, and in older files.
        chains: the chains that ran.
        text: None if no text was read.
        sensitivity: for quantised weights, the divergence in nats that quantising only one layer causes, by layer.
    """

    passed: bool
    model_id: Word = ""
    backend: Word
    precision: Word
    reference: Word = ""
    gates: Annotated[tuple[Gate, ...], Meta(max_length=1000)]
    kl: Divergence | None = None
    spread: Spread | None = None
    chains: Annotated[tuple[Chain, ...], Meta(max_length=1000)]
    text: Text | None = None
    sensitivity: dict[Word, float | None] = {}


class _OlderChain(Chain):
    """A chain in the form that version 0.8 wrote for a Transformer-XL, or in today's form."""

    max_logprobs: Number | None = None
    max_memory: Number | None = None
    mean_logprobs: Values | None = None
    max_per_segment: Values | None = None

    def in_one_form(self) -> Chain:
        """Convert the chain to today's form."""
        chain = Chain(**{name: getattr(self, name) for name in Chain.__struct_fields__})
        if self.mean_logprobs is not None:
            most = self.max_per_segment or []
            known = Tensor(nats=True, largest=self.max_logprobs, mean=self.mean_logprobs, most=most)
            chain.outputs = {LOGPROBS: known, **chain.outputs}
            chain.states = {MEMORY: Tensor(largest=self.max_memory), **chain.states}
        return chain


class _Read(Verification, kw_only=True):
    chains: Annotated[tuple[_OlderChain, ...], Meta(max_length=1000)]


def decode_verification(data: bytes) -> Verification:
    """Decode a verification of this or an older version from its JSON.

    Raises:
        ValueError: the document is too long, not JSON, or of a different structure; the message is one line.
    """
    read = decode_document(data, _Read)
    verification = Verification(**{name: getattr(read, name) for name in Verification.__struct_fields__})
    verification.chains = tuple(chain.in_one_form() for chain in read.chains)
    return verification


def check_verification(found: Verification) -> None:
    """Refuse a verification that contradicts itself, because a page must not claim what its numbers do not show.

    Raises:
        ValueError: a gate, the result or a chain does not follow from its numbers.
    """
    for gate in found.gates:
        reached = gate.value is not None and gate.limit is not None and gate.value <= gate.limit
        if gate.passed is not None and gate.limit is not None and gate.passed != reached:
            raise ValueError(f"gate {short(gate.name, 80)!r} does not follow from its value and its limit")
    if found.passed != all(gate.passed is not False for gate in found.gates):
        raise ValueError(f"passed is {str(found.passed).lower()}, and its gates say otherwise")
    for chain in found.chains:
        if chain.agreeing > chain.decided:
            raise ValueError(f"chain {short(chain.name, 80)!r} agrees at more positions than were decided")
    spread = found.spread
    if spread is None:
        return
    histograms = [(spread.edges, errors.counts) for errors in spread.errors.values()]
    histograms += [] if spread.kl is None else [(spread.kl_edges, spread.kl)]
    histograms += [(spread.edges, found.text.errors)] if found.text and found.text.errors else []
    if any(len(counts) != len(edges) + 1 or list(edges) != sorted(set(edges)) for edges, counts in histograms):
        raise ValueError("the counts of its spread do not fit their edges")
    ranks = spread.ranks
    if ranks and (
        any(not number.isascii() or not number.isdecimal() or len(number) > 4 for number in ranks.within)
        or any(count > ranks.positions for count in ranks.within.values())
        or ranks.shared > ranks.positions * ranks.best
    ):
        raise ValueError("the ranks of its spread do not fit their positions")
