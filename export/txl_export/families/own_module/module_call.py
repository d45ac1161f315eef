"""Runs the user's module for one step, in whatever way it is called: inputs and states by name in, and out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from txl_runtime.errors import UsageError

from txl_export.families.own_module.attributes import leaves, put, value_at
from txl_export.families.own_module.own_code import own_code
from txl_export.families.own_module.sizes import (
    TORCH,
    States,
    fresh_states,
    has_length,
    measured,
    output_specs,
    random_inputs,
    shown,
)
from txl_export.families.own_module.spec import VALID, StateSpec, StepSpec

FLOAT64_PARAMETERS = 100_000_000
"""A larger module is not copied in double precision."""
_AGREEMENT = 1e-3
"""Relative difference between a module and its copy in double precision that says that they compute the same."""
_OUTPUT_DTYPES = (torch.float32, torch.int32, torch.int64, torch.bool)


@dataclass(frozen=True)
class RawStep:
    """One call as the module saw it: what it was given and what it returned, neither copied nor cast nor checked."""

    inputs: dict[str, Tensor]
    states: dict[str, Tensor | None]
    outputs: dict[str, Any]
    after: dict[str, Any]


class Eager:
    """A module as a function of inputs and states, in eager mode.

    Tensors are as a bundle has them, int32 where the module takes int64; they are cast on the way in and out. Nothing
    that is given is written to, nothing that is returned shares memory with it, and attributes that are states are
    afterwards what they were. The module is put into evaluation mode.

    Attributes:
        spec: of the step.
        dtype: of floating inputs and states: float32, or float64 of a copy made by `in_float64`.
    """

    def __init__(self, spec: StepSpec, dtype: torch.dtype = torch.float32) -> None:
        self.spec, self.dtype = spec, dtype
        spec.module.eval()

    def __call__(
        self, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], valid: Tensor | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """One step without gradients, its results checked against the specification.

        Args:
            inputs: by name.
            states: by name; None, or left out, where one is absent.
            valid: int32 [B], rows that count, for a module that takes them (`StepSpec.lengths`).

        Raises:
            OwnCodeError: the module raised an exception.
            UsageError: it returned something else than was declared.
        """
        kept = {name: tensor if tensor is None else tensor.clone() for name, tensor in states.items()}
        step = self.checked({name: tensor.clone() for name, tensor in inputs.items()}, kept, valid)
        outputs = {name: _narrowed(name, tensor).clone() for name, tensor in step.outputs.items()}
        return outputs, {name: _narrowed(name, tensor).clone() for name, tensor in step.after.items()}

    def traced(
        self, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], valid: Tensor | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """As a call, for use inside a module that is being captured: nothing is checked and no exception renamed."""
        step = self.raw(inputs, states, valid)
        outputs = {name: _as_int32(tensor) for name, tensor in step.outputs.items()}
        return outputs, {name: _as_int32(tensor) for name, tensor in step.after.items()}

    def checked(
        self, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], valid: Tensor | None = None
    ) -> RawStep:
        """As a call, but what the module was given and returned is as it was.

        Raises:
            OwnCodeError, UsageError: as a call.
        """
        batch, length = measured(self.spec, inputs)
        segments = f" with a segment of {length}" if has_length(self.spec) else ""
        with torch.no_grad(), own_code(f"the module failed{segments}"):
            step = self.raw(inputs, states, valid)
        self._check(step, batch, length)
        return step

    def raw(
        self, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor | None], valid: Tensor | None = None
    ) -> RawStep:
        """The call itself; attributes that are states are copies of what is given, and put back afterwards."""
        module, entries = self.spec.module, self.spec.states
        given = {entry.name: self._cast(inputs[entry.name], entry.module_dtype) for entry in self.spec.inputs}
        held = {entry.name: self._held(states.get(entry.name), entry) for entry in entries}
        kept = {entry.attribute: entry for entry in entries if entry.attribute is not None}
        found = {path: value_at(module, path) for path in kept}
        for path, entry in kept.items():
            put(module, path, held[entry.name])
        try:
            arguments = {entry.name: held[entry.name] for entry in entries if entry.attribute is None}
            outputs, after = called(self.spec, given, arguments, valid)
            after |= {entry.name: value_at(module, path) for path, entry in kept.items()}
        finally:
            for path, value in found.items():
                put(module, path, value)
        return RawStep(given, held, outputs, {entry.name: after[entry.name] for entry in entries})

    def _cast(self, tensor: Tensor, dtype: str) -> Tensor:
        return tensor.to(self.dtype if dtype == "float32" else TORCH[dtype])

    def _held(self, tensor: Tensor | None, entry: StateSpec) -> Tensor | None:
        if tensor is None:
            return None
        tensor = self._cast(tensor, entry.dtype)
        return tensor if entry.attribute is None else tensor.clone()

    def _check(self, step: RawStep, batch_size: int, length: int) -> None:
        """Hold what came back against the specification."""
        for entry in output_specs(self.spec):
            found = _tensor(f"output {entry.name}", step.outputs[entry.name])
            if found.dtype not in _OUTPUT_DTYPES and found.dtype != self.dtype:
                raise UsageError(
                    f"output {entry.name} is {_word(found.dtype)}, expected float32, int32, int64 or bool; cast it "
                    "in the module"
                )
            if entry.shape is not None:
                wanted = entry.axes.sizes(batch_size, length)
                if tuple(found.shape) != wanted:
                    raise UsageError(
                        f"output {entry.name} is {shown(tuple(found.shape))} for B = {batch_size} and L = {length}, "
                        f"expected {shown(wanted)}; correct its OutputSpec or the module"
                    )
        for state in self.spec.states:
            self._check_state(state, _tensor(f"state {state.name}", step.after[state.name]), batch_size)

    def _check_state(self, entry: StateSpec, found: Tensor, batch_size: int) -> None:
        wanted = self.dtype if entry.dtype == "float32" else TORCH[entry.dtype]
        both_floating = wanted.is_floating_point and found.is_floating_point()
        if found.dtype != wanted and not (self.dtype == torch.float64 and both_floating):
            raise UsageError(
                f"state {entry.name} comes back as {_word(found.dtype)}, expected {entry.dtype}, as it went in; cast "
                "it in the module, or correct its StateSpec"
            )
        sizes, most = tuple(found.shape), entry.axes.sizes(batch_size, 0)
        if entry.grows is not None and len(sizes) == len(most):
            rows = sizes[entry.grows]
            if rows > most[entry.grows]:
                raise UsageError(
                    f"state {entry.name} has {rows} rows along axis {entry.grows}, expected at most "
                    f"{most[entry.grows]}; cut it in the module, or correct its StateSpec"
                )
            most = tuple(rows if axis == entry.grows else size for axis, size in enumerate(most))
        if sizes != most:
            raise UsageError(
                f"state {entry.name} comes back as {shown(sizes)}, expected {shown(most)}, as its StateSpec says; "
                "correct the one or the other"
            )


class Tries:
    """Inputs and states to try a module on.

    Args:
        eager: the module.
        batch_size: B.
        seed: of the inputs.
    """

    def __init__(self, eager: Eager, batch_size: int, seed: int = 2) -> None:
        self.eager, self.batch_size = eager, batch_size
        self._generator = np.random.default_rng(seed)

    def inputs(self, length: int) -> dict[str, Tensor]:
        """Those of one segment."""
        spec = self.eager.spec
        return random_inputs(spec, self.batch_size, length, self._generator, spec.samples)

    def valid(self, length: int) -> Tensor:
        """Every row of a segment counts."""
        return torch.full((self.batch_size,), length, dtype=torch.int32)

    def fresh(self) -> States:
        """Those before the first segment."""
        return fresh_states(self.eager.spec, self.batch_size, self.eager.dtype)

    def states(self, length: int, segments: int = 2) -> States:
        """Those after some segments from the start."""
        states = self.fresh()
        for _ in range(segments):
            states = dict(self.eager(self.inputs(length), states, self.valid(length))[1])
        return states


def called(
    spec: StepSpec, given: dict[str, Tensor], held: dict[str, Tensor | None], valid: Tensor | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call a module in its own way, with inputs and with the states that are arguments: outputs and states by name.

    Raises:
        UsageError: it returned something else than was declared.
    """
    names = [entry.name for entry in output_specs(spec)]
    if spec.step is not None:
        named = {**given, VALID: valid} if spec.lengths else dict(given)
        return _by_name(spec.step(spec.module, named, dict(held)), names, list(held))
    counted = [valid] if spec.lengths else []
    return _in_order(spec.module(*given.values(), *held.values(), *counted), names, list(held))


