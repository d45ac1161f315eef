"""What the user's code can keep outside the module: variables of its files, of its classes, and around its functions.

Those are found that the methods of the module's classes and the step function name, themselves or by what they call.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from txl_export.families.own_module.own_code import is_users
from txl_export.families.own_module.spec import StepSpec

_HOLDERS = (Tensor, list, tuple, dict, set, deque, SimpleNamespace)


def outside(spec: StepSpec) -> dict[str, Any]:
    """The values of such variables, by what to call them in a message."""
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
