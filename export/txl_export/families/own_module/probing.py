"""Whether a module is a step: a function of what it is given, which keeps nothing that was not declared.

Every check runs the module itself and names what it found. What a user has to change is refused, also where a copy made
here would hide it: the same module is run elsewhere, too, and then does something else.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from txl_runtime.errors import UsageError, some

from txl_export.families.own_module.attributes import changed, leaves, same_bits, untouched
from txl_export.families.own_module.module_call import Eager, RawStep, Tries
from txl_export.families.own_module.own_code import described, is_users
from txl_export.families.own_module.sizes import States, state_specs
from txl_export.families.own_module.undeclared_state import kept_of_a_call

_STEPS = 4
"""So many segments a state is followed for before it is said that it changes nothing."""
_LUCK = 32
"""So many calls of a module that draws random numbers have to agree: with few values, two can by chance."""


class KeptError(UsageError):
    """A call keeps what no state declares; the message names it."""


def check_first_calls(tries: Tries, length: int) -> None:
    """Refuse a module that keeps something of its first calls, whatever that was.

    Raises:
        UsageError: what it keeps was not declared and depends on what it was given.
    """
    module, found = tries.eager.spec.module, []
    for _ in range(2):
        with untouched(module):
            tries.states(length)
            found.append(leaves(module))
    _refuse_kept(tries.eager, changed(*found))
    with untouched(module):
        states = tries.fresh()
        for _ in range(2):
            states, kept = kept_of_a_call(tries.eager, tries.inputs(length), states, tries.valid(length))
            _refuse_kept(tries.eager, kept)


def check_pure(tries: Tries, length: int) -> None:
    """Refuse a module that is no function of its arguments.

    Raises:
        UsageError: it writes to its arguments, returns one memory twice, keeps what was not declared, or computes
            something else from the same.
    """
    eager, inputs, states, valid = tries.eager, tries.inputs(length), tries.states(length), tries.valid(length)
    before = leaves(eager.spec.module)
    first = eager.checked(_copies(inputs), _copies(states), valid)
    _check_arguments(eager, first, inputs, states)
    _check_memory(first)
    one = _results(first)
    _check_attributes(eager, before)
    with _Draws() as draws:
        two = _results(eager.checked(_copies(inputs), _copies(states), valid))
    _check_attributes(eager, before)
    for _ in range(_LUCK if draws.place else 1):
        for what, tensor in one.items():
            if not same_bits(tensor, two[what]):
                why = (
                    f"random numbers are drawn at {draws.place}" if draws.place else "something outside it has changed"
                )
                raise UsageError(
                    f"two calls of the module with the same inputs and states differ in {what}: {why}; a step computes "
                    "the same every time, so leave dropout and noise out of it (training=self.training)"
                )
        two = _results(eager.checked(_copies(inputs), _copies(states), valid))
    _, kept = kept_of_a_call(eager, tries.inputs(length), states, valid)
    _check_attributes(eager, before)
    _refuse_kept(eager, kept)


def _copies(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}


def _results(step: RawStep) -> dict[str, Tensor]:
    """Copies of everything that a call returned, by what to call it in a message."""
    found = {f"output {name}": tensor for name, tensor in step.outputs.items()}
    found |= {f"state {name}": tensor for name, tensor in step.after.items()}
    return {what: tensor.clone() for what, tensor in found.items()}


def _check_arguments(eager: Eager, step: RawStep, inputs: dict[str, Tensor], states: States) -> None:
    """What the module was given still holds what it held."""
    for name, tensor in step.inputs.items():
        if not same_bits(tensor, inputs[name].to(tensor.dtype)):
            raise UsageError(
                f"input {name} is changed in place by the module; clone it first ({name} = {name}.clone())"
            )
    for name, entry in state_specs(eager.spec).items():
        given, was = step.states[name], states[name]
        if entry.attribute is None and given is not None and was is not None:
            if given.shape == was.shape and same_bits(given, was.to(given.dtype)):
                continue
            raise UsageError(
                f"state {name} is changed in place by the module; clone it first ({name} = {name}.clone(), in the "
                "module or in step=) and return the new one"
            )


def _check_memory(step: RawStep) -> None:
    """No output shares its memory with a state."""
    states = [(name, tensor) for name, tensor in (*step.states.items(), *step.after.items()) if tensor is not None]
    for name, output in step.outputs.items():
        for state, tensor in states:
            if output.numel() and tensor.numel() and _memory(output) == _memory(tensor):
                raise UsageError(
                    f"output {name} shares its memory with state {state}, so a later step would change it; return "
                    f"{name}.clone()"
                )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_attributes(eager: Eager, before: dict[str, Any]) -> None:
    """Nothing that is reachable from the module is another than before."""
    _refuse_kept(eager, changed(before, leaves(eager.spec.module)))


def _refuse_kept(eager: Eager, paths: Sequence[str]) -> None:
    """Attributes that calls change are declared."""
    declared = {entry.attribute for entry in eager.spec.states}
    found = [path for path in paths if path not in declared]
    if found:
        raise KeptError(
            f"a call changes {some(found)} of the module, which no state declares; declare it "
            f"(StateSpec(..., attribute={found[0]!r})), or do not keep it"
        )


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches for random numbers.

    Attributes:
        place: in the user's code, where the first ones were drawn; "" if none were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.place and torch.Tag.nondeterministic_seeded in func.tags:
            frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
            self.place = described(frames[-1]) if frames else str(func)
        return func(*args, **(kwargs or {}))


def check_numbers(tries: Tries, length: int) -> None:
    """Refuse NaN, which cannot be compared with anything.

    Raises:
        UsageError: an output or a state holds it after a few segments from the start.
    """
    spec = tries.eager.spec
    given = "random inputs" if spec.samples is None else "the inputs that it was given"
    for _, outputs, after in _from_the_start(tries, length, _STEPS):
        found = {f"output {name}": tensor for name, tensor in outputs.items()}
        for what, tensor in (found | {f"state {name}": tensor for name, tensor in after.items()}).items():
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise UsageError(
                    f"{what} of the module holds NaN for {given}, expected numbers; give real ones with samples= or "
                    "--inputs, or correct the module"
                )


def constant_states(tries: Tries, lengths: Sequence[int], segments: int) -> list[str]:
    """The declared states that come back as they went in, in every one of some segments from the start."""
    constant = [entry.name for entry in tries.eager.spec.states]
    for length in lengths:
        for states, _, after in _from_the_start(tries, length, segments + _STEPS):
            constant = [name for name in constant if _is_same(states[name], after[name])]
            if not constant:
                return []
    return constant


def _is_same(before: Tensor | None, after: Tensor) -> bool:
    return before is not None and same_bits(before, after)


def _from_the_start(
    tries: Tries, length: int, segments: int
) -> Iterator[tuple[States, dict[str, Tensor], dict[str, Tensor]]]:
    """For every segment the states before, the outputs, and the states after."""
    states = tries.fresh()
    for _ in range(segments):
        outputs, after = tries.eager(tries.inputs(length), states, tries.valid(length))
        yield states, outputs, after
        states = dict(after)


def idle_states(tries: Tries, length: int, segments: int) -> list[str]:
    """The declared states that change no output within a few segments, whatever they hold after some from the start."""
    start = tries.states(length, segments)
    chain = [tries.inputs(length) for _ in range(_STEPS)]
    expected = _outputs(tries, start, chain, length)
    idle = []
    for name in start:
        if not any(
            _differ(tries, start | {name: other}, chain, length, expected) for other in _others(tries, start, name)
        ):
            idle.append(name)
    return idle


def _differ(tries: Tries, states: States, chain: list[dict[str, Tensor]], length: int, expected: list[Tensor]) -> bool:
    """Whether a chain from these states has other outputs, or cannot be run at all."""
    try:
        found = _outputs(tries, states, chain, length)
    except UsageError:
        return True
    return not all(same_bits(one, other) for one, other in zip(expected, found, strict=True))


def _outputs(tries: Tries, states: States, chain: list[dict[str, Tensor]], length: int) -> list[Tensor]:
    """Of every segment of a chain."""
    seen = []
    for inputs in chain:
        outputs, after = tries.eager(inputs, states, tries.valid(length))
        states = dict(after)
        seen += list(outputs.values())
    return seen


def _others(tries: Tries, states: States, name: str) -> Iterator[Tensor]:
    """A state with other values: those of the start, zeros, larger ones."""
    held = states[name]
    assert held is not None, "every state exists after a step"
    if held.dtype == torch.bool:
        yield ~held
        return
    fresh = tries.fresh()[name]
    for other in (fresh, torch.zeros_like(held), held + 1):
        if other is not None and other.shape == held.shape and not same_bits(other, held):
            yield other
