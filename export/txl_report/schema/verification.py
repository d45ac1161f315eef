"""What a verification found, as a bundle's report.json and the output of `verify --json` hold it.

`Verification` is the whole document: its fields stand in the file under the same names and in the same order. A
verification that is computed builds it; limits hold where a file is read (`decode_verification`). A number that is
infinite or none is null in the file, and None once it was read.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import force_setattr

from txl_report.schema.reading import Amount, Number, Word, decode_document, short

Unit = Literal["nats", "relative", "values"]
"""Of an error: nats; relative to max(1, largest value of the reference so far); values that differ, of exact ones."""
Counts = Annotated[tuple[Amount, ...], Meta(max_length=64)]
"""Of every bin of a histogram: below its first edge, between each two, and from its last edge on."""
Edges = Annotated[tuple[Number, ...], Meta(max_length=63)]
Values = Annotated[list[Number | None], Meta(max_length=2_000_000)]
"""Of every segment."""
Names = Annotated[tuple[Word, ...], Meta(max_length=100_000)]

LOGPROBS, MEMORY = "logprobs", "memory"
"""The output and the state of a Transformer-XL's chain; version 0.8 wrote them without names."""

VOCABULARY = "vocabulary differing"
"""The gate on a bundle's words, its only one without numbers of the model."""


def as_size(value: float | None) -> float:
    """The size of an error; what a file has no number for was infinite or none."""
    return math.inf if value is None else value


class Gate(Struct, frozen=True):
    """One judged number.

    Attributes:
        name: what was judged.
        value: what was reached; None where nothing was measured or, of a gate that failed, where it was infinite.
        limit: the largest value that passes; None where there is none.
        passed: None where there was nothing to judge it on, or no limit to judge it by.
        verdict: "passed", "FAILED" or "not judged", as `passed` says, whatever a file has there.
    """

    name: Word
    value: float | None = None
    limit: Number | None = None
    passed: bool | None = None
    verdict: Word = ""

    def __post_init__(self) -> None:
        force_setattr(self, "verdict", {True: "passed", False: "FAILED", None: "not judged"}[self.passed])


class Tensor(Struct):
    """One output or state of a chain, compared with the reference's.

    Attributes:
        exact: whether its values are whole numbers or truths, which have to be equal.
        nats: whether they are log-probabilities, whose differences are not relative to anything.
        largest: largest |Δ| relative to max(1, largest |value| of the reference so far), of log-probabilities |Δ|; of
            exact values, how many differed.
        mean: per segment that was compared, the mean of that: the drift curve.
        most: per segment that was compared, the largest of that.
        shapes: segments in which the tensor had another shape than the reference's.
        scale: max(1, largest |value| of the reference); 1 of log-probabilities.
        reached: the largest value of the reference, of whole numbers.
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
        """Of its errors."""
        return "values" if self.exact else "nats" if self.nats else "relative"


class Chain(Struct):
    """One chain of segments.

    Attributes:
        name: what kind of segments.
        streams: sequences side by side.
        segments: segments run.
        positions: rows compared, of all segments and sequences.
        rows: per segment, rows compared.
        full_from: the first segment that met a full memory or state; None where none did, or nobody looked.
        agreeing, decided: positions where the best token agrees, of those that are no near-ties.
        outputs, states: what was compared, by name.
        every: states were compared after every segment, or after every so many and the last.
        targets: tokens that followed one in the same segment, where the model reads nothing but tokens.
        theirs, ours: the negative log-likelihood of those by the reference and by the bundle, in nats.
        filling: states that were not full when the chain ended, or had not been for as long again.
        counting: states of whole numbers that were still changing in one direction when the chain ended.
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
        """Everything that was compared."""
        return (*self.outputs.values(), *self.states.values())


class Divergence(Struct, frozen=True):
    """Kullback-Leibler divergence over all positions of all chains, in nats; None where it was infinite.

    Attributes:
        mean: of all positions.
        late: the 99.9 % quantile, "p99.9" in the file.
        most: the largest, "max" in the file.
    """

    mean: float | None
    late: float | None = field(name="p99.9")
    most: float | None = field(name="max")


class Errors(Struct, frozen=True):
    """How often a size of error occurred; the edges of its bins are those of the `Spread`."""

    unit: Unit
    counts: Counts


class Ranks(Struct, frozen=True):
    """Where the reference's best tokens stand in the bundle's order, near-ties included.

    Attributes:
        positions: how many were looked at.
        within: by a number of best tokens, in digits: the positions at which the reference's best token is among so
            many of the bundle's best.
        best: how many best tokens are compared by `shared`: 10, or all of a smaller vocabulary.
        shared: over all positions, how many of the reference's best tokens are among the bundle's.
    """

    positions: Annotated[int, Meta(ge=1, le=2**53)]
    within: Annotated[dict[str, Amount], Meta(max_length=16)]
    best: Annotated[int, Meta(ge=1, le=1000)]
    shared: Amount


class Spread(Struct, frozen=True):
    """How errors, divergence and agreement are spread over all chains.

    Attributes:
        ran_on: what the chains read: "random tokens", "the text", "random inputs", "real inputs".
        edges: between the bins of errors, one fewer than those.
        errors: of what was compared, by its name; states may be taken together.
        kl_edges: between the bins of `kl`.
        kl: of divergence, in nats; None for a model without log-probabilities.
        ranks: None for a model without log-probabilities.
    """

    ran_on: Word
    edges: Edges
    errors: dict[Word, Errors]
    kl_edges: Edges
    kl: Counts | None = None
    ranks: Ranks | None = None


class Text(Struct, frozen=True, kw_only=True):
    """One real text.

    Attributes:
        tokens: that were read.
        reference_nll, runtime_nll: mean negative log-likelihood per token, in nats.
        errors: how many tokens had an error of each size, by the edges of the `Spread`; none in older files.
        relative: |Δ perplexity| / perplexity of the reference.
    """

    tokens: Amount
    reference_nll: float | None
    runtime_nll: float | None
    errors: Counts = ()
    relative: Number | None


class Verification(Struct, kw_only=True):
    """One verification.

    Attributes:
        passed: whether no gate failed.
        model_id: of the bundle; "" in older files.
        backend: what ran the bundle.
        precision: it was judged by.
        reference: what it was compared with.
        gates: what was judged, in the order of the limits' table.
        kl: None for a model without log-probabilities.
        spread: None where there are no chains, and in older files.
        chains: what was run.
        text: None where no text was given.
        sensitivity: of quantised weights, the divergence in nats that each layer causes alone.
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
    """A Transformer-XL's chain as version 0.8 wrote it, or any chain."""

    max_logprobs: Number | None = None
    max_memory: Number | None = None
    mean_logprobs: Values | None = None
    max_per_segment: Values | None = None

    def in_one_form(self) -> Chain:
        """The chain of today."""
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
    """A verification of this or an older version, from its JSON.

    Raises:
        ValueError: it is too long, no JSON, of another structure, or contradicts itself; the message is one line.
    """
    read = decode_document(data, _Read)
    found = Verification(**{name: getattr(read, name) for name in Verification.__struct_fields__})
    found.chains = tuple(chain.in_one_form() for chain in read.chains)
    return found


def check_verification(found: Verification) -> None:
    """Refuse what contradicts itself: a page must not say what its numbers do not.

    Raises:
        ValueError: some part does not follow from another.
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
