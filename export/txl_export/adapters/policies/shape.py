"""Describes the parts of a recurrent policy for all packages, and runs its LSTMs and GRUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor
from txl_runtime.errors import UsageError

from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec, StateSpec


@dataclass(frozen=True)
class Shape:
    """A description of one package's policy, from which the adapter makes a step.

    Attributes:
        rnns: the path of each LSTM or GRU in the module by role, e.g. {"actor": "memory_a.rnn"}.
        inputs: observations.
        outputs: the results of `play`, in this order.
        play: f(policy, inputs, recurrence) → outputs.
        starts: whether the package passes `episode_start`.
    """

    rnns: Mapping[str, str]
    inputs: Sequence[InputSpec]
    outputs: Sequence[OutputSpec]
    play: Callable[[Any, Named, Recurrence], Sequence[Tensor]]
    starts: bool = False


def count(name: str, value: Any) -> int:
    """Return a config's value, after a check that it is a size.

    Raises:
        UsageError: the value is no integer of at least 1.
    """
    if type(value) is not int or value < 1:
        raise UsageError(f"{name} is {value!r} in the config, expected a whole number from 1")
    return value


class Recurrence:
    """Runs the LSTMs and GRUs of a policy during one step, and holds their states by name."""

    def __init__(self, module: Any, rnns: Mapping[str, str], states: Named) -> None:
        self._rnns = {role: attrgetter(path)(module) for role, path in rnns.items()}
        self._names = {role: state_names(rnns, role, rnn) for role, rnn in self._rnns.items()}
        self.states = dict(states)

    def __call__(self, role: str, rows: Tensor) -> Tensor:
        """Run a role's LSTM or GRU: rows [B, n] → [B, width], or [L, B, n] → [L, B, width]."""
        names = self._names[role]
        held = tuple(self.states[name] for name in names)
        alone = rows.dim() == 2
        results, after = self._rnns[role](rows[None] if alone else rows, held if len(held) == 2 else held[0])
        self.states.update(zip(names, after if len(held) == 2 else (after,), strict=True))
        rows = results[0] if alone else results
        return rows


def state_names(rnns: Mapping[str, str], role: str, rnn: Any) -> list[str]:
    """Return the names of an LSTM's states, ["h", "c"], or a GRU's, ["h"]; with several roles, names like "actor.h"."""
    parts = ("h", "c") if rnn.mode == "LSTM" else ("h",)
    return [f"{role}.{part}" if len(rnns) > 1 else part for part in parts]


def state_specs(module: Any, rnns: Mapping[str, str]) -> list[StateSpec]:
    """Return the states of all LSTMs and GRUs, [layers, B, width] each.

    Raises:
        UsageError: an LSTM or GRU runs in both directions, or has the batch as its first axis.
    """
    specs = []
    for role, path in rnns.items():
        rnn = attrgetter(path)(module)
        for option in ("bidirectional", "batch_first"):
            if getattr(rnn, option):
                raise UsageError(f"{path} has {option}, which no step can carry; train it without")
        for name in state_names(rnns, role, rnn):
            width = rnn.proj_size if rnn.proj_size and name.endswith("h") else rnn.hidden_size
            specs.append(StateSpec(name, (rnn.num_layers, "B", width)))
    return specs
