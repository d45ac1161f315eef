"""Runs the user's module as the reference of its bundle: in float64 if the module can, one sequence at a time."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from txl_runtime.errors import UsageError
from txl_runtime.types import Array, Arrays, Ids

from txl_export.families.own_module.module_call import Eager, Tries, in_float64
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.sizes import fresh_states, random_inputs, state_specs
from txl_export.proof.references import Reference, States
from txl_export.proof.threads import SMALL

BATCH_AGREEMENT = 1e-4
"""Largest difference, relative and absolute, that rounding explains between a sequence run by itself and among
copies."""
WIDER = (64, 8)
"""Upper limits of integer inputs, largest first. A module that takes integers below neither limit gets 0 and 1."""


class ModuleReference(Reference):
    """Runs the module as a `Reference`. Log-probabilities are computed from logits, as the bundle does.

    If the module does not take a batch of one, or computes something else there, it gets B copies of the sequence.

    Attributes:
        in_double: whether the module computes in float64.
    """

    def __init__(self, plan: Plan) -> None:
        double = in_float64(plan.spec, plan.batch_size, plan.segment_lengths[0])
        self._eager = Eager(plan.spec) if double is None else double
        self._plan, self.in_double = plan, double is not None
        self.small = sum(parameter.numel() for parameter in plan.spec.module.parameters()) < SMALL
        why = "" if self.in_double else " (it does not run in float64, or computes something else there)"
        self.described = f"computed in {'float64' if self.in_double else 'float32'}{why}"
        self._logits = {output.name for output in plan.outputs if output.role == "logits"}
        spec = self._eager.spec
        self._axes = {
            **{entry.name: entry.axes.batch for entry in spec.inputs},
            **{entry.name: entry.axes.batch for entry in plan.outputs if entry.shape is not None},
        }
        self._state_axes = {name: entry.axes.batch for name, entry in state_specs(spec).items()}
        whole = [entry.name for entry in spec.inputs if entry.tokens is None and entry.dtype.startswith("int")]
        self.below = {} if spec.samples else {name: self._widest(name) for name in whole}
        flags = {entry.name: self._going_on(entry.name) for entry in spec.inputs if entry.dtype == "bool"}
        self.flags = {name: value for name, value in flags.items() if value is not None}
        self._copies = 1 if plan.batch_size == 1 or self._takes_one() else plan.batch_size

    def fresh(self, count: int) -> States:
        states = fresh_states(self._eager.spec, count, self._eager.dtype)
        return {name: None if tensor is None else tensor.numpy() for name, tensor in states.items()}

    def step(
        self, inputs: Arrays, states: Mapping[str, Array | None], valid: Ids | None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        copies = self._copies if self._plan.streams == "independent" else 1
        one = copies > 1
        tensors = {name: self._tensor_of(values, self._axes[name], copies) for name, values in inputs.items()}
        held = {
            name: None if values is None else self._tensor_of(values, self._state_axes[name], copies)
            for name, values in states.items()
        }
        counts = None if valid is None else self._tensor_of(valid, 0, copies)
        outputs, after = self._eager(tensors, held, counts)
        for name in self._logits:
            outputs[name] = torch.log_softmax(outputs[name], dim=-1)
        results = {name: _returned(tensor, self._axes[name], one) for name, tensor in outputs.items()}
        return results, {name: _returned(tensor, self._state_axes[name], one) for name, tensor in after.items()}

    def in_single(self) -> ModuleReference | None:
        if not self.in_double:
            return None
        single = copy.copy(self)
        single._eager, single.in_double = Eager(self._plan.spec), False
        return single

    def _tensor_of(self, values: Array, axis: int | None, copies: int) -> Tensor:
        if copies > 1 and axis is not None:
            values = np.repeat(values, copies, axis=axis)
        return torch.from_numpy(np.asarray(values, order="C"))

    def _widest(self, name: str) -> int:
        """Return the largest bound in `WIDER` below which the module takes integers for an input, else 2.

        The test is that the module takes n - 1 and returns finite numbers.
        """
        return next((most for most in WIDER if self._tried(name, most - 1)), 2)

    def _going_on(self, name: str) -> bool | None:
        """Return the flag's value for which results depend more on the state, e.g. False for a flag "begin"."""
        depends = dict[bool, int]()
        for value in (False, True):
            first, later = (self._tried(name, value, segments) for segments in (0, 2))
            if first and later:
                pairs = zip(first, later, strict=True)
                depends[value] = sum(a.shape != b.shape or int((a != b).sum()) for a, b in pairs)
        return max(depends, key=depends.__getitem__, default=None)

    def _tried(self, name: str, value: int, segments: int = 0) -> list[Tensor]:
        """Run a segment whose input `name` is `value` everywhere, after `segments` random segments.

        Returns:
            The results; [] if the module refuses the value or returns numbers that are not finite.
        """
        tries, length = Tries(Eager(self._plan.spec), self._plan.batch_size), self._plan.segment_lengths[0]
        tensors = tries.inputs(length)
        with contextlib.suppress(UsageError):
            tensors[name].fill_(value)
            step_results = tries.eager(tensors, tries.states(length, segments), tries.valid(length))
            results = [tensor for part in step_results for tensor in part.values()]
            return results if all(bool(tensor.isfinite().all()) for tensor in results) else []
        return []

    def _takes_one(self) -> bool:
        """Return whether the module runs with a batch of one and computes the same there as for each of B copies."""
        spec, length, many = self._eager.spec, self._plan.segment_lengths[-1], self._plan.batch_size
        inputs = random_inputs(spec, 1, length, np.random.default_rng(0), spec.samples)
        states, counts = fresh_states(spec, 1, self._eager.dtype), torch.full((1,), length, dtype=torch.int32)
        try:
            alone = self._eager(inputs, states, counts)
        except UsageError:
            return False
        if self._plan.streams != "independent":
            return True
        copied = {name: self._tensor_of(tensor.numpy(), self._axes[name], many) for name, tensor in inputs.items()}
        together = self._eager(copied, fresh_states(spec, many, self._eager.dtype), counts.repeat(many))
        axes = (self._axes, self._state_axes)
        return all(
            _agree(tensor, _first(among[name], known[name]))
            for one, among, known in zip(alone, together, axes, strict=True)
            for name, tensor in one.items()
        )


def _first(tensor: Tensor, axis: int | None) -> Tensor:
    return tensor if axis is None else tensor.narrow(axis, 0, 1)


def _agree(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal; floats may differ by rounding (`BATCH_AGREEMENT`)."""
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    return bool(torch.allclose(one, other, rtol=BATCH_AGREEMENT, atol=BATCH_AGREEMENT, equal_nan=True))


def _returned(tensor: Tensor, axis: int | None, one: bool) -> Array:
    """Return a tensor as an array; with `one` only its first sequence, because all sequences are copies."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise UsageError(
            f"after it was captured the module returns a {type(tensor).__name__}, because it keeps what it computes in "
            "a place that is no declared state, such as a global variable; declare that as a state"
        )
    values: Array = tensor.detach().numpy()
    return np.take(values, [0], axis=axis) if one and axis is not None else values
