"""The tables of every bundle, for any model family: inputs, outputs, states, programs, files.

A program's graph has exactly the inputs and outputs in the program's row. A state is a tensor that a step hands to the
next step; it has one row in the state table for each update rule.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from txl_runtime.bundle.axes import Axes

UPDATE_RULES = ("ring", "rolled", "replace")
"""Ways in which a step updates the state, in the order in which `load` prefers them: a ring is faster than rolling."""

_RULES = Meta(extra_json_schema={"enum": [*UPDATE_RULES]})
"""Values for the published JSON schema only. The runtime refuses other rules and kinds in `agreement`, with messages of
its own.
"""
_KINDS = Meta(extra_json_schema={"pattern": r"^(step|logprobs|hidden|head|tail\.[1-9][0-9]*|attention)$"})
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
"""A size or number of at least 1 that fits into 32 bits."""
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""An index or number from 0 on that fits into 32 bits."""
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A number of bytes or values that fits into 64 bits."""
AXES = Meta(max_length=32)
"""Maximum number of axes of a shape, 32: NumPy 1 allows no more."""
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
"""A SHA-256 as 64 hexadecimal digits."""
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
"""Number format of the weights: 16 or 32 bits of floating point, or quantised integers."""
Floating = Literal["float32", "float16", "bfloat16"]
"""Types of floating-point values, e.g. of memory rows."""
DType = Literal["bool", "int32", "float32", "float16", "bfloat16"]
"""Types that tensors of graphs may have."""
STATE_DTYPES: dict[str, Floating] = {"fp16": "float16", "bf16": "bfloat16"}
"""Type of memory rows for each precision; float32 for all precisions that are not listed."""
BYTES = {"bool": 1, "int8": 1, "float8e4m3fn": 1, "float16": 2, "bfloat16": 2}
"""Bytes of a value for each type; 4 for all types that are not listed."""


class TensorSpec(Struct, frozen=True, kw_only=True):
    """An input or output of a graph. In the shape, "rows" is an open size; 0 is the size of a state without rows."""

    name: str
    dtype: DType
    shape: Annotated[tuple[Index | Literal["rows"], ...], AXES]

    @property
    def fixed(self) -> tuple[int, ...]:
        """The shape of a tensor whose sizes are all numbers."""
        return tuple(int(size) for size in self.shape)


def tensor_bytes(spec: TensorSpec) -> int:
    """Return the number of bytes of a tensor of fixed shape: 24 for float32 [2, 3]."""
    return math.prod(spec.fixed) * BYTES.get(spec.dtype, 4)


class Counter(Struct, frozen=True, kw_only=True):
    """A count per sequence that the runtime keeps: its first value and its largest value."""

    start: Index
    most: Index


class Counting(Counter, frozen=True, kw_only=True):
    """A count that a step reads, and the rule by which it changes after each segment.

    Attributes:
        start: value before the first segment.
        most: the number `most` in the formulas of `over`.
        over: "stay": the count becomes min(value + valid, most). "wrap": it becomes (value + valid) mod most.
    """

    over: Literal["stay", "wrap"]


class Input(Struct, frozen=True, kw_only=True, dict=True):
    """An input that a step reads besides its state; all programs share this table.

    Attributes:
        name: name of the graphs' input.
        dtype: type of the values.
        shape: "B" is the batch size, "L" the program's segment length plus `lookahead`, e.g. ["B", "L", 80].
        role: "tokens": ids 0 … vocab-1. "feature": any values. "valid": number of positions that count, int32 [B]; 0
            leaves a sequence idle, and the graph returns the sequence's state unchanged. "fill", "head": counters of
            memory rows and of a ring. "targets": ids whose likelihood is computed; only engines have programs that read
            them.
        vocab: number of token ids; for tokens only.
        lookahead: number of positions after the segment that the step also reads and that the next step reads again.
        counter: for "fill" and "head": the rule by which the counter changes, as `derived` computes it.
        beyond: for "valid": its value for the B - b sequences that a stream of b sequences does not have: "zero", or
            the "largest" value among the stream's sequences (`derived`).
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
        """The axes of sequences and positions."""
        return Axes(self.shape, self.lookahead)

    def sizes(self, batch_size: int, length: int) -> tuple[int, ...]:
        """Return the shape in a program of this batch size and segment length, e.g. (2, 8, 80) of ["B", "L", 80]."""
        return self.axes.sizes(batch_size, length)


