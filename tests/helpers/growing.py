"""A package's own call, whose memory grows, beside the step or the bundle that an adapter made of its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import txl_export
import txl_runtime
from torch import Tensor
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states, random_inputs
from txl_export.families.own_module.spec import StepSpec

Arrays: TypeAlias = Mapping[str, Any]
Own: TypeAlias = Callable[[Tensor, Any], tuple[Tensor, Mapping[str, Tensor], Any]]
"""(a segment of one sequence, what was carried or None) → (output, the rows of each state that are filled, carried)."""
BATCH = 3


def error(found: Any, wanted: Any) -> float:
    """The largest difference, relative to max(1, the largest value)."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, f"{found.shape} in place of {wanted.shape}"
    return float(np.abs(found - wanted).max(initial=0) / max(1.0, float(np.abs(wanted).max(initial=0))))


def state_error(found: Any, filled: Any, rows: int = 1) -> float:
    """The same of a state whose newest rows stand at the end of axis `rows`; the others have to be zero."""
    more = found.shape[rows] - filled.shape[rows]
    empty, held = np.split(np.asarray(found), [more], axis=rows)
    assert not empty.any()
    return error(held, filled)


def step_error(
    spec: StepSpec, own: Own, lengths: Sequence[int], axis: int = 1, dtype: torch.dtype = torch.float64
) -> float:
    """The largest error of a step; after a third of the segments the second sequence begins anew.

    Args:
        spec: the step.
        own: the package's own call.
        lengths: of the segments; a step that takes `valid` is given padding up to the longest.
        axis: of the rows in the states that grow.
        dtype: float32 where the package does not run in float64.
    """
    spec.module.to(dtype)
    step, states = Eager(spec, dtype), fresh_states(spec, 2, dtype)
    batch = {entry.name: entry.shape.index("B") for entry in spec.states}
    draws, carried, worst = np.random.default_rng(1), [None, None], 0.0
    for number, length in enumerate(lengths):
        if number == len(lengths) // 3:
            carried[1] = None
            for name, held in states.items():
                assert held is not None
                held.select(batch[name], 1).zero_()
        inputs = random_inputs(spec, 2, max(lengths) if spec.lengths else length, draws)
        outputs, after = step(inputs, states, torch.full((2,), length, dtype=torch.int32))
        states = dict(after)
        ((given,), (output,)) = inputs.values(), outputs.values()
        for row in (0, 1):
            wanted, filled, carried[row] = _called(own, given[row : row + 1, :length], carried[row], dtype)
            worst = max(worst, error(output[row : row + 1, : wanted.shape[1]], wanted))
            for name, rows in filled.items():
                worst = max(worst, state_error(after[name].narrow(batch[name], row, 1), rows, axis))
    return worst


def bundle_error(spec: StepSpec, own: Own, path: Path, lengths: Sequence[int], axis: int = 1) -> float:
    """The largest error of a bundle over 200 segments, in which sequences rest, stop early and begin anew."""
    made = txl_export.export(spec, path, batch_size=BATCH, segment_length=lengths, verify=False)
    assert made.manifest.streams == "independent"
    stream, draws = txl_runtime.load(made.path, "cpu").stream(), np.random.default_rng(2)
    logits = made.manifest.outputs[0].role == "logprobs"
    batch = {entry.name: entry.shape.index("B") for entry in spec.states}
    carried, worst = [None] * BATCH, 0.0
    for _ in range(200):
        length = int(draws.choice(lengths))
        resets = draws.random(BATCH) < 0.05
        stream.reset(resets)
        carried = [None if reset else held for held, reset in zip(carried, resets, strict=True)]
        inputs = random_inputs(spec, BATCH, length, draws)
        counts = draws.integers(0, length + 1, BATCH) if spec.lengths else length * draws.integers(0, 2, BATCH)
        (found,) = stream.run({name: tensor.numpy() for name, tensor in inputs.items()}, counts).values()
        (given,), states = inputs.values(), stream.state()
        for row in np.flatnonzero(counts):
            wanted, filled, carried[row] = _called(own, given[row : row + 1, : counts[row]], carried[row])
            told = wanted.log_softmax(-1) if logits else wanted
            worst = max(worst, error(found[row : row + 1, : counts[row]], told))
            for name, rows in filled.items():
                ours = np.take(states[name], [row], axis=batch[name])
                worst = max(worst, state_error(ours, rows, axis))
    return worst


def _called(own: Own, given: Tensor, carried: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any, Any]:
    with torch.no_grad():
        return own(given.to(dtype) if given.is_floating_point() else given, carried)
