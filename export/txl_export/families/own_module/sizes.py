"""The numbers behind a specification: shapes with sizes, states as they begin, inputs to try a module on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from txl_runtime.bundle.tables import sizes_of
from txl_runtime.errors import UsageError

from txl_export.families.own_module.spec import InputSpec, OutputSpec, Shape, StateSpec, StepSpec

TORCH = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
"""What the words of a specification are in torch."""

States = dict[str, Tensor | None]
"""State tensors by name, as a bundle has them: int32 for int64; None where one is absent."""


def in_bundle(dtype: str) -> str:
    """What a bundle has in place of what a module takes."""
    return "int32" if dtype == "int64" else dtype


def batch_axis(shape: Shape) -> int | None:
    """Where "B" stands."""
    return shape.index("B") if "B" in shape else None


def has_length(spec: StepSpec) -> bool:
    """Whether a step takes segments: "L" stands in a shape of its inputs."""
    return any("L" in entry.shape for entry in spec.inputs)


def input_sizes(entry: InputSpec, batch_size: int, length: int) -> tuple[int, ...]:
    """An input's shape for segments of `length`, with what lies ahead."""
    return sizes_of(entry.shape, batch_size, length + entry.lookahead)


def state_sizes(entry: StateSpec, batch_size: int) -> tuple[int, ...]:
    """A state's shape; where it grows with the most rows."""
    return sizes_of(entry.shape, batch_size, 0)


def state_specs(spec: StepSpec) -> dict[str, StateSpec]:
    """The states by name."""
    return {entry.name: entry for entry in spec.states}


def output_specs(spec: StepSpec) -> tuple[OutputSpec, ...]:
    """The outputs; a name alone is one whose shape is found by running."""
    return tuple(OutputSpec(entry) if isinstance(entry, str) else entry for entry in spec.outputs)


def initial_value(spec: StepSpec, entry: StateSpec) -> float | Tensor | None:
    """What one sequence's part of a state starts as: a number, or a tensor that broadcasts; None where it is absent.

    Raises:
        UsageError: it is the name of no parameter or buffer, or not a number, tensor or name.
    """
    raise NotImplementedError


def fresh_states(spec: StepSpec, batch_size: int, dtype: torch.dtype = torch.float32) -> States:
    """The states before the first step: no rows where one grows, None where it is absent.

    Args:
        spec: whose states.
        batch_size: B.
        dtype: of floating states.
    """
    raise NotImplementedError


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
    raise NotImplementedError
