"""The tables that every bundle has, whatever its model: inputs, outputs, states, programs, files.

A program's graph has exactly the inputs and outputs that its row says. A state is what a step carries: each update rule
has its own tensors of it. Nothing here knows a model family.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from txl_runtime.bundle.axes import Axes

UPDATE_RULES = ("ring", "rolled", "replace")
"""How a step updates the state, in the order in which `load` prefers them; a ring is faster than what is rolled."""

_RULES = Meta(extra_json_schema={"enum": [*UPDATE_RULES]})
"""For readers of the schema; this one refuses other rules and kinds in sentences of its own (`agreement`)."""
_KINDS = Meta(extra_json_schema={"pattern": r"^(step|logprobs|hidden|head|tail\.[1-9][0-9]*|attention)$"})
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
AXES = Meta(max_length=32)
"""Of a shape; NumPy has no more."""
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
Floating = Literal["float32", "float16", "bfloat16"]
DType = Literal["bool", "int32", "float32", "float16", "bfloat16"]
STATE_DTYPES: dict[str, Floating] = {"fp16": "float16", "bf16": "bfloat16"}
"""What memory is kept in, where it is not float32."""
BYTES = {"bool": 1, "float16": 2, "bfloat16": 2}
"""Bytes of a value; all other types have four."""


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One graph input or output; "rows" in a shape is any number of them. A state may come back without any rows."""

    name: str
    dtype: DType
    shape: Annotated[tuple[Index | Literal["rows"], ...], AXES]

    @property
    def fixed(self) -> tuple[int, ...]:
        """The shape of a tensor that leaves no size open."""
        return tuple(int(size) for size in self.shape)


class Counter(Struct, frozen=True, kw_only=True):
    """A number per sequence that the runtime keeps: what it starts as, and the most it can be."""

    start: Index
    most: Index


class Counting(Counter, frozen=True, kw_only=True):
    """How a count that a step reads goes on with each segment.

    Attributes:
        start: what it is before the first segment.
        most: a bound that `over` tells of.
        over: "stay": it becomes min(value + valid, most). "wrap": it becomes (value + valid) mod most.
    """

    over: Literal["stay", "wrap"]


class Input(Struct, frozen=True, kw_only=True, dict=True):
    """What a step reads beside its state, whatever the program.

    Attributes:
        name: of the graphs' input.
        dtype: of its values.
        shape: "B" is the batch size, "L" the program's segment length, to which a program adds `lookahead`.
        role: "tokens": ids 0 … vocab-1. "feature": any values. "valid": positions of the segment that count, int32
            [B]; 0 leaves a sequence idle, and the graph returns its state as it was. "fill", "head": counters of memory
            rows and of a ring. "targets": ids whose likelihood is asked for; only engines have programs that read them.
        vocab: V of tokens.
        lookahead: positions behind the segment that the step sees and that the next step sees again.
        counter: of "fill" and "head": how it goes on. `derived` says what it has to be, and so of `beyond`.
        beyond: of "valid": what it is for the sequences that a stream of b has not in a program of B: "zero", or the
            "largest" of the stream's own.
    """

    name: str
    dtype: DType
    shape: Annotated[tuple[Count | Literal["B", "L"], ...], AXES]
    role: Literal["tokens", "feature", "valid", "fill", "head", "targets"]
    vocab: Count | None = None
    lookahead: Index = 0
    counter: Counting | None = None
    beyond: Literal["zero", "largest"] | None = None

    @cached_property
    def axes(self) -> Axes:
        """Where sequences and positions stand."""
        return Axes(self.shape, self.lookahead)

    def sizes(self, batch_size: int, length: int) -> tuple[int, ...]:
        """The shape in a program of segments of `length`."""
        return self.axes.sizes(batch_size, length)


class Output(Struct, frozen=True, kw_only=True, dict=True):
    """What a step returns beside its state.

    Attributes:
        name: of the graphs' output.
        dtype: of its values.
        shape: as `Input.shape`.
        role: "logprobs": natural log-probabilities of the next token. "hidden", "feature", "value" or any other word
            says what else it is; only log-probabilities mean something to the runtime.
        clusters: of log-probabilities: token id ranges [first, last) that the programs "head" and "tail.<c>" compute;
            one range where a softmax has a head alone, none where there are no such programs.
        width: of log-probabilities: how wide the rows are that those programs take.
        cluster_columns: of log-probabilities: the columns of program "head" that hold the log-probability of cluster 1,
            2, … (`derived`).
    """

    name: str
    dtype: DType
    shape: Annotated[tuple[Count | Literal["B", "L"], ...], AXES]
    role: str = "feature"
    clusters: tuple[tuple[Index, Count], ...] = ()
    width: Count | None = None
    cluster_columns: tuple[Index, ...] = ()

    @cached_property
    def axes(self) -> Axes:
        """Where sequences and positions stand."""
        return Axes(self.shape)

    def sizes(self, batch_size: int, length: int) -> tuple[int, ...]:
        """The shape in a program of segments of `length`."""
        return self.axes.sizes(batch_size, length)


