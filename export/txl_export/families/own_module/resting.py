"""Finds the state that a step reaches in silence, so that a stream begins with that state and not with zeros.

The network of an amplifier has biases: from a state of zeros it first makes a click, until its state has settled.
"""

from __future__ import annotations

import dataclasses

import torch

from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states
from txl_export.families.own_module.spec import StepSpec

BLOCK, MOST = 4096, 1 << 19
"""Number of positions of silence between two looks at the states, and maximum of all positions: 11 s at 48 kHz."""
STILL = 1e-7
"""Largest change of a state that is taken for no change, relative to its largest value, or to 1 if that is larger."""


def at_rest(spec: StepSpec) -> StepSpec:
    """Return a step whose states start as they are after a long silence: zeros in every input.

    Silence ends when no state changes any more, or after `MOST` positions. `facts["rest"]` has the number of positions
    and the last relative change. The step must have "L", states of fixed size and float inputs, e.g. `input` ("B",
    "L").

    Raises:
        OwnCodeError: the module fails on silence.
        UsageError: a result differs from its declaration.
    """
    step, states = Eager(spec), fresh_states(spec, 1)
    silence = {entry.name: torch.zeros(entry.axes.sizes(1, BLOCK)) for entry in spec.inputs}
    positions, moved = 0, 1.0
    while moved > STILL and positions < MOST:
        _, after = step(silence, states)
        pairs = [(states[name], after[name]) for name in after]
        moved = max((_moved(old, new) for old, new in pairs if old is not None and new is not None), default=0.0)
        states, positions = dict(after), positions + BLOCK
    rested = [dataclasses.replace(entry, initial=states[entry.name]) for entry in spec.states]
    facts = {**(spec.facts or {}), "rest": {"positions": positions, "moved": moved}}
    return dataclasses.replace(spec, states=rested, facts=facts)


def _moved(old: torch.Tensor, new: torch.Tensor) -> float:
    return float((new - old).abs().max() / new.abs().max().clamp(min=1))
