"""Whether each state of a bundle changes what comes after it: one that does not was perhaps lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from txl_runtime.model import Model

from txl_export.proof.bits import differing_values
from txl_export.proof.input_source import InputSource

BEFORE, AFTER = 4, 4
"""Segments that fill the state, beside one for every program, and segments in which a difference may show."""
ROUNDS = 8
"""How often a state that changed nothing is tried again further on: a segment may clear what was before it."""


def idle_states(model: Model, samples: Mapping[str, Any] | None) -> list[str]:
    """Names of states that can be emptied, in each of some rounds, without changing any output of what follows."""
    if all(state.counted for state in model.manifest.states):
        return []
    draws, length, count = np.random.default_rng(11), model.segment_lengths[0], model.batch_size
    source, stream = InputSource(model.manifest, samples, draws), model.stream()
    idle = [state.name for state in model.manifest.states if not state.counted]
    for _ in range(ROUNDS):
        for _ in range(BEFORE + len(model.manifest.programs)):
            stream.run(source.take(count, length))
        calls, held = [source.take(count, length) for _ in range(AFTER)], stream.snapshot()
        expected, states = [stream.run(inputs) for inputs in calls], held.states or {}
        for name in [name for name in idle if name in states]:
            emptied = np.zeros_like(states[name]) if states[name].any() else np.ones_like(states[name])
            stream.restore(replace(held, states=states | {name: emptied}))
            pairs = zip(expected, [stream.run(inputs) for inputs in calls], strict=True)
            if any(differing_values(one[key], two[key]) for one, two in pairs for key in one):
                idle.remove(name)
        if not idle:
            break
    return idle