class StateTensor(Struct, frozen=True, kw_only=True, dict=True):
    """One tensor of the recurrent state, as the programs see it.

    Attributes:
        name: as `Stream.state()` calls it, e.g. "layers.00.key".
        input, output: the names in the graphs; they sort alike, and none is a prefix of another.
        dtype: of its values.
        shape: its sizes; where its rows become more from step to step, with the most that there can be.
        batch_axis: the axis with one entry per sequence; None for a tensor that all sequences share.
        row_axis: the axis along which memory rows stand, oldest first; None where the runtime knows of none.
        rows: the fewest and the most rows, where a step may return another number of them than it was given. A state
            starts with the fewest. None where their number is fixed.
        absent: whether there is no such tensor before the first step.
        initial: what a sequence starts as: a number, or a tensor of the weight file, which broadcasts: over the
            row's shape where there are memory rows that the runtime knows, else over the shape without the batch.
            None for zeros.
        update: "replace": the graph returns the whole new tensor. "rolled": it returns all memory rows, the filled
            ones last. "ring": rows stand in slots 0 … slots-1, the next one goes to slot `head`; what lies behind
            those slots is for rows to spill into. A tensor of one name stands in the table once for each rule that the
            bundle has programs of.
        slots: of the ring.
        spill: of a ring: rows behind its slots into which a segment may write; after the step they are copied to the
            first slots (`derived`).
        in_place: whether a program's input and output are one buffer, as of a ring (`derived`).
    """

    name: str
    input: str
    output: str
    dtype: DType = "float32"
    shape: Annotated[tuple[Count, ...], AXES]
    batch_axis: Index | None = 0
    row_axis: Index | None = None
    rows: tuple[Index, Count] | None = None
    absent: bool = False
    initial: float | str | None = None
    update: Annotated[str, _RULES]
    slots: Count | None = None
    spill: Index = 0
    in_place: bool = False

    @cached_property
    def axes(self) -> Axes:
        """Where sequences stand, and memory rows in place of positions."""
        letters = {self.batch_axis: "B", self.row_axis: "L"}
        return Axes([letters.get(axis, size) for axis, size in enumerate(self.shape)])

    @property
    def counted(self) -> bool:
        """Whether the runtime knows its memory rows and counts them."""
        return self.update != "replace"

    @cached_property
    def taken(self) -> Axes:
        """The axes of what streams hand out of it: memory rows as [b, rows, ...], anything else as it is."""
        return Axes(("B", "L", *self.row_shape)) if self.counted else self.axes

    @property
    def taken_dtype(self) -> DType:
        """The type of what streams hand out of it."""
        return "float32" if self.counted else self.dtype

    @property
    def row_counts(self) -> tuple[int, int]:
        """The fewest and the most rows; 1 of a state that has none, as `Axes.length` says."""
        return self.rows or (1 if self.row_axis is None else self.shape[self.row_axis],) * 2

    def values(self, rows: int) -> int:
        """How many values one sequence has of it at most, where so many memory rows exist."""
        return rows * math.prod(self.row_shape) if self.counted else math.prod(self.sequence_shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of one sequence."""
        return tuple(size for axis, size in enumerate(self.shape) if axis not in (self.batch_axis, self.row_axis))

    @property
    def sequence_shape(self) -> tuple[int, ...]:
        """The shape of one sequence's part; all of a tensor that is shared."""
        return tuple(size for axis, size in enumerate(self.shape) if axis != self.batch_axis)


class Program(Struct, frozen=True, kw_only=True):
    """One graph: a kind of output, a segment length, an update rule.

    Attributes:
        name: of the program; unique.
        kind: what it computes. "step": all outputs of a segment. "logprobs": log-probabilities of a segment. "hidden":
            what the softmax takes, of a segment. "head", "tail.<c>": parts of the softmax, of any number of rows
            (`softmax`). "attention": of bundles of 0.8, ignored. Only engines have "last", log-probabilities after a
            stream's last valid row, "next", the same and what a draw mostly needs of them, and "score", those of
            targets.
        segment_length: L; 0 for the softmax programs, which know no segments.
        update: what becomes of the state, one of `UPDATE_RULES`; "none" where the program returns none.
        file: the graph. Programs that differ in L alone may share one.
        inputs, outputs: of the graph, in its order. Of one state, a program takes the shape that it says: several
            programs of one length serve a state that grows. A state that is not among the inputs has to be absent or
            without any rows.
        open_batch: whether the graph runs any number of sequences up to B, the size that the tables have.
        opset: versions of the operators that the graph imports, such as {"ai.onnx": 18, "com.microsoft": 1}; "ai.onnx"
            stands for ONNX's own, whose domain is empty in a graph. Empty where it is not said, as in format 2.0.
    """

    name: str
    kind: Annotated[str, _KINDS]
    segment_length: Index
    update: Annotated[str, Meta(extra_json_schema={"enum": [*UPDATE_RULES, "none"]})]
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    open_batch: bool = False
    opset: dict[str, Count] = msgspec.field(default_factory=dict)

    def note(self) -> str:
        """What a graph has of its program among its notes: all but what it imports, which it says itself."""
        said = {name: getattr(self, name) for name in self.__struct_fields__ if name != "opset"}
        return msgspec.json.encode(said).decode()


class FileRecord(Struct, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 of a file in the bundle."""

    size: Size
    sha256: Sha256


class Tables:
    """What can be read off the tables of a manifest."""

    __slots__ = ()
    batch_size: int
    batch_sizes: tuple[int, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    states: tuple[StateTensor, ...]
    programs: tuple[Program, ...]
    counters: dict[str, Counter]
    streams: Literal["independent", "lockstep"]
    joint: bool
    lengths: Literal["exact", "valid"]
    commits: Literal["rows", "segment"]
    boundary_token: int | None

    @cached_property
    def segment_lengths(self) -> tuple[int, ...]:
        """L of the programs, largest first."""
        return tuple(sorted({p.segment_length for p in self.programs if p.segment_length}, reverse=True))

    @property
    def updates(self) -> tuple[str, ...]:
        """The update rules it has programs of, the fastest first."""
        found = {program.update for program in self.programs}
        return tuple(rule for rule in UPDATE_RULES if rule in found)

    def states_of(self, update: str) -> tuple[StateTensor, ...]:
        """The state as the programs of one update rule see it; what is replaced may stand beside memory rows."""
        rules = (update, "replace") if update in self.updates else (update,)
        return tuple(state for state in self.states if state.update in rules)

    @property
    def interface(self) -> tuple[Input | Output, ...]:
        """What a step reads and returns beside its state."""
        return (*self.inputs, *self.outputs)

    @cached_property
    def given(self) -> tuple[Input, ...]:
        """The inputs that callers give; counts are the runtime's."""
        return tuple(entry for entry in self.inputs if entry.role in ("tokens", "feature"))

    @cached_property
    def tokens(self) -> Input | None:
        """The input that takes token ids, if the model has one and no other input but counts."""
        read = self.given
        return read[0] if len(read) == 1 and read[0].role == "tokens" else None

    @cached_property
    def logprobs(self) -> Output | None:
        """The output of log-probabilities, if the model has one."""
        return next((output for output in self.outputs if output.role == "logprobs"), None)

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids; 0 for a model that reads none."""
        return next((entry.vocab for entry in self.inputs if entry.vocab), 0)

    @property
    def clusters(self) -> tuple[tuple[int, int], ...]:
        """Token id ranges [first, last) of the softmax's programs; none without such programs."""
        return () if self.logprobs is None else self.logprobs.clusters

    @property
    def memory_length(self) -> int:
        """M, memory rows that the runtime counts; 0 for a model without."""
        return self.counters["fill"].most if "fill" in self.counters else 0

    @property
    def fresh_fill(self) -> int:
        """Memory rows that exist before anything was seen."""
        return self.counters["fill"].start if "fill" in self.counters else 0


def axes_of(tables: Tables, program: Program) -> dict[str, Axes]:
    """Where sequences and positions stand in each tensor that a program of segments may have, by name."""
    axes = {entry.name: entry.axes for entry in tables.interface}
    if program.kind != "step":  # what the softmax takes is no output of the table
        result = program.outputs[0]
        axes[result.name] = Axes(("B", *(int(size) for size in result.shape[1:])))
    for state in tables.states_of(program.update):
        axes |= {state.input: state.axes, state.output: state.axes}
    return axes


def ring_slots(memory_length: int, segment_length: int) -> tuple[int, int]:
    """R, the slots of a ring, and C, those with the ones to spill into, for segments of at most `segment_length`.

    R >= M + L, so that a segment's padding overwrites no memory. A segment of one token cannot spill.
    """
    ring = memory_length + segment_length
    return ring, ring + (segment_length if segment_length > 1 else 0)