def _by_name(results: Any, outputs: Sequence[str], states: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a step function returned."""
    if not isinstance(results, tuple) or len(results) != 2 or not all(isinstance(part, Mapping) for part in results):
        raise UsageError(
            f"step returned {_described(results)}, expected two dictionaries: outputs and states by their names"
        )
    for what, part, names in (("outputs", results[0], outputs), ("states", results[1], states)):
        missing = [name for name in names if name not in part]
        extra = [str(name) for name in part if name not in names]
        if missing or extra:
            found = [f"lack {', '.join(missing)}"] * bool(missing) + [f"have also {', '.join(extra)}"] * bool(extra)
            raise UsageError(
                f"the {what} of step {' and '.join(found)}, expected {', '.join(names) or 'none'}; return or declare "
                "the same"
            )
    return {name: results[0][name] for name in outputs}, {name: results[1][name] for name in states}


def _in_order(results: Any, outputs: Sequence[str], states: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a module returned."""
    wanted = [*outputs, *states]
    if len(wanted) == 1 and isinstance(results, Tensor):
        results = (results,)
    if not isinstance(results, (tuple, list)) or len(results) != len(wanted):
        raise UsageError(
            f"the module returned {_described(results)}, expected {len(wanted)} tensors: {', '.join(wanted)} "
            "(outputs, then states); declare what it returns, or give step="
        )
    first = len(outputs)  # an output may be called as a state is
    return dict(zip(outputs, results[:first], strict=True)), dict(zip(states, results[first:], strict=True))


def _described(results: Any) -> str:
    if isinstance(results, (tuple, list)):
        return f"a {type(results).__name__} of {len(results)}"
    return "one tensor" if isinstance(results, Tensor) else f"a {type(results).__name__}"


def _tensor(what: str, value: Any) -> Tensor:
    if isinstance(value, FakeTensor):
        raise UsageError(
            f"{what} depends on a tensor that was left by a capture: the module keeps it outside itself, such as in a "
            "variable of another file; keep it in an attribute of the module and declare that"
        )
    if isinstance(value, Tensor):
        return value
    raise UsageError(f"{what} is a {type(value).__name__}, expected a tensor; return one tensor for each name")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_int32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor


def _narrowed(name: str, tensor: Tensor) -> Tensor:
    """As int32 where it is int64.

    Raises:
        UsageError: a value is too large for that.
    """
    narrow = _as_int32(tensor)
    if narrow is not tensor and not torch.equal(narrow.to(torch.int64), tensor):
        raise UsageError(f"{name} holds {int(tensor.abs().max())}, expected what fits int32; a bundle has no int64")
    return narrow


def in_float64(spec: StepSpec, batch_size: int, length: int) -> Eager | None:
    """A copy of the module in double precision; None where it does not run in it, or computes something else."""
    if sum(parameter.numel() for parameter in spec.module.parameters()) > FLOAT64_PARAMETERS:
        return None
    try:
        module = copy.deepcopy(spec.module).double()
        for path, value in leaves(module).items():
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                put(module, path, value.double())
        for part in module.modules():
            if isinstance(part, torch.nn.RMSNorm) and part.eps is None:  # the dtype's, as it was
                part.eps = torch.finfo(torch.float32).eps
        double, single = Eager(replace(spec, module=module), torch.float64), Eager(spec)
        return double if _agree(single, double, batch_size, length) else None
    except Exception:  # whatever third parties' code does in a precision that it was not written for
        return None


def _agree(single: Eager, double: Eager, batch_size: int, length: int) -> bool:
    """Whether both compute the same over two segments, the second of them in double precision somewhere."""
    spec, generator = single.spec, np.random.default_rng(0)
    ours = fresh_states(spec, batch_size)
    theirs = fresh_states(double.spec, batch_size, torch.float64)
    valid = torch.full((batch_size,), length, dtype=torch.int32)
    seen = False
    for _ in range(2):
        inputs = random_inputs(spec, batch_size, length, generator, spec.samples)
        outputs, after = single(inputs, ours, valid)
        expected, beyond = double(inputs, theirs, valid)
        for name, tensor in (outputs | {f"state.{name}": tensor for name, tensor in after.items()}).items():
            other = beyond[name.removeprefix("state.")] if name.startswith("state.") else expected[name]
            seen = seen or other.dtype == torch.float64
            if tensor.shape != other.shape:
                return False
            if not difference(tensor, other) <= _AGREEMENT:
                return False
        ours, theirs = dict(after), dict(beyond)
    return seen


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors of one shape, divided by the second's largest value where that is above 1.

    NaN where either holds one.
    """
    if not other.numel():
        return 0.0
    apart = (one.double() - other.double()).abs()
    apart = torch.where(one == other, torch.zeros_like(apart), apart)  # infinite on both sides
    finite = other.double().abs()
    largest = float(torch.where(finite.isfinite(), finite, torch.zeros_like(finite)).max())
    return float(apart.max()) / max(1.0, largest)
