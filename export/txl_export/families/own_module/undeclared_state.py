"""What calls keep: in the module's weights, in its attributes, and outside of it.

A step keeps nothing but its states. So what it keeps and a later call may read is refused, whatever its values are: a
largest value so far may not change while a module is tried, and is a state all the same. Two things are no state. What
the first call in evaluation mode does to the weights, whatever it is given, is done once, before anything is tried: the
contents of tensors are not put back after a trial, so that it would be done again and again. And what every call leaves
in attributes for nobody, such as attention maps that are kept to be drawn, is put back after each call.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from txl_runtime.errors import UsageError

from txl_export.families.own_module.attributes import (
    changed,
    leaves,
    put,
    same_bits,
    tensors,
    untouched,
    value_at,
)
from txl_export.families.own_module.module_call import Eager, Tries, called
from txl_export.families.own_module.own_code import is_users
from txl_export.families.own_module.sizes import States, usual_lengths
from txl_export.families.own_module.spec import VALID, Named, StepSpec
from txl_export.families.own_module.value_reads import Following

_HOLDERS = (Tensor, list, tuple, dict, set, deque, SimpleNamespace)
_SEGMENTS = 4
"""So many calls in a row are looked at for what they leave."""


def kept_of_a_call(
    eager: Eager,
    inputs: Mapping[str, Tensor],
    states: Mapping[str, Tensor | None],
    valid: Tensor,
    other: Callable[[], Any] | None = None,
) -> tuple[States, list[str]]:
    """Run one step; the states after it, and the paths of tensors that then depend on its inputs and states.

    Args:
        eager: the module.
        inputs, states, valid: as `Eager` takes them.
        other: gives what to look at after the call in place of the module; what the module has as well is left out.

    Raises:
        OwnCodeError, UsageError: as `Eager`.
    """
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    held = {name: None if tensor is None else tensor.clone() for name, tensor in states.items()}
    marked = [*given.values(), valid, *(tensor for tensor in held.values() if tensor is not None)]
    with torch.no_grad(), Following(marked) as following:
        step = eager.checked(given, held, valid)
    kept = {id(tensor): path for path, tensor in tensors(eager.spec.module) if following.depends(tensor)}
    if other is not None:
        kept = {
            id(tensor): path
            for path, tensor in tensors(other())
            if id(tensor) not in kept and following.depends(tensor)
        }
    return {name: tensor.clone() for name, tensor in step.after.items()}, list(kept.values())


def run_first_call(spec: StepSpec, batch_size: int, segment_lengths: Sequence[int]) -> None:
    """Let a module change its weights as it does at its first call, if that does not depend on what it is given.

    What depends on it is state; the module is then as it was, and what follows refuses it. Its modes stay as they are.

    Args:
        spec: of the module.
        batch_size: B.
        segment_lengths: L's asked for, of which the first is used that the module takes.

    Raises:
        UsageError: it keeps what depends on its inputs outside of itself, which only its first calls may show.
    """
    module, modes = spec.module, {part: part.training for part in spec.module.modules()}
    lengths = tuple(segment_lengths) or usual_lengths(spec)
    before, tries = leaves(module), Tries(Eager(spec), batch_size)
    try:
        check_outside(tries, lengths)
        for length in lengths:
            with contextlib.suppress(UsageError):
                _change_weights(tries, length, before)
                break
    finally:
        for part, mode in modes.items():
            part.training = mode


def _change_weights(tries: Tries, length: int, before: Mapping[str, Any]) -> None:
    module, inputs = tries.eager.spec.module, tries.inputs(length)
    states = tries.fresh()
    with untouched(module):
        _, kept = kept_of_a_call(tries.eager, inputs, states, tries.valid(length))
    moved = [path for path in changed(before, leaves(module)) if isinstance(before.get(path), Tensor)]
    with torch.no_grad():
        for path in moved:
            value_at(module, path).copy_(before[path])
    if moved and not kept:
        tries.eager(inputs, states, tries.valid(length))


def check_outside(tries: Tries, lengths: Sequence[int]) -> None:
    """Refuse a module that keeps outside itself what a call is given; to be asked before it has run.

    Args:
        tries: of the module.
        lengths: L's, of which the first is used that the module takes.

    Raises:
        UsageError: it does so.
    """
    for length in lengths:
        with contextlib.suppress(UsageError), untouched(tries.eager.spec.module):
            kept = _kept_outside(tries, length)
            break
    else:
        return  # said later: it takes none of them
    if kept:
        raise UsageError(
            f"a call keeps what depends on its inputs outside the module, in {kept[0]}; keep it in an attribute of the "
            "module and declare that (StateSpec(..., attribute=...)), or do not keep it"
        )


def _kept_outside(tries: Tries, length: int) -> list[str]:
    eager, found = tries.eager, list[str]()
    states = tries.fresh()
    for _ in range(2):
        given, valid = tries.inputs(length), tries.valid(length)
        states, kept = kept_of_a_call(eager, given, states, valid, lambda: _outside(eager.spec))
        found += kept
    return found


def _outside(spec: StepSpec) -> dict[str, Any]:
    """What the user's code can keep outside the module, by what to call it in a message: variables of its files and
    classes, and around its functions.

    Found is what methods of the module's classes and the step function name, and what is named by what they call.
    """
    found: dict[str, Any] = {}
    waiting: list[Any] = [*{type(part) for part in spec.module.modules()}, spec.step]
    seen: set[int] = set()
    while waiting:
        one = inspect.unwrap(waiting.pop())
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, value in _variables(one):
            if isinstance(value, (type, FunctionType)):
                waiting.append(value)
            elif isinstance(value, _HOLDERS) or (_is_own(type(value)) and not isinstance(value, nn.Module)):
                found[name] = value
    return found


def _variables(one: Any) -> Iterator[tuple[str, Any]]:
    """What a class or a function of the user's names, methods among it."""
    if isinstance(one, type):
        for kind in one.__mro__:
            if _is_own(kind):
                for name, value in vars(kind).items():
                    inner = getattr(value, "__func__", None) or getattr(value, "fget", None)
                    if name not in ("__init__", "__dict__", "__weakref__", "__doc__", "__annotations__"):
                        yield f"{kind.__name__}.{name}", value if inner is None else inner
    elif isinstance(one, FunctionType) and is_users(one.__code__.co_filename):
        names = set(_names(one.__code__))
        for name in names & set(one.__globals__):
            value = one.__globals__[name]
            yield name, value
            if isinstance(value, ModuleType) and is_users(getattr(value, "__file__", None) or "<"):
                yield from ((f"{name}.{inner}", vars(value)[inner]) for inner in names & set(vars(value)))
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            try:
                yield f"{name} around {one.__name__}", cell.cell_contents
            except ValueError:  # not filled yet
                continue


