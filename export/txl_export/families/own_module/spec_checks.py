"""Checks a specification against its module, B, L and samples before the module runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from txl_runtime.errors import UsageError, nearest

from txl_export.families.own_module.attributes import place_in_python, put, value_at
from txl_export.families.own_module.sizes import initial_value, usual_lengths
from txl_export.families.own_module.spec import LOGITS, StateSpec, StepSpec
from txl_export.proof.input_source import fitting

_NEARLY = 0.8
"""Least similarity, from 0 to 1, at which a word is taken for a misspelt role."""


def check_spec(spec: StepSpec, batch_size: int, asked: Sequence[int]) -> tuple[int, ...]:
    """Check a specification; return the segment lengths L to export, or () to try the usual lengths.

    Args:
        spec: the specification.
        batch_size: the batch size B.
        asked: segment lengths of the export's options; () for the lengths of the specification.

    Raises:
        UsageError: the specification cannot be right, whatever the module computes.
    """
    check_module(spec)
    lengths = tuple(asked or spec.segment_lengths)
    for what, value in (("batch_size", batch_size), *(("a segment length", length) for length in lengths)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise UsageError(f"{what} is {value!r}, expected a whole number from 1")
    for letter, value in (("B", batch_size), ("L", max(lengths, default=1))):
        if value > 1 and not any(letter in entry.shape for entry in spec.inputs):
            raise UsageError(f'{letter} is {value}, expected 1: no input has "{letter}" in its shape; declare it there')
    _check_samples(spec, max(lengths or usual_lengths(spec)))
    return lengths


def check_module(spec: StepSpec) -> None:
    """Refuse a module that is no torch.nn.Module, lacks attributes that states name, or has wrong initial values.

    Raises:
        UsageError: the module, a tensor, an attribute or an initial value is refused.
    """
    module = spec.module
    if not isinstance(module, nn.Module):
        raise UsageError(f"module is a {type(module).__name__}, expected a torch.nn.Module")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            raise UsageError(f"{name} is on {tensor.device}, expected cpu; return module.cpu()")
        if tensor.layout != torch.strided:
            raise UsageError(f"{name} is {tensor.layout}, expected a dense tensor; keep {name}.to_dense()")
    for entry in spec.states:
        if entry.attribute is not None:
            _check_attribute(module, entry, entry.attribute)
        initial_value(spec, entry)
    held = dict[int, StateSpec]()
    # refuse states that share memory: e.g. a view into a ring would become a separate copy and not follow the ring
    for entry in spec.states:
        value = None if entry.attribute is None else value_at(module, entry.attribute)
        if isinstance(value, Tensor) and value.layout == torch.strided and value.numel():
            first = held.setdefault(value.untyped_storage().data_ptr(), entry)
            if first.shape != entry.shape:  # tensors of equal shape may be one object only at the start
                raise UsageError(
                    f"states {first.name} and {entry.name} share their memory, expected one state for each; declare "
                    "the larger one, and take the other from it in forward"
                )


def _check_attribute(module: nn.Module, entry: StateSpec, path: str) -> None:
    try:
        put(module, path, value := value_at(module, path))
        kind = type(value).__name__
    except (LookupError, TypeError, AttributeError) as error:
        value, kind = module, str(error)
    state = isinstance(value, Tensor | int | float | None) and not isinstance(value, bool | nn.Parameter)
    if not state:
        place = place_in_python(module, path)
        sizes = tuple(1 if size == "B" else size for size in entry.shape)
        raise UsageError(
            f"state {entry.name} is kept in {path} ({kind}), expected an attribute that can be set and holds a tensor, "
            f"a number or None; correct the path, or write {place} = torch.zeros({sizes}) before the StepSpec"
        )


def _check_samples(spec: StepSpec, longest: int) -> None:
    """Refuse samples that do not have their input's shape, are shorter than a segment, or hold ids outside 0 … V-1."""
    if spec.samples is None:
        return
    if set(spec.samples) != {entry.name for entry in spec.inputs}:
        names = ", ".join(entry.name for entry in spec.inputs)
        raise UsageError(f"the samples are of {', '.join(spec.samples) or 'nothing'}, expected {names}")
    for entry in spec.inputs:
        array = np.asarray(spec.samples[entry.name])
        if not fitting(array.shape, entry.axes, longest):
            raise UsageError(
                f"the samples of {entry.name} have the shape {array.shape}, expected {tuple(entry.shape)} with at "
                f"least one sequence and {longest + entry.lookahead} positions"
            )
        if entry.tokens is not None and array.size and not 0 <= array.min() <= array.max() < entry.tokens:
            ids = f"{array.min()} to {array.max()}, expected 0 … {entry.tokens - 1}"
            raise UsageError(f"the samples of {entry.name} hold ids from {ids}")


def remarks(spec: StepSpec) -> list[str]:
    """Return warnings about roles that look misspelt, and about a module in training mode; both may be meant."""
    notes = []
    for output in spec.output_specs:
        role = output.role or ""
        if role not in LOGITS and (near := nearest(role.lower(), LOGITS, _NEARLY)):
            notes.append(
                f"output {output.name} has the role {role}, which is a word like any other; for the next token's it "
                f"is {near}"
            )
    if any(module.training and _evaluates_otherwise(module) for module in spec.module.modules()):
        notes.append("the module was in training mode; it is exported in evaluation mode, without dropout and the like")
    return notes


def _evaluates_otherwise(module: nn.Module) -> bool:
    """Return whether a module may compute something else in training: dropout, batch norm, or code with `training`."""
    if isinstance(module, _DropoutNd | _BatchNorm):
        return getattr(module, "p", 1) > 0
    dropout = getattr(module, "dropout", 0.0)  # e.g. an LSTM's argument
    if isinstance(dropout, float) and dropout > 0:
        return True
    own = [kind for kind in type(module).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))]
    codes = [getattr(value, "__code__", None) for kind in own for value in vars(kind).values()]
    return any("training" in code.co_names for code in codes if code)
