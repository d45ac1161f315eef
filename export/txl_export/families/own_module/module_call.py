"""Calls the user's module for one step, under any calling convention: inputs, states and outputs have names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from txl_runtime.errors import UsageError
from txl_runtime.selftest import relative_difference

from txl_export.families.own_module.attributes import leaves, put, value_at
from txl_export.families.own_module.own_code import own_code
from txl_export.families.own_module.sizes import TORCH, States, fresh_states, measured, random_inputs, shown
from txl_export.families.own_module.spec import VALID, StepSpec

Tensors: TypeAlias = Mapping[str, Tensor]
Held: TypeAlias = Mapping[str, Tensor | None]
Results: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]
"""The outputs by name, and the states by name."""

FLOAT64_PARAMETERS = 100_000_000
"""Maximum number of parameters of a module that is also computed in float64: the copy takes twice its memory."""
_AGREEMENT = 1e-3
"""Largest relative difference between a module and its float64 copy for the copy to serve as the reference."""


@dataclass(frozen=True)
class RawStep:
    """One call of the module: the tensors that went in and came out, neither copied nor cast nor checked."""

    inputs: dict[str, Tensor]
    states: dict[str, Tensor | None]
    outputs: dict[str, Any]
    after: dict[str, Any]


class Eager:
    """A module as a function of inputs and states, in eager mode.

    Tensors have the bundle's dtypes (int32 for the module's int64) and are cast on the way in and out. The arguments
    are not written to, results share no memory with them, and attributes that hold states are restored after the call.
    The module is put into evaluation mode.

    Attributes:
        spec: the step's specification.
        dtype: the dtype of floating inputs and states: float32, or float64 for a copy by `in_float64`.
    """

    def __init__(self, spec: StepSpec, dtype: torch.dtype = torch.float32) -> None:
        self.spec, self.dtype = spec, dtype
        spec.module.eval()

    def __call__(self, inputs: Tensors, states: Held, valid: Tensor | None = None) -> Results:
        """Run one step without gradients and check its results against the specification.

        Args:
            inputs: tensors by name.
            states: tensors by name; None, or left out, for a state that is absent.
            valid: int32 [B], the number of positions that count, for a module that takes it (`StepSpec.lengths`).

        Raises:
            OwnCodeError: the module raised an exception.
            UsageError: a result differs from its declaration.
        """
        copies = {name: tensor if tensor is None else tensor.clone() for name, tensor in states.items()}
        step = self.checked({name: tensor.clone() for name, tensor in inputs.items()}, copies, valid)
        outputs = {name: _narrowed(name, tensor).clone() for name, tensor in step.outputs.items()}
        return outputs, {name: _narrowed(name, tensor).clone() for name, tensor in step.after.items()}

    def traced(self, inputs: Tensors, states: Held, valid: Tensor | None = None) -> Results:
        """Run one step inside a module that is being captured: results are not checked, and exceptions pass unchanged.

        For example, inputs {"x": [2, 8]} and states {"h": [2, 32]} give ({"y": [2, 4]}, {"h": [2, 32]}).
        """
        step = self.raw(inputs, states, valid)
        outputs = {name: _as_int32(tensor) for name, tensor in step.outputs.items()}
        return outputs, {name: _as_int32(tensor) for name, tensor in step.after.items()}

    def checked(self, inputs: Tensors, states: Held, valid: Tensor | None = None) -> RawStep:
        """Run one step and check its results, but return the tensors themselves, neither copied nor cast.

        For example, inputs {"x": [2, 8]} and states {"h": [2, 32]} give outputs {"y": [2, 4]} and states {"h": [2,
        32]}.

        Raises:
            OwnCodeError, UsageError: as `__call__` raises them.
        """
        batch, length = measured(self.spec, inputs)
        segments = f" with a segment of {length}" if self.spec.has_length else ""
        with torch.no_grad(), own_code(f"the module failed{segments}"):
            step = self.raw(inputs, states, valid)
        self._check(step, batch, length)
        return step

    def raw(self, inputs: Tensors, states: Held, valid: Tensor | None = None) -> RawStep:
        """Call the module; attributes that hold states are set to copies of `states`, and restored afterwards.

        For example, inputs {"x": [2, 8]} and states {"h": [2, 32]} give outputs {"y": [2, 4]} and states {"h": [2,
        32]}.
        """
        module, entries = self.spec.module, self.spec.states
        arguments_by_name = {
            entry.name: self._cast(inputs[entry.name], entry.module_dtype) for entry in self.spec.inputs
        }
        attributes = {entry.attribute: entry for entry in entries if entry.attribute is not None}
        values = {path: value_at(module, path) for path in attributes}
        held = {entry.name: self._cast(states.get(entry.name), entry.dtype) for entry in entries}
        held |= {one.name: held[one.name].clone() for one in attributes.values() if held[one.name] is not None}
        for path, entry in attributes.items():
            put(module, path, held[entry.name])
        try:
            arguments = {entry.name: held[entry.name] for entry in entries if entry.attribute is None}
            outputs, after = called(self.spec, arguments_by_name, arguments, valid)
            after |= {entry.name: value_at(module, path) for path, entry in attributes.items()}
        finally:
            for path, value in values.items():
                put(module, path, value)
        return RawStep(arguments_by_name, held, outputs, {entry.name: after[entry.name] for entry in entries})

    def _cast(self, tensor: Any, dtype: str) -> Any:
        return None if tensor is None else tensor.to(self.dtype if dtype == "float32" else TORCH[dtype])

    def _check(self, step: RawStep, batch_size: int, length: int) -> None:
        """Refuse results whose dtypes or sizes differ from the specification."""
        sizes = f"for B = {batch_size} and L = {length}"
        for entry in self.spec.output_specs:
            wanted = None if entry.shape is None else entry.axes.sizes(batch_size, length)
            _compare(f"output {entry.name} {sizes}", step.outputs[entry.name], {*TORCH.values(), self.dtype}, wanted)
        for state in self.spec.states:
            dtypes, wanted = {TORCH[state.dtype]}, state.axes.sizes(batch_size, 0)
            dtypes |= {self.dtype} if state.dtype == "float32" else set()
            _compare(f"state {state.name} {sizes}", step.after[state.name], dtypes, wanted, state.grows)


class Tries:
    """Makes inputs and states on which a module is tried."""

    def __init__(self, eager: Eager, batch_size: int, seed: int = 2) -> None:
        self.eager, self.batch_size = eager, batch_size
        self._generator = np.random.default_rng(seed)

    def inputs(self, length: int) -> dict[str, Tensor]:
        """Return the inputs of one segment: pieces of the samples, or random values without samples.

        With two sequences, `inputs(64)` is e.g. {"x": [2, 64, 8]}.
        """
        spec = self.eager.spec
        return random_inputs(spec, self.batch_size, length, self._generator, spec.samples)

    def valid(self, length: int) -> Tensor:
        """Return `valid` int32 [B], in which every position of the segment counts.

        With two sequences, `valid(64)` is [64, 64].
        """
        return torch.full((self.batch_size,), length, dtype=torch.int32)

    def fresh(self) -> States:
        """Return the states before the first segment."""
        return fresh_states(self.eager.spec, self.batch_size, self.eager.dtype)

    def states(self, length: int, segments: int = 2) -> States:
        """Return the states after `segments` segments from the start."""
        states = self.fresh()
        for _ in range(segments):
            states = dict(self.eager(self.inputs(length), states, self.valid(length))[1])
        return states


def called(
    spec: StepSpec, given: dict[str, Tensor], held: dict[str, Tensor | None], valid: Tensor | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call a module by its own convention; return outputs and states by name.

    For example, `given` {"x": [2, 8]} and `held` {"h": [2, 32]} are passed as `module(x, h)`.

    Args:
        spec: the specification.
        given: the inputs.
        held: the states that are arguments.
        valid: int32 [B], passed only if the module takes it.

    Raises:
        UsageError: the results differ from the declaration.
    """
    outputs, states = [entry.name for entry in spec.output_specs], list(held)
    if spec.step is None:
        results = spec.module(*given.values(), *held.values(), *([valid] if spec.lengths else []))
        # lists, not a dictionary: an output and a state may have the same name
        wanted, first = [*outputs, *states], len(outputs)
        if len(wanted) == 1 and isinstance(results, Tensor):
            results = (results,)
        if not isinstance(results, tuple | list) or len(results) != len(wanted):
            raise UsageError(
                f"the module returned {_described(results)}, expected {len(wanted)} tensors: {', '.join(wanted)} "
                "(outputs, then states); declare what it returns, or give step="
            )
        return dict(zip(outputs, results[:first], strict=True)), dict(zip(states, results[first:], strict=True))
    results = spec.step(spec.module, {**given, VALID: valid} if spec.lengths else dict(given), dict(held))
    if not isinstance(results, tuple) or len(results) != 2 or not all(isinstance(part, Mapping) for part in results):
        raise UsageError(
            f"step returned {_described(results)}, expected two dictionaries: outputs and states by their names"
        )
    for what, part, names in (("outputs", results[0], outputs), ("states", results[1], states)):
        if set(part) != set(names):
            raise UsageError(
                f"the {what} of step are {', '.join(map(str, part)) or 'none'}, expected {', '.join(names) or 'none'}; "
                "return or declare the same"
            )
    return {name: results[0][name] for name in outputs}, {name: results[1][name] for name in states}


