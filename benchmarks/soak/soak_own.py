"""Measures a state that never forgets over many steps: how far a bundle departs from its module in float64.

A Transformer-XL forgets everything, also rounding errors, after some hundred tokens. This module forgets nothing: it
has a rotation that neither grows nor fades, a sum, and a count. Its rounding errors can only add up, in PyTorch's
float32 too, so the module also runs in float32.
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
"""Number of steps between resets of the second sequence."""


class NeverForgets(nn.Module):
    """A step on numbers with three states that never fade."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.shown = nn.Linear(FEATURES, PAIRS), nn.Linear(2 * PAIRS, FEATURES)

    def forward(self, numbers: Tensor, phase: Tensor, total: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        """Run a step: numbers [B, 8], phase [B, 32, 2], total [B, 8] and count [B] → a result and the three states."""
        angle = self.turn(numbers)
        cosine, sine = angle.cos(), angle.sin()
        phase = torch.stack(
            [phase[..., 0] * cosine - phase[..., 1] * sine, phase[..., 0] * sine + phase[..., 1] * cosine], -1
        )
        return self.shown(phase.flatten(1)), phase, total + numbers, count + 1


def spec() -> StepSpec:
    """Return the step with names and shapes."""
    torch.manual_seed(0)
    states = [
        StateSpec("phase", ("B", PAIRS, 2), initial=torch.tensor([1.0, 0.0]).expand(PAIRS, 2).clone()),
        StateSpec("total", ("B", FEATURES)),
        StateSpec("count", ("B",), "int32"),
    ]
    return StepSpec(NeverForgets().eval(), [InputSpec("numbers", ("B", FEATURES))], states, ["shown"])


def soak(folder: Path, steps: int, seed: int, threads: int) -> dict[str, Any]:
    """Step a bundle, its module in float64 and its module in float32 side by side.

    Returns:
        steps: number of steps. count_exact: True if the count has the right value. looks: from time to time, the errors
            of the result, of the phase and of the total, in the bundle and in PyTorch's float32.
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
        if step % RESET == 0:  # the second sequence begins anew now and then, the first one never
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
    """Return the initial states."""
    phase = torch.tensor([1.0, 0.0], dtype=dtype).expand(BATCH, PAIRS, 2).clone()
    return [phase, torch.zeros(BATCH, FEATURES, dtype=dtype), torch.zeros(BATCH, dtype=torch.int32)]


def _errors(samples: Sequence[Any], true: Sequence[Tensor]) -> list[float]:
    """Return the largest errors of the result, the phase and the total, relative to max(1, largest value)."""
    pairs = [(np.asarray(some), tensor.numpy()) for some, tensor in zip(samples, true, strict=True)]
    return [float(np.abs(some - tensor).max() / max(1.0, np.abs(tensor).max())) for some, tensor in pairs]
