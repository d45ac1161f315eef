"""Runs the user's file, on this machine only, and takes the specification that its function returns."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import linecache
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from txl_runtime.errors import UsageError

from txl_export.families.own_module.own_code import OwnCodeError, own_code
from txl_export.families.own_module.spec import StepSpec

EXPECTED = "expected FILE.py:FUNCTION, a function build(weights) that returns a StepSpec"


def load_spec(target: str, weights: str | None) -> StepSpec:
    """Import FILE.py and call its FUNCTION with the path of weights; `target` is split at its last colon.

    The file is imported under its own name. While it runs, its folder is first on `sys.path`, and `sys.argv` holds only
    its path.

    Raises:
        UsageError: there is no such file or function, or the function's arguments or result are wrong.
        OwnCodeError: the user's code raised an exception.
    """
    file, _, name = target.rpartition(":")
    if not file or not name:
        raise UsageError(f"{target} names no function; {EXPECTED}")
    path = Path(file)
    if not path.is_file():
        fault = "is a folder" if path.is_dir() else "no such file"
        raise UsageError(f"{file}: {fault}; {EXPECTED}")
    with _as_a_script(path):
        function = _function(_imported(path), name, path)
        arguments = _arguments(function, weights, f"{path.name}:{name}")
        try:
            with own_code(f"{path.name}:{name} failed"):
                spec = function(*arguments)
        except OwnCodeError as error:
            if arguments == (None,):
                raise OwnCodeError(f"{error}; no --weights were given", error.frames) from error
            raise
    if not isinstance(spec, StepSpec):
        raise UsageError(f"{path.name}:{name} returned a {type(spec).__name__}, expected a txl_export.StepSpec")
    return spec


def _imported(path: Path) -> ModuleType:
    """Import the file as a module under its own name, by which torch.export looks up source lines."""
    path = path.resolve()
    name = path.stem if path.stem.isidentifier() else "own_module"
    before = sys.modules.get(name)
    if (before is not None and getattr(before, "__file__", None) != str(path)) or _is_another(name, path):
        name = f"{name}_{zlib.crc32(str(path).encode()):08x}"  # the existing module keeps its name
    source = importlib.util.spec_from_file_location(name, path)
    if source is None or source.loader is None:
        raise UsageError(f"{path.name} is no Python file; {EXPECTED}")
    linecache.checkcache(str(path))
    module = importlib.util.module_from_spec(source)
    sys.modules[name] = module
    try:
        with own_code(f"{path.name} cannot be imported"):
            source.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _is_another(name: str, path: Path) -> bool:
    """Return whether a module of Python or an installed package has this name, e.g. `silero` for a user's silero.py.

    Other code may import that module by this name later, so the user's file must not take the name.
    """
    try:
        places = [place for place in sys.path if Path(place or ".").resolve() != path.parent]
        return name in sys.stdlib_module_names or PathFinder.find_spec(name, places) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def importable(source: object) -> Iterator[None]:
    """Let the block import modules that lie next to FILE of FILE.py:FUNCTION, as a step may do when it runs.

    The folder is last on `sys.path`: if it were first, its files would hide modules that torch has yet to import.
    """
    file = str(source).rpartition(":")[0] if isinstance(source, (str, Path)) else ""
    folder = str(Path(file).resolve().parent)
    if not file or folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _function(module: ModuleType, name: str, path: Path) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    if function is not None:
        raise UsageError(f"{name} of {path.name} is a {type(function).__name__}, {EXPECTED}")
    names = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    own = [key for key in names if inspect.isfunction(vars(module)[key]) and not key.startswith("_")]
    raise UsageError(f"{path.name} has no {name}; its functions are {', '.join(own) or 'none'}; {EXPECTED}")


def _arguments(function: Callable[..., Any], weights: str | None, name: str) -> tuple[str | None, ...]:
    """Return the arguments for the user's function: the weights' path, or () if the function takes no argument."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return (weights,)
    for arguments in ((weights,), ()):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            if arguments or weights is None:
                return arguments
            raise UsageError(f"{name} takes no weights, and {weights} was given; leave out --weights or take them")
    raise UsageError(f"{name} needs the arguments {signature}, expected one: {name.rpartition(':')[2]}(weights)")


@contextmanager
def _as_a_script(path: Path) -> Iterator[None]:
    """Run the block as a script: the file's folder is first on `sys.path`, `sys.argv` holds only its path."""
    folder, arguments, here = path.resolve().parent, sys.argv, Path.cwd()
    sys.path.insert(0, str(folder))
    sys.argv = [str(path)]
    try:
        yield
    except OwnCodeError as error:
        # a file silero.py with "import silero" imports itself
        if f"'{path.stem}'" in str(error) and _is_another(path.stem, path):
            raise OwnCodeError(f"{error}; rename {path.name}, which hides {path.stem}", error.frames) from error
        raise
    finally:
        sys.argv = arguments
        os.chdir(here)  # the user's file may have changed it, and the bundle's path is relative
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
