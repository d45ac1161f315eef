"""The step in C beside ONNX Runtime over 100,000 single steps: the difference does not grow, state included."""

from __future__ import annotations

import numpy as np
import pytest
from frozen import frozen
from native_steps import pair
from txl_runtime.ladder import no_drift_limit

STEPS, APART = 100_000, 250


@pytest.mark.slow(keep=1)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "most"), [("ring", 1e-5), ("int8", 0.1)])
def test_a_hundred_thousand_steps_do_not_drift(name, most):
    expected, found = pair(frozen(name))
    one, other = expected.stream(), found.stream()
    tokens = np.random.default_rng(0).integers(0, expected.vocab_size, (STEPS, expected.batch_size, 1), dtype=np.int32)
    logprobs, states, size = [], [], 1.0
    for number, token in enumerate(tokens):
        wanted, given = one.step(token), other.step(token)
        if number % APART == APART - 1:
            logprobs.append(np.abs(wanted - given).max())
            memory, held = one.memory(), other.memory()
            states.append(max(np.abs(memory[key] - held[key]).max() for key in memory))
            size = max(size, *(float(np.abs(array).max()) for array in memory.values()))
    assert max(logprobs) < most
    assert max(states) < most * size
    for differences in (logprobs, states):
        early, late = (float(np.mean(part)) for part in np.array_split(differences, 4)[::3])
        assert late <= no_drift_limit(early, None if name == "ring" else most / 100), (early, late)
    print(f"{name}: log-probabilities {max(logprobs):.1e}, memory {max(states):.1e}")
