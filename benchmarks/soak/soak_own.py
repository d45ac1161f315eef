"""Measure over many steps how far a bundle with a state that never forgets departs from its module in float64.

A Transformer-XL forgets everything, rounding errors included, after some hundred tokens. The module here forgets
nothing: its states are a rotation that neither grows nor fades, a sum, and a count. Rounding errors can only add up,
also in PyTorch's float32. So the module runs in float32 too, for comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import txl_runtime
from torch import Tensor, nn
from txl_export import InputSpec, StateSpec, StepSpec, export

from benchmarks.shared.tables import log

FEATURES, PAIRS, BATCH, LOOKS = 8, 32, 2, 40
RESET = 997
"""The number of steps between two resets of the second sequence."""


class NeverForgets(nn.Module):
    """A step that takes eight numbers and keeps three states that never fade."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.shown = nn.Linear(FEATURES, PAIRS), nn.Linear(2 * PAIRS, FEATURES)

    def forward(self, numbers: Tensor, phase: Tensor, total: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        """Run a step: numbers [B, 8], phase [B, 32, 2], total [B, 8] and count [B] → result [B, 8], and new states."""
        angle = self.turn(numbers)
        cosine, sine = angle.cos(), angle.sin()
        phase = torch.stack(
            [phase[..., 0] * cosine - phase[..., 1] * sine, phase[..., 0] * sine + phase[..., 1] * cosine], -1
        )
        return self.shown(phase.flatten(1)), phase, total + numbers, count + 1


def spec() -> StepSpec:
    """Return the step of a new module, with the names and shapes of its inputs, states and outputs."""
    torch.manual_seed(0)
    states = [
        StateSpec("phase", ("B", PAIRS, 2), initial=torch.tensor([1.0, 0.0]).expand(PAIRS, 2).clone()),
        StateSpec("total", ("B", FEATURES)),
        StateSpec("count", ("B",), "int32"),
    ]
    return StepSpec(NeverForgets().eval(), [InputSpec("numbers", ("B", FEATURES))], states, ["shown"])


def soak(folder: Path, steps: int, seed: int, threads: int) -> dict[str, Any]:
    """Export a bundle, and run it beside its module in float64 and in float32, on random numbers.

    Args:
        folder: the folder for the bundle.
        steps: the number of steps.
        seed: of the numbers.
        threads: of the engine.

    Returns:
        steps: the number of steps.
        count_exact: True if the bundle's count is the right number.
        looks: for about 40 steps, the errors of the result, the phase and the total, of the bundle and of PyTorch's
            float32.
    """
    wanted = spec()
    log("export a step that never forgets")
    path = export(wanted, folder / "own.txl", batch_size=BATCH, verify=False).path
    stream = txl_runtime.load(path, backend="cpu", threads=threads).stream()
    draws = np.random.default_rng(seed)
    modules = [copy.deepcopy(wanted.module).to(dtype) for dtype in (torch.float64, torch.float32)]
    states = [_start(dtype) for dtype in (torch.float64, torch.float32)]
    due = {int(step) for step in np.geomspace(10, steps, LOOKS)} | {steps}
    looks: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        if step % RESET == 0:  # only the second sequence is reset
            stream.reset([1])
            for state in states:
                for tensor, fresh in zip(state, _start(state[0].dtype), strict=True):
                    tensor[1] = fresh[1]
        numbers = draws.uniform(-1, 1, (BATCH, FEATURES)).astype(np.float32)
        result = stream.run({"numbers": numbers})["shown"]
        shown = []
        for side, module in enumerate(modules):
            with torch.no_grad():
                first, *states[side] = module(torch.from_numpy(numbers).to(states[side][0].dtype), *states[side])
            shown.append(first)
        if step in due:
            held = stream.state()
            ours = [result, held["phase"], held["total"]]
            true, plain = ([what, *state[:2]] for what, state in zip(shown, states, strict=True))
            looks.append({"step": step, "bundle": _errors(ours, true), "float32": _errors(plain, true)})
    count = stream.state()["count"].tolist()
    return {"steps": steps, "count_exact": count == [steps, (steps % RESET) + 1], "looks": looks}


def _start(dtype: torch.dtype) -> list[Tensor]:
    """Return the initial phase, total and count of all sequences."""
    phase = torch.tensor([1.0, 0.0], dtype=dtype).expand(BATCH, PAIRS, 2).clone()
    return [phase, torch.zeros(BATCH, FEATURES, dtype=dtype), torch.zeros(BATCH, dtype=torch.int32)]


def _errors(samples: Sequence[Any], true: Sequence[Tensor]) -> list[float]:
    """Return the largest errors of result, phase and total, each divided by max(1, largest true value)."""
    pairs = [(np.asarray(some), tensor.numpy()) for some, tensor in zip(samples, true, strict=True)]
    return [float(np.abs(some - tensor).max() / max(1.0, np.abs(tensor).max())) for some, tensor in pairs]
