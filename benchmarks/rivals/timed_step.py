"""A step to be timed, in two forms: what `txl_export.export` takes, and the ONNX file that its publisher offers."""

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
    """A step to be timed.

    Attributes:
        source: the module with its inputs and states, or an ONNX file that a bundle is made of.
        batch: B, sequences of a step.
        length: L, positions of a step.
        published: an ONNX file with the same weights from those who trained them; its inputs, outputs and states are
            called as in `source`, and the new states end in `_out`.
    """

    source: StepSpec | Path
    batch: int = 1
    length: int = 1
    published: Path | None = None


def frame_step(module: nn.Module, width: int, states: Sequence[StateSpec], batch: int = 1, **more: Any) -> Step:
    """Return a step that takes one frame `x` of `width` features per sequence, and returns `y` and the states."""
    return Step(StepSpec(module.eval(), [InputSpec("x", ("B", width))], states, ["y"]), batch, **more)
