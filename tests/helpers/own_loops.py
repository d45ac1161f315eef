"""A step beside a package's own loop: the same inputs, sequences reset one by one, all outputs and states compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states
from txl_export.families.own_module.spec import StepSpec

LIMIT = 1e-4
Arrays: TypeAlias = Mapping[str, Any]


class OwnLoop(Protocol):
    """A package's model with whatever its own sampler, runner or player holds between calls.

    `run` returns outputs, the states before the call and those after it; of these it may tell one alone.
    """

    def reset(self, rows: Sequence[int]) -> None: ...

    def run(self, inputs: Arrays) -> tuple[Arrays, Arrays, Arrays]: ...


class Stepped:
    """A specification's step as the runtime's stream, without an export."""

    def __init__(self, spec: StepSpec, batch_size: int) -> None:
        self._eager, self._axes = Eager(spec), {entry.name: entry.shape.index("B") for entry in spec.states}
        self._fresh = fresh_states(spec, batch_size)
        self._states: dict[str, Any] = dict(self._fresh)

    def run(self, inputs: Arrays) -> dict[str, Any]:
        outputs, self._states = self._eager({k: torch.from_numpy(v) for k, v in inputs.items()}, self._states)
        return {name: tensor.numpy() for name, tensor in outputs.items()}

    def reset(self, rows: Sequence[int]) -> None:
        for name, axis in self._axes.items():
            chosen, index = self._fresh[name], torch.tensor(rows)
            assert chosen is not None
            self._states[name] = self._states[name].index_copy(axis, index, chosen.index_select(axis, index))

    def state(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self._states.items()}


def randomised(module: Any) -> Any:
    """Weights of N(0, 0.3) and norms around 1: every term matters. Frequencies and what else is a buffer stay."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 2:  # a convolution sums over many
                nn.init.normal_(parameter, std=0.05, generator=draws)
            else:
                nn.init.normal_(parameter, 1.0 if "norm" in name and "weight" in name else 0.0, 0.3, generator=draws)
    return module.eval()


def apart(
    stream: Any,
    own: OwnLoop,
    draw: Callable[[np.random.Generator], Arrays],
    batch_size: int,
    steps: int = 200,
    longest: int | None = None,
) -> float:
    """The largest difference of any output or state over some steps, relative to max(1, the largest value of it).

    Args:
        stream: of the runtime, or a `Stepped`.
        own: the package's loop.
        draw: the inputs of a step.
        batch_size: B.
        steps: to run.
        longest: an episode; then a sequence is reset in any case.
    """
    random, worst, ages = np.random.default_rng(7), 0.0, [0] * batch_size
    for step in range(steps):
        if rows := [row for row in range(batch_size) if ages[row] and (random.random() < 0.04 or ages[row] == longest)]:
            stream.reset(rows)
            own.reset(rows)
            ages = [0 if row in rows else age for row, age in enumerate(ages)]
        inputs = draw(random)
        before = stream.state()
        ours = stream.run(inputs)
        outputs, earlier, later = own.run(inputs)
        ages = [age + 1 for age in ages]
        assert ours.keys() == outputs.keys(), step
        for found, wanted in ((ours, outputs), (before, earlier), (stream.state(), later)):
            for name, array in wanted.items():
                assert found[name].shape == array.shape, name
                scale = max(1.0, float(np.abs(array).max(initial=0)))
                worst = max(worst, float(np.abs(found[name] - array).max(initial=0)) / scale)
    return worst
