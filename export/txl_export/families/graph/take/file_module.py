"""Puts an ONNX file in the place of a user's module, so that `own_module` can prove it and write a bundle.

The helper process runs the graph. The file is then checked like a module: which states are fed back, whether sequences
are independent, and what a chain of segments returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.sandbox.process import EndedError
from txl_runtime.types import Array

from txl_export.families.graph.take.running import RunError, Runner
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec

Call = Callable[[dict[str, Array]], Mapping[str, Array]]
"""A function that returns outputs by name for inputs by name."""


@dataclass(frozen=True)
class Side:
    """A tensor of a step: its name and NumPy dtype in the graph, and its entry in the specification."""

    port: str
    dtype: str
    spec: InputSpec | StateSpec | OutputSpec


@dataclass(frozen=True)
class FileStep:
    """The tables of a step that a graph computes.

    Attributes:
        inputs, outputs: the tensors that are no states.
        states: each state with the name of the graph's output that is its next value.
        sequences, positions: the batch size B and segment length L if the graph fixes them, else None; 1 position if no
            input has an axis of positions.
        shown: names of states that are inputs of the original file, i.e. were not hidden.
    """

    inputs: tuple[Side, ...]
    outputs: tuple[Side, ...]
    states: tuple[tuple[Side, str], ...]
    sequences: int | None
    positions: int | None
    shown: frozenset[str]

    def spec(self, module: nn.Module) -> StepSpec:
        """Return the specification for a module that takes inputs and states and returns outputs and states."""
        return StepSpec(
            module,
            [side.spec for side in self.inputs],  # type: ignore[misc]
            [side.spec for side, _ in self.states],  # type: ignore[misc]
            [side.spec for side in self.outputs],  # type: ignore[misc]
            segment_lengths=() if self.positions is None else (self.positions,),
        )


class FileModule(nn.Module):
    """A graph as a PyTorch module, without gradients.

    Args:
        step: the graph's tables.
        call: runs the graph on arrays by the graph's names.
        graph: its float32 initializers become the module's parameters.
        number: a hash of the graph, so that graphs with equal parameters get different model ids.
    """

    def __init__(self, step: FileStep, call: Call, graph: ir.Graph, number: int) -> None:
        super().__init__()
        takes = [*step.inputs, *(side for side, _ in step.states)]
        gives = [*((side.port, side) for side in step.outputs), *((port, side) for side, port in step.states)]
        self.number = number
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
                values = torch.from_numpy(tensor.numpy().copy())
                self._parameters[name] = nn.Parameter(values, requires_grad=False)  # register_parameter refuses dots

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            feeds = {side.port: tensor.numpy().astype(side.dtype) for side, tensor in zip(takes, given, strict=True)}
            results = call(feeds)
            return tuple(
                torch.from_numpy(np.array(results[port]).astype(kind_of(port, side.dtype))) for port, side in gives
            )

        self._run = run

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs, then the states.

        For example, x [2, 8] and h [2, 32] give y [2, 4] and the next h [2, 32].
        """
        return self._run(*given)


def caller(runner: Runner, path: Path, constants: Mapping[str, Array]) -> Call:
    """Return a function that runs a file, with `constants` as inputs in each call.

    For example, `constants` {"sr": 16000} are fed beside x [1, 512].

    The function raises:
        UsageError: the file does not run with these shapes.
        BackendError: the process died or ran out of time.
    """

    def call(feeds: dict[str, Array]) -> Mapping[str, Array]:
        try:
            return runner.run({**constants, **feeds})
        except RunError as error:
            sizes = ", ".join(f"{name} {list(values.shape)}" for name, values in feeds.items())
            raise UsageError(f"{path}: does not run with {sizes}: {error}") from None
        except EndedError as error:
            raise BackendError(f"{path}: {error}") from None

    return call


def kind_of(name: str, dtype: str) -> str:
    """Return a step's dtype for a graph's dtype, e.g. "float32" for "float16".

    Raises:
        UsageError: no dtype of a bundle holds such numbers.
    """
    kinds = dict.fromkeys(("float16", "float32", "float64"), "float32")
    kinds |= {"bool": "bool", "int64": "int64", "uint32": "int64"}
    if dtype not in kinds and not re.fullmatch(r"u?int(8|16|32)", dtype):
        raise UsageError(f"{name} is {dtype or 'no tensor'}, expected numbers that float32, int32 or bool hold")
    return kinds.get(dtype, "int32")