def _described(results: Any) -> str:
    several = f" of {len(results)}" if isinstance(results, tuple | list) else ""
    return "one tensor" if isinstance(results, Tensor) else f"a {type(results).__name__}{several}"


def _compare(
    what: str, found: Any, dtypes: set[torch.dtype], wanted: tuple[int, ...] | None, grows: int | None = None
) -> None:
    """Refuse a result that is no tensor, or has a wrong dtype or size; axis `grows` may be shorter than declared."""
    if isinstance(found, FakeTensor):
        raise UsageError(
            f"{what} depends on a tensor that was left by a capture: the module keeps it outside itself, such as in a "
            "variable of another file; keep it in an attribute of the module and declare that"
        )
    if not isinstance(found, Tensor):
        raise UsageError(f"{what} is a {type(found).__name__}, expected a tensor; return one tensor for each name")
    shape = tuple(found.shape)
    wanted = shape if wanted is None else wanted
    axes = enumerate(zip(shape, wanted, strict=False))
    fits = len(shape) == len(wanted) and all(one == two or (axis == grows and one < two) for axis, (one, two) in axes)
    if found.dtype not in dtypes or not fits:
        most = "" if grows is None else f" with at most {wanted[grows]} on axis {grows}"
        raise UsageError(
            f"{what} comes back as {_words([found.dtype])} {shown(shape)}, expected "
            f"{_words({found.dtype} & dtypes or dtypes)} {shown(wanted)}{most}; correct the module or its specification"
        )