class Output(Struct, frozen=True, kw_only=True, dict=True):
    """An output that a step returns besides its state; all programs share this table.

    Attributes:
        name: name of the graphs' output.
        dtype: type of the values.
        shape: as in `Input.shape`, without lookahead.
        role: "logprobs": natural log-probabilities of the next token. "hidden", "feature", "value" or any other word is
            only a label for people; the runtime treats all of them alike.
        clusters: for log-probabilities: token id ranges [first, last) that the programs "head" and "tail.<c>" compute;
            one range if the softmax has only a head, empty if there are no such programs.
        width: for log-probabilities: width of the feature rows that the programs "head" and "tail.<c>" read.
        cluster_columns: for log-probabilities: the columns of program "head" that hold the log-probability of cluster
            1, 2, … (`derived`).
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
        """The axes of sequences and positions."""
        return Axes(self.shape)

    def sizes(self, batch_size: int, length: int) -> tuple[int, ...]:
        """Return the shape in a program of this batch size and segment length, e.g. (2, 8, 256) of ["B", "L", 256]."""
        return self.axes.sizes(batch_size, length)


class StateTensor(Struct, frozen=True, kw_only=True, dict=True):
    """A tensor of the recurrent state, as the programs of one update rule read and return it.

    Attributes:
        name: the name in `Stream.state()`, e.g. "layers.00.key".
        input, output: the names in the graphs. Sorting either side gives the same order; no name is a prefix of
            another.
        dtype: type of the values.
        shape: the sizes, with the largest number of rows if that number grows.
        batch_axis: the axis with one entry per sequence; null for a tensor that all sequences share.
        row_axis: the axis of memory rows, oldest first; null if there is none.
        rows: smallest and largest number of rows, if a step may return a different number of rows than it read. A state
            starts with the smallest. Null if the number is fixed.
        absent: whether the tensor does not exist before the first step.
        initial: a sequence's first value: a number, or the name of a tensor of the weight file. For "rolled" and "ring"
            that tensor has the shape of one row; for "replace" it broadcasts to the shape without the batch axis. Null
            for zeros.
        update: "replace": the graph returns the whole new tensor. "rolled": the graph returns all memory rows, the
            filled ones last. "ring": rows are in slots 0 … slots-1, the next row goes to slot `head`, and the rows
            after the last slot are for spilling. The table has one row per tensor and update rule, under the same name.
        slots: number of slots of a ring.
        spill: for a ring: number of rows after the last slot into which a segment may write; after the step they are
            copied to the first slots (`derived`).
        in_place: whether a program's input and output are the same buffer, as for a ring (`derived`).
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
        """The axes of sequences ("B") and of memory rows ("L")."""
        letters = {self.batch_axis: "B", self.row_axis: "L"}
        return Axes([letters.get(axis, size) for axis, size in enumerate(self.shape)])

    @property
    def counted(self) -> bool:
        """True if the runtime counts the tensor's memory rows: update rule "ring" or "rolled"."""
        return self.update != "replace"

    @cached_property
    def taken(self) -> Axes:
        """The axes of the array that `Stream.state()` returns: [b, rows, ...] for memory, else the tensor's axes."""
        return Axes(("B", "L", *self.row_shape)) if self.counted else self.axes

    @property
    def taken_dtype(self) -> DType:
        """The type of the array that `Stream.state()` returns: float32 for memory, else the tensor's own type."""
        return "float32" if self.counted else self.dtype

    @property
    def row_counts(self) -> tuple[int, int]:
        """The pair (smallest, largest) number of rows; (1, 1) for a state without rows, as `Axes.length` counts it."""
        return self.rows or (1 if self.row_axis is None else self.shape[self.row_axis],) * 2

    def values(self, rows: int) -> int:
        """Return the largest number of values that a sequence has in the tensor, with `rows` rows if it is memory."""
        return rows * math.prod(self.row_shape) if self.counted else math.prod(self.sequence_shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one memory row of one sequence."""
        return tuple(size for axis, size in enumerate(self.shape) if axis not in (self.batch_axis, self.row_axis))

    @property
    def sequence_shape(self) -> tuple[int, ...]:
        """The shape of one sequence's part; if sequences share the tensor, its whole shape."""
        return tuple(size for axis, size in enumerate(self.shape) if axis != self.batch_axis)


class Program(Struct, frozen=True, kw_only=True):
    """A graph for one kind of result, one segment length and one update rule.

    Attributes:
        name: unique name of the program.
        kind: the result. "step": all outputs of a segment. "logprobs": log-probabilities of a segment. "hidden": the
            feature rows of a segment that the softmax reads. "head", "tail.<c>": parts of the softmax, for any number
            of feature rows. "attention": in bundles of version 0.8, ignored. Only engines have "last"
            (log-probabilities after each sequence's last valid position), "next" (the best words of each part there)
            and "score" (log-probabilities of targets).
        segment_length: number of positions of a segment; 0 for the softmax programs, which have no segments.
        update: how the program changes the state, one of `UPDATE_RULES`; "none" if it returns no state.
        file: name of the graph's file. Programs that differ only in segment length may share a file.
        inputs, outputs: the graph's inputs and outputs, in its order. For a state that grows, several programs of one
            length may each read a different number of rows. A state that is not among the inputs must be absent or
            without rows.
        open_batch: whether the graph runs any number of sequences up to the batch size in the shapes here.
        opset: versions of the operator sets that the graph imports, e.g. {"ai.onnx": 18, "com.microsoft": 1}; "ai.onnx"
            stands for ONNX's own set, whose name is empty in a graph. Empty if not recorded, as in format 2.0.
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
        """Return the row as JSON, for the graph's metadata; without `opset`, which the graph itself contains."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "opset"}
        return msgspec.json.encode(fields).decode()


class FileRecord(Struct, frozen=True, kw_only=True):
    """A file's size in bytes and its SHA-256 as hexadecimal digits."""

    size: Size
    sha256: Sha256


class Tables:
    """A base class of the manifest with facts that follow from its tables."""

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
    stepwise: int | None

    @cached_property
    def segment_lengths(self) -> tuple[int, ...]:
        """Segment lengths of the programs, each once, largest first."""
        return tuple(sorted({p.segment_length for p in self.programs if p.segment_length}, reverse=True))

    @property
    def updates(self) -> tuple[str, ...]:
        """The update rules for which the bundle has programs, the fastest first."""
        updates = {program.update for program in self.programs}
        return tuple(rule for rule in UPDATE_RULES if rule in updates)

    def states_of(self, update: str) -> tuple[StateTensor, ...]:
        """Return the states that programs of one update rule carry: its memory rows and all "replace" tensors."""
        rules = (update, "replace") if update in self.updates else (update,)
        return tuple(state for state in self.states if state.update in rules)

    @property
    def interface(self) -> tuple[Input | Output, ...]:
        """The inputs and outputs of a step besides its state."""
        return (*self.inputs, *self.outputs)

    @cached_property
    def given(self) -> tuple[Input, ...]:
        """The inputs that callers pass (tokens and features); the runtime sets all others."""
        return tuple(entry for entry in self.inputs if entry.role in ("tokens", "feature"))

    @cached_property
    def tokens(self) -> Input | None:
        """The input of token ids, if it is the only input that callers pass; else None."""
        read = self.given
        return read[0] if len(read) == 1 and read[0].role == "tokens" else None

    @cached_property
    def logprobs(self) -> Output | None:
        """The output of log-probabilities; None if there is none."""
        return next((output for output in self.outputs if output.role == "logprobs"), None)

    @property
    def vocab_size(self) -> int:
        """The number of token ids; 0 for a model without tokens."""
        return next((entry.vocab for entry in self.inputs if entry.vocab), 0)

    @property
    def clusters(self) -> tuple[tuple[int, int], ...]:
        """Token id ranges [first, last) of the softmax programs; empty without such programs."""
        return () if self.logprobs is None else self.logprobs.clusters

    @property
    def memory_length(self) -> int:
        """The largest number of memory rows that the runtime counts; 0 for a model without memory rows."""
        return self.counters["fill"].most if "fill" in self.counters else 0

    @property
    def fresh_fill(self) -> int:
        """The number of memory rows that exist before the first segment."""
        return self.counters["fill"].start if "fill" in self.counters else 0


def axes_of(tables: Tables, program: Program) -> dict[str, Axes]:
    """Return the axes of every tensor that a program of segments may have, by name."""
    axes = {entry.name: entry.axes for entry in tables.interface}
    if program.kind != "step":  # "hidden" returns feature rows, which are not in the table of outputs
        result = program.outputs[0]
        axes[result.name] = Axes(("B", *(int(size) for size in result.shape[1:])))
    for state in tables.states_of(program.update):
        axes |= {state.input: state.axes, state.output: state.axes}
    return axes


def ring_slots(memory_length: int, segment_length: int) -> tuple[int, int]:
    """Return (slots of a ring, rows of its tensor): (6, 8) for memory length 4 and segment length 2.

    There are at least memory + segment length slots, so that a segment's padding overwrites no memory. The rows after
    the slots are for spilling; a segment of one token cannot spill, and its ring has no such rows.
    """
    ring = memory_length + segment_length
    return ring, ring + (segment_length if segment_length > 1 else 0)
