"""Defines the specification that a user writes of a model: its module, and its inputs, states and outputs by name.

Importing this module needs no torch. A field of a wrong type is refused when the specification is made, with a
`UsageError` such as "InputSpec('x'): shape is 3, expected a tuple of …".
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

import msgspec
from msgspec import Meta
from txl_runtime.bundle.axes import Axes
from txl_runtime.errors import UsageError

Shape: TypeAlias = tuple[Annotated[int, Meta(ge=1)] | Annotated[str, Meta(pattern=r"^[BL]\Z")], ...]
"""A shape: whole numbers from 1, "B" for the batch size and "L" for the segment length."""
Named: TypeAlias = dict[str, Any]
"""Tensors by name; None for a state that is absent."""
StepFunction: TypeAlias = Callable[[Any, Named, Named], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""The user's function step(module, inputs, states) → (outputs, states), each a dictionary of tensors by name."""

VALID = "valid"
"""Name of the input int32 [B] with each sequence's number of valid positions, for modules that take it."""
LOGITS = ("logits", "logprobs")
"""Roles of an output that scores the next token."""
_WORD = r"^[A-Za-z_][A-Za-z0-9_.]*\Z"
_TAKEN = re.compile(rf"({VALID}|fill|head)\Z|state\.")
_Name = Annotated[str, Meta(pattern=_WORD, description="letters, digits, _ and . after a letter or _")]
_SHAPE = Meta(description="a tuple of whole numbers from 1 (int), 'B' and 'L'")
_Dtype = Annotated[str, Meta(pattern=r"^(float32|int32|int64|bool)\Z", description="float32, int32, int64 or bool")]
_Count = Annotated[int, Meta(ge=1)]


class _Typed:
    """Checks a dataclass's fields against their annotated types; the message says what is expected."""

    name: str
    axes: Any

    def __post_init__(self) -> None:
        for field, kind in get_type_hints(type(self), include_extras=True).items():
            for meta in getattr(kind, "__metadata__", ())[-1:]:
                try:
                    object.__setattr__(self, field, msgspec.convert(getattr(self, field), kind))
                except msgspec.ValidationError:
                    self._expect(field, False, meta.description)
        shape = list(getattr(self, "shape", None) or ())
        self._expect("shape", shape.count("B") < 2 and shape.count("L") < 2, "'B' and 'L' once at most")

    def _expect(self, field: str, right: object, expected: str, *found: object) -> None:
        if not right:
            whose = type(self).__name__ + (f"({self.name!r})" if hasattr(self, "name") else "")
            shown_value = reprlib.repr(found[0] if found else getattr(self, field))
            raise UsageError(f"{whose}: {field} is {shown_value}, expected {expected}")


@dataclass(frozen=True)
class InputSpec(_Typed):
    """One input of a step.

    Attributes:
        name: the name by which the runtime's callers give it.
        shape: e.g. ("B", "L", 84); without "L" the step takes one position at a time.
        dtype: the dtype that the module takes: float32, int32, int64 or bool. The bundle stores int64 as int32.
        tokens: the number V of token ids 0 … V-1; with token ids the module takes int64, unless `dtype` says int32.
        lookahead: number of positions after the segment that the module reads, too: it gets L + lookahead positions,
            and the next segment begins L positions later.
    """

    name: _Name
    shape: Annotated[Shape, _SHAPE]
    dtype: _Dtype = "float32"
    tokens: Annotated[_Count | None, Meta(description="V, the number of token ids")] = None
    lookahead: Annotated[int, Meta(ge=0, description="a whole number of positions")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect("lookahead", self.lookahead == 0 or self.axes.positions, "0, or 'L' in its shape")
        ids = self.tokens is None or self.module_dtype in ("int32", "int64")
        self._expect("dtype", ids, "int32 or int64 for token ids")

    @cached_property
    def axes(self) -> Axes:
        """The places of "B" and "L" in the shape: 0 and 1 for ("B", "L", 8)."""
        return Axes(self.shape, self.lookahead)

    @property
    def module_dtype(self) -> str:
        """The dtype that the module is called with: int64 for token ids without a dtype of their own, else `dtype`."""
        return "int64" if self.tokens is not None and self.dtype == "float32" else self.dtype


@dataclass(frozen=True)
class StateSpec(_Typed):
    """A tensor that a step hands on to the next step.

    Attributes:
        name: the name by which the runtime's callers see it.
        shape: e.g. (layers, "B", 64); without "B" all sequences share it.
        dtype: the dtype that the module takes and returns: float32, int32, int64 or bool.
        initial: the value before the first step: a number, a tensor that broadcasts over the shape without "B", or the
            name of a parameter or buffer. None: the first step gets None in its place. Left out: the value of
            `attribute`, or zeros if there is no attribute.
        attribute: path of the attribute that holds it, e.g. "layers.0.memory"; it is set before the call and read after
            the call. None: the state is an argument and a result.
        grows: the axis along which it grows from 0 rows to the size in `shape`.
    """

    name: _Name
    shape: Annotated[Shape, _SHAPE]
    dtype: _Dtype = "float32"
    initial: Any = ...
    attribute: Annotated[str | None, Meta(description="a path such as layers.0.memory")] = None
    grows: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="an axis of its shape")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect("shape", "L" not in self.shape, "whole numbers and 'B': a state has no positions")
        rows = self.grows is None or self.shape[self.grows : self.grows + 1] not in ((), ("B",))
        self._expect("grows", rows, "an axis of its shape that is not 'B'")

    @cached_property
    def axes(self) -> Axes:
        """The place of "B" in the shape: 1 for (2, "B", 64)."""
        return Axes(self.shape)