def _words(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _as_int32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor


def _narrowed(name: str, tensor: Tensor) -> Tensor:
    """Return an int64 tensor as int32; other dtypes unchanged.

    Raises:
        UsageError: a value does not fit int32.
    """
    narrow = _as_int32(tensor)
    if narrow is not tensor and not torch.equal(narrow.to(torch.int64), tensor):
        raise UsageError(f"{name} holds {int(tensor.abs().max())}, expected what fits int32; a bundle has no int64")
    return narrow


def in_float64(spec: StepSpec, batch_size: int, length: int) -> Eager | None:
    """Return a copy of the module in float64; None if it is too large, does not run, or computes something else."""
    if sum(parameter.numel() for parameter in spec.module.parameters()) > FLOAT64_PARAMETERS:
        return None
    try:
        module = copy.deepcopy(spec.module).double()
        for path, value in leaves(module).items():
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                put(module, path, value.double())
        for part in module.modules():
            # eps None means the epsilon of the dtype, so the copy gets float32's
            if isinstance(part, torch.nn.RMSNorm) and part.eps is None:
                part.eps = torch.finfo(torch.float32).eps
        double, single = Eager(replace(spec, module=module), torch.float64), Eager(spec)
        return double if _agree(single, double, batch_size, length) else None
    except Exception:  # other people's code may raise anything in a precision that it was not written for
        return None


def _agree(single: Eager, double: Eager, batch_size: int, length: int) -> bool:
    """Return whether two segments agree in float32 and float64, and the float64 module returns some float64 tensor."""
    tries, seen = Tries(single, batch_size, 0), False
    ours, theirs, valid = tries.fresh(), Tries(double, batch_size).fresh(), tries.valid(length)
    for _ in range(2):
        inputs = tries.inputs(length)
        results, exact = single(inputs, ours, valid), double(inputs, theirs, valid)
        pairs = [(part[name], other[name]) for part, other in zip(results, exact, strict=True) for name in part]
        seen = seen or any(other.dtype == torch.float64 for _, other in pairs)
        if any(one.shape != other.shape or not difference(one, other) <= _AGREEMENT for one, other in pairs):
            return False
        ours, theirs = dict(results[1]), dict(exact[1])
    return seen


def difference(one: Tensor, other: Tensor) -> float:
    """Return the relative difference of two tensors, e.g. 0 for two equal tensors; see `relative_difference`."""
    return relative_difference(one.detach().numpy(), other.detach().numpy())