def _is_own(kind: type) -> bool:
    return is_users(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<")


def _names(code: CodeType) -> Iterator[str]:
    """Names that code reads, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def unread_attributes(tries: Tries, lengths: Sequence[int]) -> list[str]:
    """The paths of attributes that every call leaves for nobody.

    Several segments are run in a row. No segment may touch a tensor that an earlier one left, not even to ask for its
    size. Each segment has to compute the same where those attributes are put back after every call.

    Args:
        tries: of the module.
        lengths: every L.
    """
    module = tries.eager.spec.module
    declared = {entry.attribute for entry in tries.eager.spec.states}
    with untouched(module):
        _, kept = kept_of_a_call(tries.eager, tries.inputs(lengths[0]), tries.fresh(), tries.valid(lengths[0]))
    paths = [path for path in kept if path not in declared and _is_plain(module, path)]
    for length in lengths if paths else ():
        chain = [tries.inputs(length) for _ in range(_SEGMENTS)]
        with untouched(module):
            found, touched = _run(tries, chain, length, paths)
        with untouched(module):
            expected, _ = _run(Tries(Eager(without(tries.eager.spec, paths)), tries.batch_size), chain, length, ())
        same = all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
        paths = [path for path in paths if path not in touched] if same else []
    return paths


def without(spec: StepSpec, paths: Sequence[str]) -> StepSpec:
    """The same step, which puts back after each call what stood at some paths of its module."""

    def step(module: Any, inputs: Named, states: Named) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        kept = {path: value_at(module, path) for path in paths}
        given = {name: tensor for name, tensor in inputs.items() if name != VALID}
        try:
            return called(replace(spec, module=module), given, states, inputs.get(VALID))
        finally:
            for path, value in kept.items():
                put(module, path, value)

    return replace(spec, step=step)


def _is_plain(module: Any, path: str) -> bool:
    """Whether something stands there before the first call that can be set, and no parameter or buffer."""
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    try:
        put(module, path, value_at(module, path))
    except (LookupError, TypeError, AttributeError):
        return False
    return path not in own


def _run(
    tries: Tries, chain: Iterable[Mapping[str, Tensor]], length: int, paths: Sequence[str]
) -> tuple[list[Tensor], set[str]]:
    """What a chain of segments computes, and which of the paths' tensors a later call touched."""
    eager, results, touched = tries.eager, list[Tensor](), set[str]()
    states: Mapping[str, Tensor | None] = tries.fresh()
    for inputs in chain:
        with _Touching({path: value_at(eager.spec.module, path) for path in paths}) as touching:
            outputs, states = eager(inputs, states, tries.valid(length))
        touched |= touching.touched
        results += [*outputs.values(), *states.values()]
    return results, touched


class _Touching(TorchFunctionMode):
    """Watches for calls of torch, properties such as sizes among them, that are given some tensors or their memory.

    Attributes:
        touched: the names of those that were.
    """

    def __init__(self, watched: Mapping[str, Any]) -> None:
        super().__init__()
        self.touched = set[str]()
        self._watched = {name: value for name, value in watched.items() if isinstance(value, Tensor)}
        self._memory = {name: value.untyped_storage()._cdata for name, value in self._watched.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and note which tensors it is given."""
        with torch._C.DisableTorchFunction():
            given = {
                leaf.untyped_storage()._cdata
                for leaf in tree_leaves((args, dict(kwargs or {})))
                if isinstance(leaf, Tensor)
            }
            self.touched |= {name for name, memory in self._memory.items() if memory in given}
        return func(*args, **(kwargs or {}))