@dataclass(frozen=True)
class OutputSpec(_Typed):
    """One output of a step.

    Attributes:
        name: the name by which the runtime's callers get it.
        shape: e.g. ("B", "L", 5); None: it is found by running, with the batch first and "L" second if the values have
            that size.
        role: the bundle turns "logits" into log-probabilities of the next token; "logprobs" are returned as they are.
            Any other word is only stored, for readers of the bundle.
    """

    name: _Name
    shape: Annotated[Shape | None, _SHAPE] = None
    role: Annotated[_Name | None, Meta(description="a word such as logits or value")] = None

    @cached_property
    def axes(self) -> Axes:
        """The places of "B" and "L" in the shape; without a shape, "B" is assumed to be the first axis."""
        return Axes(("B",) if self.shape is None else self.shape)


@dataclass(frozen=True)
class StepSpec(_Typed):
    """A model of the user's own: `module(*inputs, *states)` returns `(*outputs, *states)`.

    Attributes:
        module: a torch.nn.Module with its weights.
        inputs, states: in the order of the module's arguments. States with an `attribute` are no arguments.
        outputs: in the order of the module's results, before the states; specifications or names.
        step: f(module, inputs, states) → (outputs, states) by name, for a module with a different calling convention.
        lengths: whether the module takes `valid` int32 [B], the number of positions that count, after its inputs and
            states; `step` gets it as an input "valid".
        vocabulary: file with the vocabulary of its tokens, or the vocabulary itself, such as {"kind": "bytes"}.
        samples: real inputs to verify on, by name, in the input's shape, with any number of sequences at "B" and at
            least one segment's length at "L". None: random inputs.
        segment_lengths: the segment lengths L to export unless the export's options name others, e.g. the training
            length. (): those of 64 and 1 that the module takes.
        facts: further facts for applications, as JSON values, e.g. {"rate": 48000.0}; they go into the
            manifest's `family` and into the header of a package in C.
    """

    module: Any
    inputs: Sequence[InputSpec]
    states: Sequence[StateSpec]
    outputs: Sequence[OutputSpec | str]
    step: StepFunction | None = None
    lengths: bool = False
    vocabulary: str | Path | Mapping[str, Any] | None = None
    samples: Annotated[Mapping[str, Any] | None, Meta(description="a dictionary of arrays by input name")] = None
    segment_lengths: Annotated[Sequence[_Count], Meta(description="a list of whole numbers from 1 (int)")] = ()
    facts: Annotated[Mapping[str, Any] | None, Meta(description="a dictionary of what JSON can say")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, kinds in (("inputs", (InputSpec,)), ("states", (StateSpec,)), ("outputs", (OutputSpec, str))):
            value = getattr(self, field)
            listed = isinstance(value, list | tuple) and all(isinstance(one, kinds) for one in value)
            right = listed and (value or field == "states")
            words = " or ".join(kind.__name__ for kind in kinds)
            self._expect(field, right, f"a list of {'one or more ' * (field != 'states')}{words}")
        self._expect("step", self.step is None or callable(self.step), "a function of (module, inputs, states)")
        readable = self.vocabulary is None or isinstance(self.vocabulary, str | Path | Mapping)
        self._expect("vocabulary", readable, "the path of a file, or a dictionary such as {'kind': 'bytes'}")
        names = [one.name for one in (*self.inputs, *self.output_specs)]
        right = len(set(names)) == len(names) and not any(map(_TAKEN.match, names))
        expected = "each once, and none of valid (lengths=True gives it), fill, head and state.…"
        self._expect("the list of inputs and outputs", right, expected, names)
        # engines need states whose names, as inputs and as outputs, sort in one order
        names = [one.name for one in self.states]
        right = len(set(names)) == len(names) and not any(a.startswith(f"{b}.") for a in names for b in names)
        self._expect("the list of states", right, "each once, and none that is another with a dot behind it", names)
        names = [one.name for one in self.output_specs if one.role in LOGITS]
        self._expect("the list of logits and logprobs", len(names) < 2, "one output at most", names)
        segments = self.has_length or not any(one.axes.positions for one in self.output_specs)
        self._expect("inputs", segments, "one with 'L' in its shape, because an output has it")

    @cached_property
    def output_specs(self) -> tuple[OutputSpec, ...]:
        """The outputs as specifications; the shape of an output that was given by name is found by running."""
        return tuple(OutputSpec(one) if isinstance(one, str) else one for one in self.outputs)

    @cached_property
    def has_length(self) -> bool:
        """True if the step takes segments, i.e. "L" is in the shape of an input."""
        return any(one.axes.positions for one in self.inputs)

    @cached_property
    def starts(self) -> dict[str, Any]:
        """Initial values of states by name; `sizes.initial_value` fills it, so that each is computed once."""
        return {}
