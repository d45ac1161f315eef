"""Builds skrl's policies: the linear layers that its runner makes of a config, and its standard scaler.

These policies have no memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from txl_runtime.errors import UsageError

from txl_export.adapters.policies.shape import Recurrence, Shape, count
from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec

KEYS = ("widths", "activations", "normalised")
SCALER = {"epsilon": 1e-8, "clip_threshold": 5.0}
"""Defaults of the package's RunningStandardScaler: the number added to the deviation, and the limit of results."""
ACTIVATIONS = {"": nn.Identity, "elu": nn.ELU, "leaky_relu": nn.LeakyReLU, "relu": nn.ReLU, "selu": nn.SELU}
ACTIVATIONS |= {"sigmoid": nn.Sigmoid, "softplus": nn.Softplus, "softsign": nn.Softsign, "tanh": nn.Tanh}


class LayeredPolicy(nn.Module):
    """Linear layers, each followed by an activation, and the numbers that normalise observations."""

    def __init__(
        self, widths: list[int], activations: list[str], normalised: bool, scaler: Mapping[str, float] = SCALER
    ) -> None:
        super().__init__()
        self.widths, self.layers = widths, nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.activations, self.normalised = [ACTIVATIONS[name]() for name in activations], normalised
        self.epsilon, self.clip = scaler["epsilon"], scaler["clip_threshold"]
        if normalised:
            self.register_buffer("running_mean", torch.zeros(widths[0]))
            self.register_buffer("running_variance", torch.ones(widths[0]))


def build(config: Mapping[str, Any]) -> LayeredPolicy:
    """Return a policy with layers of `widths`, e.g. [48, 128, 12] from observations to actions.

    `activations` has the name of the activation behind each layer, "" for none. `scaler` has those arguments of the
    RunningStandardScaler that differ from the package's defaults.
    """
    widths, activations = [count("widths", size) for size in config["widths"]], list(config["activations"])
    if len(activations) != len(widths) - 1 or not set(activations) <= ACTIVATIONS.keys():
        known = ", ".join(filter(None, ACTIVATIONS))
        raise UsageError(f"activations are {activations} of {len(widths) - 1} layers, expected one each of {known}")
    scaler = SCALER | dict(config.get("scaler") or {})
    numbers = all(isinstance(value, int | float) and 0 <= value < math.inf for value in scaler.values())
    if scaler.keys() != SCALER.keys() or not numbers:
        raise UsageError(f"the scaler's arguments are {scaler}, expected numbers for epsilon and clip_threshold")
    return LayeredPolicy(widths, activations, bool(config["normalised"]), scaler)


def shape(module: Any, config: Mapping[str, Any]) -> Shape | None:
    """Return the `Shape` of a module from `build`; None for any other module."""
    if not isinstance(module, LayeredPolicy):
        return None
    return Shape({}, [InputSpec("obs", ("B", module.widths[0]))], [OutputSpec("action")], _play)


def _play(policy: Any, inputs: Named, recur: Recurrence) -> tuple[Tensor]:
    rows = inputs["obs"]
    if policy.normalised:
        rows = (rows - policy.running_mean) / (policy.running_variance.sqrt() + policy.epsilon)
        rows = rows.clamp(-policy.clip, policy.clip)
    for layer, activation in zip(policy.layers, policy.activations, strict=True):
        rows = activation(layer(rows))
    return (rows,)
