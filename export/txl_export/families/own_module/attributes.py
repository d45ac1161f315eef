"""Reads and sets a module's attributes by dotted path; records, compares and restores all of them."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OWN_KEYS = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""
_PARTS = ("_parameters", "_buffers", "_modules")
_DEPTH = 12
GONE = object()
"""Stands for a missing value: there is no attribute or item at the path."""
_MOST = 2 * 1024**3
"""Maximum number of bytes of parameters that `ModuleCopy` copies: 2 GiB."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_NO_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.dtype)


def value_at(root: Any, path: str) -> Any:
    """Return the value at a dotted path: "layers.0.cache" reads root.layers[0].cache, or root.layers[0]["cache"].

    Raises:
        LookupError: there is no value at this path.
    """
    value = root
    for part in path.split("."):
        value = _step(value, part, path)
    return value


def put(root: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path; the value `GONE` deletes the attribute or item.

    Raises:
        LookupError: the path leads nowhere.
        TypeError, AttributeError: the value cannot be set, e.g. in a tuple.
    """
    before, _, last = path.rpartition(".")
    owner = value_at(root, before) if before else root
    if isinstance(owner, (list, deque, dict)):
        at = _key(owner, last) if isinstance(owner, dict) else int(last)
        owner.__delitem__(at) if value is GONE else owner.__setitem__(at, value)
    elif isinstance(owner, tuple):
        raise TypeError(f"{before} is a tuple")
    else:
        delattr(owner, last) if value is GONE else setattr(owner, last, value)


def place_in_python(root: Any, path: str) -> str:
    """Return a path as Python writes it, e.g. model.layers[1].cache["keys"]."""
    place, owner = "model", root
    for part in path.split("."):
        if part.isdigit() and not (isinstance(owner, dict) and part in owner):
            place += f"[{part}]"
        else:
            place += f'["{part}"]' if isinstance(owner, dict) else f".{part}"
        with contextlib.suppress(LookupError):
            owner = _step(owner, part, path)
    return place


def _step(owner: Any, part: str, path: str) -> Any:
    try:
        if isinstance(owner, (list, tuple, deque)):
            return owner[int(part)]
        if isinstance(owner, dict):
            return owner[_key(owner, part)]
        return getattr(owner, part)
    except (ValueError, IndexError, KeyError, AttributeError):
        raise LookupError(f"{path} leads nowhere: there is no {part}") from None


def _key(owner: Mapping[Any, Any], part: str) -> Any:
    """Return the dictionary's key for a part of a path: the text itself, or the number 3 for "3"."""
    return int(part) if part not in owner and part.isdigit() and int(part) in owner else part


def leaves(root: Any) -> dict[str, Any]:
    """Return every tensor and every plain value that can be reached from a module or a dictionary, by path."""
    return {path: value for path, value in _reachable(root) if isinstance(value, (Tensor, *_PLAIN))}


def same(one: Any, other: Any) -> bool:
    """Return whether two leaves have one type and equal values; NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and same_bits(one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one shape and equal values; NaN equals NaN, and 0 equals -0.

    Example:
        >>> same_bits(torch.tensor([0.0, torch.nan]), torch.tensor([-0.0, torch.nan]))
        True
    """
    if torch.sparse_coo in (one.layout, other.layout):  # torch.equal takes no sparse tensor
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _reachable(root: Any, scripts: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield each object that can be reached from `root`, once, with its path.

    If `scripts` is true, objects inside TorchScript modules are yielded, too.
    """
    seen: set[int] = set()

    def inside(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _PLAIN):
            yield path, value
            return
        if id(value) in seen or depth > _DEPTH or isinstance(value, _NO_DATA):
            return
        seen.add(id(value))
        if isinstance(value, torch.jit.ScriptModule) and not scripts:
            return
        yield path, value
        for name, item in () if isinstance(value, Tensor) else _items(value):
            yield from inside(item, f"{path}.{name}" if path else name, depth + 1)

    yield from inside(root, "", 0)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each item directly inside a module, a container, an array or an object.

    For example, ("0", x) and ("1", y) for the list [x, y], or ("weight", w) for a layer's parameter.
    """
    if isinstance(value, nn.Module):
        for part in _PARTS:
            # a module that torch.jit traced has no such dictionaries
            yield from list(vars(value).get(part, {}).items())
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
    """Return an object's attributes by name, including those in `__slots__`."""
    return _slots(value) | (dict(vars(value)) if hasattr(value, "__dict__") else {})


def _slots(owner: Any) -> dict[str, Any]:
    """Return an object's attributes that are stored in `__slots__`, by name."""
    values = {}
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(owner, name):
                values[name] = getattr(owner, name)
    return values


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restore the module's attributes (caches, modes, lists) after the block, except contents of tensors."""
    held = list(_containers(module))
    try:
        yield
    finally:
        _put_back(held)


class ModuleCopy:
    """A record of a module's attributes and of the values of its tensors, to compare with and restore.

    Attributes:
        values: copies of tensors, and plain values, by path.
        whole: whether parameters were copied. Parameters of more than 2 GiB are not copied, and their changes stay
            unnoticed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._containers, self.values = module, list(_containers(module)), leaves(module)
        self.whole = sum(one.nbytes for one in module.parameters()) <= _MOST
        self._tensors = {path: one for path, one in self.values.items() if isinstance(one, Tensor)}
        if not self.whole:
            self._tensors = {p: one for p, one in self._tensors.items() if not isinstance(one, nn.Parameter)}
        self.values |= {path: one.detach().clone() for path, one in self._tensors.items()}

    def changed(self) -> dict[str, Any]:
        """Return values that changed since the record was made: copies by path, `GONE` where a value was removed."""
        now = leaves(self._module)
        paths = [path for path in {**self.values, **now} if not same(self.values.get(path, GONE), now.get(path, GONE))]
        values = {path: now.get(path, GONE) for path in paths}
        return values | {path: one.detach().clone() for path, one in values.items() if isinstance(one, Tensor)}

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the module's attributes and the values of its tensors."""
        _put_back(self._containers)
        for path, tensor in self._tensors.items():
            if not same_bits(tensor, self.values[path]):
                tensor.copy_(self.values[path])


@torch.no_grad()
def put_back_at(module: nn.Module, path: str, values: Mapping[str, Any]) -> None:
    """Restore the value at one path from `ModuleCopy.values`; do nothing if it cannot be set."""
    value = values.get(path, GONE)
    with contextlib.suppress(LookupError, TypeError, AttributeError):
        if isinstance(value, Tensor) and isinstance(current := value_at(module, path), nn.Parameter):
            current.copy_(value)
        else:
            put(module, path, value.clone() if isinstance(value, Tensor) else value)


def _put_back(held: Iterable[tuple[Any, Any]]) -> None:
    for owner, content in held:
        if isinstance(owner, np.ndarray):
            owner[...] = content
        elif isinstance(owner, (list, deque)):
            owner.clear()
            owner.extend(content)
        elif isinstance(owner, (dict, set)):
            owner.clear()
            owner.update(content)
        else:
            for name in _slots(owner):
                object.__delattr__(owner, name)
            for name, value in content.items():
                object.__setattr__(owner, name, value)


def _containers(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield every dictionary, list and array that can be reached from a module, with a copy of its content.

    TorchScript modules are left out: they store their attributes themselves, and no attribute can be added.
    """
    for _, value in list(_reachable(module, scripts=False)):
        if isinstance(value, (Tensor, *_PLAIN)):
            continue
        if isinstance(value, nn.Module):
            yield vars(value), dict(vars(value))
            for part in _PARTS:
                yield vars(value)[part], dict(vars(value)[part])
        elif isinstance(value, (dict, list, deque, set)) or (isinstance(value, np.ndarray) and value.flags.writeable):
            yield value, value.copy()
        elif not isinstance(value, (tuple, np.ndarray)):
            if hasattr(value, "__dict__"):
                yield vars(value), dict(vars(value))
            if slots := _slots(value):
                yield value, slots
