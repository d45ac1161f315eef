"""Whether a specification is one: what can be said of it before the module runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from txl_runtime.bundle.vocabulary import decode_vocabulary
from txl_runtime.errors import TxlError, UsageError, nearest

from txl_export.families.own_module.attributes import put, value_at
from txl_export.families.own_module.sizes import has_length, initial_value, output_specs, usual_lengths
from txl_export.families.own_module.spec import (
    INPUT_DTYPES,
    STATE_DTYPES,
    VALID,
    InputSpec,
    OutputSpec,
    StateSpec,
    StepSpec,
)
from txl_export.proof.input_source import fitting

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
_RESERVED = {VALID, "fill", "head"}
_OF_TOKENS = ("logits", "logprobs")
_NEARLY = 0.8
"""So similar a word is to another that it is taken for a slip: from 0 to 1."""


def check_spec(spec: StepSpec, batch_size: int, asked: Sequence[int]) -> tuple[int, ...]:
    """Refuse what cannot be meant, whatever the module does.

    Args:
        spec: the user's.
        batch_size: B.
        asked: every L that was asked for; none for those of the specification.

    Returns:
        Every L that is wanted; none where the usual ones are to be tried.

    Raises:
        UsageError: with what was found and what was expected.
    """
    check_declared(spec)
    lengths = tuple(asked or spec.segment_lengths)
    _check_numbers(spec, batch_size, tried := lengths or usual_lengths(spec))
    for given in spec.inputs:
        _check_samples(spec, given, max(tried))
    return lengths


def check_declared(spec: StepSpec) -> None:
    """The part of `check_spec` that needs no sizes; before it nothing may be asked of the inputs, states and outputs.

    Raises:
        UsageError: as there.
    """
    _check_module(spec)
    if isinstance(spec.segment_lengths, str) or not isinstance(spec.segment_lengths, Sequence):
        raise UsageError(f"segment_lengths is {spec.segment_lengths!r}, expected a list of whole numbers, e.g. [64, 1]")
    for kind, entries, expected in (
        ("inputs", spec.inputs, (InputSpec,)),
        ("states", spec.states, (StateSpec,)),
        ("outputs", spec.outputs, (OutputSpec, str)),
    ):
        _check_list(kind, entries, expected)
    outputs = output_specs(spec)
    _check_names(spec, outputs)
    for given in spec.inputs:
        _check_input(given)
    for state in spec.states:
        _check_state(spec, state)
    for output in outputs:
        _check_output(output)
    if len(told := [output.name for output in outputs if output.role in _OF_TOKENS]) > 1:
        raise UsageError(f"{' and '.join(told)} have the role logits or logprobs, expected one output at most")
    _check_vocabulary(spec)


def remarks(spec: StepSpec) -> list[str]:
    """What can be meant, but is more often a slip."""
    found = []
    for output in output_specs(spec):
        role = output.role or ""
        if role not in _OF_TOKENS and (near := nearest(role.lower(), _OF_TOKENS, _NEARLY)):
            found.append(
                f"output {output.name} has the role {role}, which is a word like any other; for the next token's it "
                f"is {near}"
            )
    if any(module.training and _evaluates_otherwise(module) for module in spec.module.modules()):
        found.append("the module was in training mode; it is exported in evaluation mode, without dropout and the like")
    return found


def _evaluates_otherwise(module: nn.Module) -> bool:
    """Whether a module may compute something else in evaluation mode: dropout, batch norm, or code that asks."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _BatchNorm):
        return True
    dropout = getattr(module, "dropout", 0.0)
    if isinstance(dropout, float) and dropout > 0:
        return True
    own = [value for kind in type(module).__mro__ if _is_own(kind) for value in vars(kind).values()]
    return any("training" in code.co_names for value in own if (code := getattr(value, "__code__", None)))


def _is_own(kind: type) -> bool:
    return not kind.__module__.startswith(("torch.", "builtins"))


def _check_module(spec: StepSpec) -> None:
    if not isinstance(spec.module, nn.Module):
        raise UsageError(f"module is a {type(spec.module).__name__}, expected a torch.nn.Module")
    if spec.step is not None and not callable(spec.step):
        raise UsageError(f"step is a {type(spec.step).__name__}, expected a function of (module, inputs, states)")
    tensors = [*spec.module.named_parameters(), *spec.module.named_buffers()]
    for name, tensor in tensors:
        if tensor.device.type != "cpu":
            raise UsageError(f"{name} is on {tensor.device}, expected cpu; return module.cpu()")
        if tensor.layout != torch.strided:
            raise UsageError(f"{name} is {tensor.layout}, expected a dense tensor; keep {name}.to_dense()")


