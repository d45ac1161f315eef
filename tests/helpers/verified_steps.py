"""Verification of the step of `stand_ins.step_stream`, and two faults that several tests put into it."""

from __future__ import annotations

from typing import Any

import numpy as np
from stand_ins.step_stream import ArrayModel, ArrayStream, NumpyReference
from txl_export.proof.parity import Parity
from txl_export.proof.verification import verify_model
from txl_runtime.listener import Listener


class Heard(Listener):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.steps = 0
        self.warnings: list[str] = []

    def stage(self, title: str, total: int | None = None) -> None:
        self.stages.append((title, total))

    def advance(self, steps: int = 1) -> None:
        self.steps += steps

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def verified(stream: type[ArrayStream] = ArrayStream, segments: int | None = 40, **options: Any) -> Parity:
    model = ArrayModel(stream, precision=options.pop("precision", "fp32"))
    return verify_model(lambda: model, NumpyReference(), "the test", segments=segments, **options)


def failing(parity: Parity) -> set[str]:
    return {gate.name for gate in parity.gates if gate.passed is False}


class OnceWrong(ArrayStream):
    """One element of one state after one segment."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        if self.steps == 17:
            after["rows"][1, 3, 2] += 1e-2
        return outputs, after


class MiscountedOnce(ArrayStream):
    """A counter is one too many after one segment."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"count": after["count"] + np.int32(self.steps == 17)}
