"""The tables that every bundle has, whatever its model: tensors, states, programs, files.

A program's graph has exactly the inputs and outputs that its row says. A state is what a step carries: each update rule
has its own tensors of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

UPDATE_RULES = ("ring", "rolled")
"""How a step updates the memory, the fastest first."""

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
Floating = Literal["float32", "float16", "bfloat16"]
DType = Literal["int32", "float32", "float16", "bfloat16"]
STATE_DTYPES: dict[str, Floating] = {"fp16": "float16", "bf16": "bfloat16"}
"""What memory is kept in, where it is not float32."""


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One graph input or output; "rows" in a shape is any number of them."""

    name: str
    dtype: DType
    shape: tuple[Count | Literal["rows"], ...]

    @property
    def fixed(self) -> tuple[int, ...]:
        """The shape of a tensor that leaves no size open."""
        return tuple(int(size) for size in self.shape)


class StateTensor(Struct, frozen=True, kw_only=True):
    """One tensor of the recurrent state, as the programs see it.

    Attributes:
        name: as `Stream.memory()` calls it, e.g. "layers.00.key".
        input, output: the names in the graphs; they sort alike, and none is a prefix of another.
        shape: with the batch first; `axis` is the one whose rows are memory rows, oldest first.
        initial: the weight file's tensor that every row starts as; None for zeros.
        update: "rolled": the graph returns the whole new memory; filled rows stand last. "ring": rows stand in slots
            0 … slots-1, the next one goes to slot `head`; what lies behind those slots is for rows to spill into.
            A tensor of one name stands in the table once for each rule that the bundle has programs of.
        slots: of the ring.
    """

    name: str
    input: str
    output: str
    dtype: Floating = "float32"
    shape: tuple[Count, ...]
    axis: Index
    initial: str | None = None
    update: str = "rolled"
    slots: Count | None = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of one sequence."""
        return tuple(size for axis, size in enumerate(self.shape) if axis not in (0, self.axis))


class Program(Struct, frozen=True, kw_only=True):
    """One graph: a kind of output, a segment length, an update rule.

    Attributes:
        name: of the program; unique.
        kind: what it computes. "logprobs": log-probabilities of a segment. "hidden": what the softmax takes, of a
            segment. "head", "tail.<c>": parts of the softmax, of any number of rows (`softmax`). Only
            engines have "last", log-probabilities after a stream's last valid row, and "score", those of targets.
        segment_length: L; 0 for the softmax programs, which know no segments.
        update: what becomes of the memory, "rolled" or "ring"; "none" for the softmax programs.
        file: the graph. Programs that differ in L alone may share one.
        inputs, outputs: of the graph, in its order.
    """

    name: str
    kind: str
    segment_length: Index
    update: str
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class FileRecord(Struct, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 of a file in the bundle."""

    size: Size
    sha256: Sha256


class Tables:
    """What can be read off the tables of a manifest."""

    __slots__ = ()
    batch_size: int
    states: tuple[StateTensor, ...]
    programs: tuple[Program, ...]

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """L of the programs, largest first."""
        return tuple(sorted({p.segment_length for p in self.programs if p.segment_length}, reverse=True))

    @property
    def updates(self) -> tuple[str, ...]:
        """The update rules it has programs of, the fastest first."""
        found = {program.update for program in self.programs}
        return tuple(rule for rule in UPDATE_RULES if rule in found)

    def states_of(self, update: str) -> tuple[StateTensor, ...]:
        """The state as the programs of one update rule see it."""
        return tuple(state for state in self.states if state.update == update)


def ring_slots(memory_length: int, segment_length: int) -> tuple[int, int]:
    """R, the slots of a ring, and C, those with the ones to spill into, for segments of at most `segment_length`.

    R >= M + L, so that a segment's padding overwrites no memory. A segment of one token cannot spill.
    """
    ring = memory_length + segment_length
    return ring, ring + (segment_length if segment_length > 1 else 0)
