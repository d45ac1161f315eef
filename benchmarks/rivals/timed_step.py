"""Define a step that is timed: the module or file of which a bundle is made, and its publisher's ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from txl_export import InputSpec, StateSpec, StepSpec

__all__ = ["Step", "frame_step"]


@dataclass(frozen=True)
class Step:
    """A step that is timed.

    Attributes:
        source: the module with its inputs and states, or an ONNX file that a bundle is made of.
        batch: B, the sequences of a step.
        length: L, the positions of a step.
        published: an ONNX file with the same weights from the model's publisher; None without one. Its inputs, outputs
            and states have the names of `source`, and its new states the suffix `_out`.
    """

    source: StepSpec | Path
    batch: int = 1
    length: int = 1
    published: Path | None = None


def frame_step(module: nn.Module, width: int, states: Sequence[StateSpec], batch: int = 1, **more: Any) -> Step:
    """Return a step of a module that takes a frame `x` [B, width] and the states, and returns `y` and new states."""
    return Step(StepSpec(module.eval(), [InputSpec("x", ("B", width))], states, ["y"]), batch, **more)
