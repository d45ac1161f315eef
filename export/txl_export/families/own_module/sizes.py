"""The numbers behind a specification: shapes with sizes, states as they begin, inputs to try a module on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from txl_runtime.errors import UsageError, some

from txl_export.families.own_module.attributes import same_bits, value_at
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

TORCH = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
"""What the words of a specification are in torch."""

States = dict[str, Tensor | None]
"""State tensors by name, as a bundle has them: int32 for int64; None where one is absent."""


def in_bundle(dtype: str) -> str:
    """What a bundle has in place of what a module takes."""
    return "int32" if dtype == "int64" else dtype


def has_length(spec: StepSpec) -> bool:
    """Whether a step takes segments: "L" stands in a shape of its inputs."""
    return any(entry.axes.positions for entry in spec.inputs)


def usual_lengths(spec: StepSpec) -> tuple[int, ...]:
    """Segment lengths that are tried where none are given."""
    return (64, 1) if has_length(spec) else (1,)


def shown(sizes: tuple[int, ...]) -> str:
    """A shape in a message."""
    return " × ".join(map(str, sizes)) if sizes else "a single number"


def measured(spec: StepSpec, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
    """B and L of inputs; 1 where no shape has the letter."""
    batch_size = length = 1
    for entry in spec.inputs:
        if entry.axes.batch is not None:
            batch_size = inputs[entry.name].shape[entry.axes.batch]
        if entry.axes.positions:
            length = entry.axes.length(inputs[entry.name])
    return batch_size, length


def state_specs(spec: StepSpec) -> dict[str, StateSpec]:
    """The states by name."""
    return {entry.name: entry for entry in spec.states}


def output_specs(spec: StepSpec) -> tuple[OutputSpec, ...]:
    """The outputs; a name alone is one whose shape is found by running."""
    return tuple(OutputSpec(entry) if isinstance(entry, str) else entry for entry in spec.outputs)


def initial_value(spec: StepSpec, entry: StateSpec) -> float | Tensor | None:
    """What one sequence's part of a state starts as, as a bundle has it; None where the state is absent.

    A tensor broadcasts over the shape without "B"; one with a size of 1 at "B" loses that axis.

    Raises:
        UsageError: it is the name of nothing, or no number, tensor or name, or a tensor that is no such part.
    """
    value, origin = entry.initial, f"state {entry.name} starts as"
    if value is ...:
        value, origin = _kept_at_first(spec, entry), f"{origin} its attribute {entry.attribute},"
    if value is None:
        return None
    if isinstance(value, (bool, int, float, np.number)):
        return _number(entry, float(value))
    if isinstance(value, str):
        try:
            found = value_at(spec.module, value)
        except LookupError:
            found = None
        if not isinstance(found, Tensor):
            raise UsageError(
                f"{origin} {value!r}, expected the name of a parameter or buffer of the module; "
                f"there are {some(_tensor_names(spec.module), 6) or 'none'}"
            )
        value = found
    if not isinstance(value, (Tensor, np.ndarray)):
        raise UsageError(f"{origin} a {type(value).__name__}, expected a number, a tensor, a parameter's name or None")
    given, kind = torch.as_tensor(value).detach(), in_bundle(entry.dtype)
    tensor = given.to(TORCH[kind])
    if kind != "float32" and not torch.equal(tensor.to(given.dtype), given):
        raise UsageError(f"{origin} a tensor that holds what is no {kind}, expected {kind}; give initial=")
    batch = entry.axes.batch
    if batch is not None and tensor.dim() == len(entry.shape) and tensor.shape[batch] == 1:
        tensor = tensor.squeeze(batch)
    wanted = entry.axes.alone.sizes(0, 0)
    try:
        tensor.expand(wanted)
    except RuntimeError:
        raise UsageError(
            f"{origin} a tensor of {shown(tuple(tensor.shape))}, expected one that broadcasts over {shown(wanted)}, "
            "its shape without the batch; correct it, or give initial="
        ) from None
    return tensor


def _kept_at_first(spec: StepSpec, entry: StateSpec) -> float | Tensor:
    """A state's attribute while no step runs, with 1 at "B"; 0.0 where it holds zeros or None, or is none.

    Raises:
        UsageError: it holds what not every sequence can start as.
    """
    held = None
    if entry.attribute is not None:
        with contextlib.suppress(LookupError):  # `check_spec` says what is wrong with the path
            held = value_at(spec.module, entry.attribute)
    if isinstance(held, (bool, int, float)):
        held = torch.tensor(held)
    if not isinstance(held, Tensor) or not bool(held.any()):
        return 0.0
    if entry.grows is not None:
        raise UsageError(
            f"state {entry.name} grows from no rows, and its attribute {entry.attribute} holds values "
            f"({shown(tuple(held.shape))}), expected none or zeros; give initial=0.0 if it begins without them"
        )
    batch = entry.axes.batch
    if batch is None or held.dim() != len(entry.shape):
        return held
    first = held.narrow(batch, 0, 1)
    if not same_bits(held, first.expand_as(held)):
        raise UsageError(
            f"state {entry.name}: its attribute {entry.attribute} holds different values for {held.shape[batch]} "
            "sequences, expected the same for all, because every sequence starts as them; give initial="
        )
    return first


def _tensor_names(module: nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


def fresh_states(spec: StepSpec, batch_size: int, dtype: torch.dtype = torch.float32) -> States:
    """The states before the first step: no rows where one grows, None where it is absent.

    Args:
        spec: whose states.
        batch_size: B.
        dtype: of floating states.
    """
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


def _number(entry: StateSpec, value: float) -> float | Tensor:
    """A number that a state starts as; JSON has no infinities, so those are tensors."""
    if entry.dtype != "float32":
        most = 1 if entry.dtype == "bool" else 2**31 - 1
        if not value.is_integer() or not -most <= value <= most:
            raise UsageError(
                f"state {entry.name} starts as {value:g}, expected a whole number of at most {most}, because it is "
                f"{in_bundle(entry.dtype)} in a bundle"
            )
    return value if math.isfinite(value) else torch.tensor(value)


def random_inputs(
    spec: StepSpec,
    batch_size: int,
    length: int,
    generator: np.random.Generator,
    samples: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Inputs of one segment as a bundle takes them: from anywhere in the samples where there are some, else random.

    Args:
        spec: whose inputs.
        batch_size: B.
        length: L.
        generator: draws them.
        samples: real inputs by name, as `StepSpec.samples`.
    """
    places = generator.random(batch_size), generator.random(batch_size)
    drawn = {}
    for entry in spec.inputs:
        sizes = entry.axes.sizes(batch_size, length)
        given = samples is not None and entry.name in samples
        found = _cut(entry, np.asarray(samples[entry.name]), sizes, places) if given and samples is not None else None
        drawn[entry.name] = torch.from_numpy(_random(entry, sizes, generator) if found is None else found)
    return drawn


def _random(entry: InputSpec, sizes: tuple[int, ...], generator: np.random.Generator) -> Any:
    if entry.tokens is not None:
        return generator.integers(0, entry.tokens, sizes, np.int32)
    if entry.dtype == "float32":
        return generator.standard_normal(sizes, np.float32)
    drawn = generator.integers(0, 2, sizes, np.int32)  # of whole numbers nothing else is known to be in range
    return drawn.astype(np.bool_) if entry.dtype == "bool" else drawn


def _cut(entry: InputSpec, samples: Any, sizes: tuple[int, ...], places: tuple[Any, Any]) -> Any:
    """For every sequence a piece of the samples, from the same places in every input."""
    axes, rows = entry.axes, []
    for row, start in zip(*places, strict=True):
        piece = samples
        for axis in axes.positions:
            first = int(start * (samples.shape[axis] - sizes[axis] + 1))
            piece = piece[axes.at(positions=slice(first, first + sizes[axis]))]
        rows.append(piece if axes.batch is None else axes.one(piece, int(row * samples.shape[axes.batch])))
    return np.asarray(axes.joined(rows), in_bundle(entry.module_dtype), order="C")