def _check_vocabulary(spec: StepSpec) -> None:
    given = spec.vocabulary
    if given is None:
        return
    if isinstance(given, (str, Path)):
        if not Path(given).is_file():
            raise UsageError(f"the vocabulary {given} is no file; correct its path, or leave it out")
        return
    if not isinstance(given, Mapping):
        raise UsageError(f"vocabulary is a {type(given).__name__}, expected the path of a file, or a dictionary")
    sizes = [entry.tokens for entry in spec.inputs if entry.tokens is not None]
    try:
        decode_vocabulary(msgspec.json.encode(given), max(sizes, default=0), "the vocabulary")
    except (TxlError, TypeError, OverflowError) as error:
        said = str(error).partition(";")[0]
        raise UsageError(
            f'{said}; expected one of the tokens that the module takes, such as {{"kind": "bytes"}}'
        ) from None


def _check_list(kind: str, entries: Any, expected: tuple[type, ...]) -> None:
    words = " or ".join(kind_.__name__ for kind_ in expected)
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise UsageError(f"{kind} is a {type(entries).__name__}, expected a list of {words}")
    for entry in entries:
        if not isinstance(entry, expected):
            raise UsageError(f"one of the {kind} is a {type(entry).__name__}, expected {words}")
    if not entries and kind != "states":
        raise UsageError(f"there are no {kind}, expected at least one; a step reads something and returns something")


def _check_names(spec: StepSpec, outputs: Sequence[OutputSpec]) -> None:
    read = [(f"input {entry.name}", entry.name) for entry in spec.inputs]
    read += [(f"output {entry.name}", entry.name) for entry in outputs]
    for what, name in [*read, *((f"state {entry.name}", entry.name) for entry in spec.states)]:
        if not isinstance(name, str) or not _NAME.match(name):
            raise UsageError(f"{what} has a name that is none; expected letters, digits, _ and . after a letter or _")
    for what, name in read:
        if name in _RESERVED or name.startswith("state."):
            why = "; lengths=True says that the module takes it" if name == VALID else ""
            raise UsageError(f"{what} has a name that bundles use themselves{why}; give it another one")
    for names in ([name for _, name in read], [entry.name for entry in spec.states]):
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(
                f"{', '.join(twice)} is the name of two; expected one name each: inputs and outputs share theirs"
            )
    for entry in spec.states:
        for other in spec.states:
            if other.name.startswith(f"{entry.name}."):  # engines want inputs and outputs that sort alike
                raise UsageError(
                    f"state {other.name} has the name of state {entry.name} before a dot, expected names that do not "
                    f"go on another one; call it {other.name.replace('.', '_')}"
                )


def _check_shape(what: str, shape: Any, letters: tuple[str, ...]) -> None:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise UsageError(f"{what} has the shape {shape!r}, expected a tuple such as ('B', 64)")
    allowed = " and ".join(f'"{letter}"' for letter in letters)
    for size in shape:
        number = isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 1
        if not number and size not in letters:
            raise UsageError(f"{what} has the size {size!r}, expected whole numbers from 1 and {allowed}")
    for letter in letters:
        if list(shape).count(letter) > 1:
            raise UsageError(f'{what} has "{letter}" twice in its shape, expected it once at most')


def _check_dtype(what: str, dtype: Any, expected: tuple[str, ...]) -> None:
    if dtype not in expected:
        raise UsageError(f"{what} has the dtype {dtype!r}, expected {', '.join(expected)}")


def _check_input(entry: InputSpec) -> None:
    what = f"input {entry.name}"
    _check_shape(what, entry.shape, ("B", "L"))
    _check_dtype(what, entry.dtype, INPUT_DTYPES)
    if entry.tokens is not None:
        if not _whole(entry.tokens, 1):
            raise UsageError(f"{what} has tokens={entry.tokens!r}, expected V, the number of token ids")
        _check_dtype(f"{what}, of tokens,", entry.module_dtype, ("int32", "int64"))
    if not _whole(entry.lookahead, 0) or (entry.lookahead and not entry.axes.positions):
        raise UsageError(f'{what} has lookahead={entry.lookahead!r}, expected 0, or more with "L" in its shape')


