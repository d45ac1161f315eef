"""Runs the user's module, one step: inputs and states by name in, outputs and states by name out, in whatever way it is
called."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from txl_export.families.own_module.spec import StepSpec


class Eager:
    """A module as a function of inputs and states, in eager mode.

    Tensors are as a bundle has them, int32 where the module takes int64; they are cast on the way in and out. Nothing
    that is given is written to, nothing that is returned shares memory with it, and the module's attributes are
    afterwards what they were.

    Attributes:
        spec: of the step.
        dtype: of floating inputs and states: float32, or float64 of a copy made by `in_float64`.
    """

    def __init__(self, spec: StepSpec, dtype: torch.dtype = torch.float32) -> None:
        self.spec, self.dtype = spec, dtype

    def __call__(
        self, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], valid: Tensor | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """One step without gradients, its results checked against the specification.

        Args:
            inputs: by name.
            states: by name; None, or left out, where one is absent.
            valid: int32 [B], rows that count, for a module that takes them (`StepSpec.lengths`).

        Raises:
            OwnCodeError: the module raised an exception.
            UsageError: it returned something else than was declared.
        """
        raise NotImplementedError

    def traced(
        self, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], valid: Tensor | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """As a call, for use inside a module that is being captured: nothing is checked and no exception renamed."""
        raise NotImplementedError


def in_float64(spec: StepSpec, batch_size: int, length: int) -> Eager | None:
    """A copy of the module in double precision; None where it does not run in it, or computes something else."""
    raise NotImplementedError
