"""What a user says of a model of their own: its module, and its inputs, states and outputs by name.

Importing this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from txl_runtime.bundle.axes import Axes

Shape: TypeAlias = tuple[int | str, ...]
"""Whole numbers, "B" for the batch size and "L" for the segment length."""
Named: TypeAlias = dict[str, Any]
"""Tensors by name; a state that is absent is None."""
StepFunction: TypeAlias = Callable[[Any, Named, Named], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""(module, inputs, states) → (outputs, states)."""

INPUT_DTYPES = ("float32", "int32", "int64", "bool")
STATE_DTYPES = ("float32", "int32", "int64", "bool")
VALID = "valid"
"""The name of the input that counts rows, where the module takes one."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a step.

    Attributes:
        name: how callers of the runtime name it.
        shape: e.g. ("B", "L", 84); without "L" the step takes one position at a time.
        dtype: what the module takes: float32, int32, int64 or bool. The bundle has int32 for int64.
        tokens: V, for token ids 0 … V-1; the module takes int64 then, unless `dtype` says int32.
        lookahead: positions behind the segment that the module reads as well: it is given L + lookahead of them, and
            the next segment begins L later.
    """

    name: str
    shape: Shape
    dtype: str = "float32"
    tokens: int | None = None
    lookahead: int = 0

    @cached_property
    def axes(self) -> Axes:
        """Where sequences and positions stand."""
        return Axes(self.shape, self.lookahead)

    @property
    def module_dtype(self) -> str:
        """What the module is given."""
        return "int64" if self.tokens is not None and self.dtype == "float32" else self.dtype


@dataclass(frozen=True)
class StateSpec:
    """One tensor that a step carries to the next.

    Attributes:
        name: how callers of the runtime name it.
        shape: e.g. (layers, "B", 64); without "B" all sequences share it.
        dtype: what the module takes and returns: float32, int32, int64 or bool.
        initial: what it starts as: a number, a tensor that broadcasts over the shape without "B", the name of one of
            the module's parameters or buffers, or None where the first step has no such tensor and the module is given
            None in its place. Left out: what `attribute` holds, and zeros without one.
        attribute: where the module keeps it, e.g. "layers.0.memory": it is set there before the call and read there
            afterwards. None: it is an argument and a result.
        grows: the axis along which it starts with 0 rows and ends with as many as `shape` says.
    """

    name: str
    shape: Shape
    dtype: str = "float32"
    initial: Any = ...
    attribute: str | None = None
    grows: int | None = None

    @cached_property
    def axes(self) -> Axes:
        """Where sequences stand."""
        return Axes(self.shape)


@dataclass(frozen=True)
class OutputSpec:
    """One output of a step.

    Attributes:
        name: how callers of the runtime name it.
        shape: e.g. ("B", "L", 5); None for batch first and "L" second where the values have that size.
        role: "logits" become log-probabilities of the next token in the bundle; "logprobs" are already. Every other
            word is kept for readers of the bundle.
    """

    name: str
    shape: Shape | None = None
    role: str | None = None

    @cached_property
    def axes(self) -> Axes:
        """Where sequences and positions stand; without a shape only the sequences are known, which stand first."""
        return Axes(("B",) if self.shape is None else self.shape)


@dataclass(frozen=True)
class StepSpec:
    """A model of the user's own: `module(*inputs, *states)` returns `(*outputs, *states)`.

    Attributes:
        module: a torch.nn.Module with its weights.
        inputs, states: in the order of its arguments. States that have an `attribute` are no arguments.
        outputs: in the order of its results, before the states; specs, or just names.
        step: f(module, inputs, states) → (outputs, states) by name, for a module that is called in another way.
        lengths: whether the module takes `valid`, int32 [B], behind its inputs and states (an input "valid" of `step`):
            rows of the segment that count.
        vocabulary: file with the vocabulary of its tokens, or the vocabulary itself, such as {"kind": "bytes"}.
        samples: real inputs to verify on, by name: as the input's shape, with any number at "B" and any length, of at
            least a segment, at "L". Random ones without.
        segment_lengths: every L to export where no other is asked for, such as the one that a model was trained with;
            64 and 1 without, as far as the module takes them.
    """

    module: Any
    inputs: Sequence[InputSpec]
    states: Sequence[StateSpec]
    outputs: Sequence[OutputSpec | str]
    step: StepFunction | None = None
    lengths: bool = False
    vocabulary: str | Path | Mapping[str, Any] | None = None
    samples: Mapping[str, Any] | None = None
    segment_lengths: Sequence[int] = ()
