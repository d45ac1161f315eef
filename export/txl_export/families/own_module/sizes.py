"""Makes values for a specification: shapes with sizes, initial states, and inputs to try a module on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from txl_runtime.errors import UsageError

from txl_export.families.own_module.attributes import same_bits, value_at
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec

TORCH = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
"""torch's dtype for each dtype of a specification."""

States = dict[str, Tensor | None]
"""State tensors by name, with the bundle's dtypes (int32 for int64); None for a state that is absent."""


def in_bundle(dtype: str) -> str:
    """Return a dtype as a bundle stores it: "int32" for "int64", any other unchanged."""
    return "int32" if dtype == "int64" else dtype


def usual_lengths(spec: StepSpec) -> tuple[int, ...]:
    """Return the segment lengths that are tried if the user gives none."""
    return (64, 1) if spec.has_length else (1,)


def shown(sizes: tuple[int, ...]) -> str:
    """Return a shape as a message shows it, e.g. "4 × 64"."""
    return " × ".join(map(str, sizes)) if sizes else "a single number"


def measured(spec: StepSpec, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the batch size B and segment length L of inputs; 1 for a letter that is in no shape.

    For example, (2, 64) for an input ("B", "L", 8) of shape [2, 64, 8].
    """
    batch_size = length = 1
    for entry in spec.inputs:
        if entry.axes.batch is not None:
            batch_size = inputs[entry.name].shape[entry.axes.batch]
        if entry.axes.positions:
            length = entry.axes.length(inputs[entry.name])
    return batch_size, length


def state_specs(spec: StepSpec) -> dict[str, StateSpec]:
    """Return the states by name."""
    return {entry.name: entry for entry in spec.states}


def initial_value(spec: StepSpec, entry: StateSpec) -> float | Tensor | None:
    """Return the initial value of one sequence's part of a state, in a bundle's type; None if the state is absent.

    For example, 0.0, or a tensor [1, 64] for the shape (2, "B", 64): the value broadcasts over the shape without "B".

    Raises:
        UsageError: the value is no number, tensor or name of a tensor in the module, or a tensor of a wrong shape.
    """
    if entry.name not in spec.starts:
        spec.starts[entry.name] = _start(spec.module, entry)
    return spec.starts[entry.name]  # type: ignore[no-any-return]


def _start(module: nn.Module, entry: StateSpec) -> float | Tensor | None:
    value, kind, origin = entry.initial, in_bundle(entry.dtype), ""
    if value is ...:
        value = None if entry.attribute is None else value_at(module, entry.attribute)
        if value is None or not bool(torch.as_tensor(value).any()):
            return 0.0
        value, origin = torch.as_tensor(value), f"its attribute {entry.attribute}, "
    elif isinstance(value, str):
        with contextlib.suppress(LookupError):
            value, origin = value_at(module, value), f"{value}, "

    def check(right: bool, shown_value: str, expected: str) -> None:
        if not right:
            raise UsageError(
                f"state {entry.name} starts as {origin}{shown_value}, expected {expected}; give another initial="
            )

    if value is None:
        return None
    number = isinstance(value, bool | int | float | np.number)
    check(
        number or isinstance(value, Tensor | np.ndarray), repr(value), "a number, a tensor, a parameter's name or None"
    )
    start = torch.tensor(float(value), dtype=torch.float64) if number else torch.as_tensor(value).detach()
    tensor, shown_value = start.to(TORCH[kind]), str(value) if number else f"a tensor of {shown(tuple(start.shape))}"
    exact = kind == "float32" or torch.equal(tensor.to(start.dtype), start)
    check(exact, shown_value, f"what {kind} holds, as a bundle has it")
    check(entry.grows is None or not start.any(), shown_value, "zeros, because it grows from no rows")
    if number and math.isfinite(value):
        return float(value)  # JSON has no infinities, so they are stored as tensors
    batch, wanted = entry.axes.batch, entry.axes.alone.sizes(0, 0)
    if batch is not None and tensor.dim() == len(entry.shape) and tensor.shape[batch]:
        first = tensor.narrow(batch, 0, 1)
        same = same_bits(tensor, first.expand_as(tensor))
        check(same, f"different values for {tensor.shape[batch]} sequences", "the same for all")
        tensor = first.squeeze(batch)
    fits = tensor.dim() <= len(wanted) and all(
        size in (1, most) for size, most in zip(reversed(tensor.shape), reversed(wanted), strict=False)
    )
    check(fits, shown_value, f"one that broadcasts over {shown(wanted)}, its shape without the batch")
    return tensor


def fresh_states(spec: StepSpec, batch_size: int, dtype: torch.dtype = torch.float32) -> States:
    """Return the states before the first step: without rows if a state grows, None if it is absent."""
    return {entry.name: _fresh(spec, entry, batch_size, dtype) for entry in spec.states}


def _fresh(spec: StepSpec, entry: StateSpec, batch_size: int, dtype: torch.dtype) -> Tensor | None:
    value = initial_value(spec, entry)
    if value is None:
        return None
    kind = dtype if entry.dtype == "float32" else TORCH[in_bundle(entry.dtype)]
    sizes, batch = entry.axes.sizes(batch_size, 0), entry.axes.batch
    if entry.grows is not None:
        return torch.zeros([0 if axis == entry.grows else size for axis, size in enumerate(sizes)], dtype=kind)
    exact = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    tensor = exact.to(kind).expand(entry.axes.alone.sizes(0, 0))
    return (tensor if batch is None else tensor.unsqueeze(batch).expand(sizes)).clone()


def random_inputs(
    spec: StepSpec,
    batch_size: int,
    length: int,
    generator: np.random.Generator,
    samples: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Return inputs of one segment with the bundle's dtypes: random pieces of the samples, else random values.

    For example, {"x": [2, 64, 8]} for two sequences of 64.

    Args:
        spec: the specification.
        batch_size, length: the batch size B and segment length L.
        generator: the source of randomness.
        samples: real inputs by name, as `StepSpec.samples` has them.
    """
    places = generator.random(batch_size), generator.random(batch_size)
    drawn = {}
    for entry in spec.inputs:
        sizes = entry.axes.sizes(batch_size, length)
        sampled = samples is not None and entry.name in samples
        cut = _cut(entry, np.asarray(samples[entry.name]), sizes, places) if sampled and samples is not None else None
        drawn[entry.name] = torch.from_numpy(_random(entry, sizes, generator) if cut is None else cut)
    return drawn


def _random(entry: InputSpec, sizes: tuple[int, ...], generator: np.random.Generator) -> Any:
    if entry.tokens is not None:
        return generator.integers(0, entry.tokens, sizes, np.int32)
    if entry.dtype == "float32":
        return generator.standard_normal(sizes, np.float32)
    drawn = generator.integers(0, 2, sizes, np.int32)  # only 0 and 1 are known to be in range
    return drawn.astype(np.bool_) if entry.dtype == "bool" else drawn


def _cut(entry: InputSpec, samples: Any, sizes: tuple[int, ...], places: tuple[Any, Any]) -> Any:
    """Cut a piece of the samples for every sequence, at the same places in every input."""
    axes, rows = entry.axes, []
    for row, start in zip(*places, strict=True):
        piece = samples
        for axis in axes.positions:
            first = int(start * (samples.shape[axis] - sizes[axis] + 1))
            piece = piece[axes.at(positions=slice(first, first + sizes[axis]))]
        rows.append(piece if axes.batch is None else axes.one(piece, int(row * samples.shape[axes.batch])))
    return np.asarray(axes.joined(rows), in_bundle(entry.module_dtype), order="C")