def _check_state(spec: StepSpec, entry: StateSpec) -> None:
    what = f"state {entry.name}"
    _check_shape(what, entry.shape, ("B",))
    _check_dtype(what, entry.dtype, STATE_DTYPES)
    if entry.grows is not None and (
        not _whole(entry.grows, 0) or entry.grows >= len(entry.shape) or entry.grows == entry.axes.batch
    ):
        raise UsageError(
            f"{what} grows along {entry.grows!r}, expected an axis of its shape from 0 to {len(entry.shape) - 1} that "
            'is not "B"'
        )
    if entry.attribute is not None:
        _check_attribute(what, spec.module, entry)
    initial_value(spec, entry)


def _check_attribute(what: str, module: nn.Module, entry: StateSpec) -> None:
    path = str(entry.attribute)
    try:
        found = value_at(module, path)
        if isinstance(found, nn.Parameter):
            raise UsageError(f"{what} is the parameter {path}, expected a buffer or a plain attribute")
        if isinstance(found, bool) or not isinstance(found, (Tensor, int, float, type(None))):  # such as training
            begins = ", ".join("1" if size == "B" else str(size) for size in entry.shape)
            place = re.sub(r"\.(\d+)", r"[\1]", f"model.{path}")
            raise UsageError(
                f"{what} is kept in {path}, a {type(found).__name__}, expected a tensor, a number or None; before the "
                f"StepSpec, write {place} = torch.zeros(({begins},))"
            )
        put(module, path, found)
    except (LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{what} is kept in {path}, expected the path of an attribute that can be set ({error}); correct it, or "
            "set the attribute in __init__"
        ) from None


def _check_output(entry: OutputSpec) -> None:
    what = f"output {entry.name}"
    if entry.shape is not None:
        _check_shape(what, entry.shape, ("B", "L"))
    if entry.role is not None and (not isinstance(entry.role, str) or not _NAME.match(entry.role)):
        raise UsageError(f"{what} has the role {entry.role!r}, expected a word such as logits or value")


def _check_numbers(spec: StepSpec, batch_size: int, segment_lengths: Sequence[int]) -> None:
    if not _whole(batch_size, 1):
        raise UsageError(f"batch_size is {batch_size!r}, expected a whole number from 1")
    if not segment_lengths or not all(_whole(length, 1) for length in segment_lengths):
        raise UsageError(f"segment lengths are {list(segment_lengths)}, expected whole numbers from 1")
    if not has_length(spec):
        if any(length != 1 for length in segment_lengths):
            raise UsageError(
                f'segments of {max(segment_lengths)} were asked for, but no input has "L" in its shape, so a step '
                "takes one position; leave out --segment-length, or declare it"
            )
        if length_of := [entry.name for entry in output_specs(spec) if entry.axes.positions]:
            raise UsageError(f'output {length_of[0]} has "L" in its shape, but no input has; declare it there')
    if batch_size > 1 and not any(entry.axes.batch is not None for entry in spec.inputs):
        raise UsageError(f'batch_size is {batch_size}, but no input has "B" in its shape; expected 1, or declare it')


def _check_samples(spec: StepSpec, entry: InputSpec, longest: int) -> None:
    if spec.samples is None:
        return
    if not isinstance(spec.samples, Mapping):
        raise UsageError(f"samples is a {type(spec.samples).__name__}, expected a dictionary of arrays by input name")
    names = [known.name for known in spec.inputs]
    if entry.name not in spec.samples or len(spec.samples) != len(names):
        raise UsageError(f"the samples are of {', '.join(spec.samples) or 'nothing'}, expected {', '.join(names)}")
    found = np.asarray(spec.samples[entry.name])
    if not fitting(found.shape, entry.axes, longest):
        raise UsageError(
            f"the samples of {entry.name} have the shape {found.shape}, expected {tuple(entry.shape)} with at least "
            f"one sequence and {longest + entry.lookahead} positions"
        )
    if entry.tokens is not None and found.size and not (found.min() >= 0 and found.max() < entry.tokens):
        raise UsageError(
            f"the samples of {entry.name} hold ids from {found.min()} to {found.max()}, expected 0 … {entry.tokens - 1}"
        )


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)
