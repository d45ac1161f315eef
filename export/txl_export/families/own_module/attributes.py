"""The attributes of a module: declared ones set and read by their path, all of them recorded, compared and put back."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OWN_KEYS = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_PARTS = ("_parameters", "_buffers", "_modules")
_DEPTH = 12
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NO_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.dtype)


def value_at(root: Any, path: str) -> Any:
    """What stands at a dotted path; whole numbers index lists, and keys open dictionaries.

    Raises:
        LookupError: nothing does.
    """
    found = root
    for part in path.split("."):
        found = _step(found, part, path)
    return found


def put(root: Any, path: str, value: Any) -> None:
    """Set what stands at a dotted path.

    Raises:
        LookupError: there is no such place.
        TypeError: it cannot be set, as in a tuple.
    """
    before, _, last = path.rpartition(".")
    owner = value_at(root, before) if before else root
    if isinstance(owner, list):
        owner[int(last)] = value
    elif isinstance(owner, dict):
        owner[_key(owner, last)] = value
    elif isinstance(owner, tuple):
        raise TypeError(f"{before} is a tuple")
    else:
        setattr(owner, last, value)


def _step(owner: Any, part: str, path: str) -> Any:
    try:
        if isinstance(owner, (list, tuple)):
            return owner[int(part)]
        if isinstance(owner, dict):
            return owner[_key(owner, part)]
        return getattr(owner, part)
    except (ValueError, IndexError, KeyError, AttributeError):
        raise LookupError(f"{path} leads nowhere: there is no {part}") from None


def _key(owner: Mapping[Any, Any], part: str) -> Any:
    """A dictionary's key as it is written in a path."""
    return int(part) if part not in owner and part.isdigit() and int(part) in owner else part


def leaves(root: Any) -> dict[str, Any]:
    """Every tensor and every plain value reachable from a module or a dictionary, by path; of a tensor a copy."""
    return {path: value.detach().clone() if isinstance(value, Tensor) else value for path, value in _walk(root)}


def tensors(root: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor reachable from a module or a dictionary, with its path."""
    return ((path, value) for path, value in _walk(root) if isinstance(value, Tensor))


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The paths whose values differ, or that are on one side alone."""
    missing = object()
    paths = list(dict.fromkeys([*before, *after]))
    return [path for path in paths if not _same(before.get(path, missing), after.get(path, missing))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and same_bits(one, other)
    return type(one) is type(other) and (one == other or (one != one and other != other))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN at the same places included."""
    if torch.equal(one, other):
        return True
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _walk(root: Any) -> Iterator[tuple[str, Any]]:
    """The leaves with their paths, each object once."""
    seen: set[int] = set()

    def inside(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _PLAIN):
            yield path, value
            return
        if id(value) in seen or depth > _DEPTH or isinstance(value, _NO_DATA):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
            return
        for name, item in _items(value):
            yield from inside(item, f"{path}.{name}" if path else name, depth + 1)

    yield from inside(root, "", 0)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """What is directly inside a module, a container or an object."""
    if isinstance(value, nn.Module):
        for part in _PARTS:
            yield from list(vars(value).get(part, {}).items())  # what torch.jit traced has none
        yield from ((name, item) for name, item in list(vars(value).items()) if name not in _OWN_KEYS)
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, np.ndarray):
        yield from (("dtype", str(value.dtype)), ("shape", repr(value.shape)), ("values", value.tobytes()))
    else:
        yield from _named(value).items()


def _named(value: Any) -> dict[str, Any]:
    """An object's attributes, those in slots as well."""
    return _Slots(value).copy() | (dict(vars(value)) if hasattr(value, "__dict__") else {})


class _Slots:
    """What an object has in `__slots__`, as the part of a dictionary that is needed here."""

    def __init__(self, owner: Any) -> None:
        self._owner, self._names = owner, list[str]()
        for kind in type(owner).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                private = name.startswith("__") and not name.endswith("__")
                self._names.append(f"_{kind.__name__.lstrip('_')}{name}" if private else name)
        self._names = [name for name in self._names if name not in ("__dict__", "__weakref__")]

    def copy(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names if hasattr(self._owner, name)}

    def clear(self) -> None:
        for name in self.copy():
            object.__delattr__(self._owner, name)

    def update(self, content: dict[str, Any]) -> None:
        for name, value in content.items():
            object.__setattr__(self._owner, name, value)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Whatever is done in here, the module has its attributes afterwards that it had before: caches, modes, lists.

    Contents of tensors are not put back.
    """
    kept = list(_containers(module))
    try:
        yield
    finally:
        for container, content in kept:
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else container.update(content)


def _containers(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Every dictionary and list reachable from a module, with a copy of what it holds."""
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(module, 0)]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or depth > _DEPTH or isinstance(value, (*_PLAIN, *_NO_DATA, Tensor)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.jit.ScriptModule):
            continue  # what TorchScript compiled keeps its attributes itself and adds none
        if isinstance(value, nn.Module):
            yield vars(value), dict(vars(value))
            for part in _PARTS:
                yield vars(value)[part], dict(vars(value)[part])
        elif isinstance(value, (dict, list, deque, set)):
            yield value, value.copy()
        elif hasattr(value, "__dict__") and not isinstance(value, (tuple, Tensor)):
            yield vars(value), dict(vars(value))
        if slots := _Slots(value).copy():
            yield _Slots(value), slots
        waiting.extend((item, depth + 1) for _, item in _items(value))
