"""Reads the weights in a file as plain data, for users who build a module; imports and runs nothing from the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from txl_runtime.errors import CheckpointError, UsageError, some

from txl_export.checkpoints.files.loading import load_file
from txl_export.checkpoints.files.pickle_names import Stub, known, shown
from txl_export.checkpoints.modules import module_state, unscripted

_UNKNOWN = "not known here (nothing was imported or run)"
_EXPECTED = "expected a state dict or a dictionary with one in it; save model.state_dict()"


def read_weights(path: str | Path | None) -> dict[str, Any]:
    """Return the state dict in a file of torch.save, torch.jit.save or safetensors, or the dictionary that contains it.

    Raises:
        UsageError: the path is None.
        CheckpointError: the file is missing or damaged, or holds no dictionary.
    """
    if path is None:
        raise UsageError("no weights were given, and this module reads a file of them; give --weights FILE")
    content, unknown = _stored(Path(path))
    if unknown:
        raise CheckpointError(f"{path}: {_refers_to(unknown)}")
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {described(content)}, {_EXPECTED}")
    return content


def read_stored(path: str | Path) -> Any:
    """Return a file's content, plain data and tensors, for an adapter that picks weights and config from it.

    Objects of unknown classes are inert `Stub` objects.

    Raises:
        CheckpointError: the file is missing or damaged, or holds a single object that is no module.
    """
    return _stored(Path(path))[0]


def described(value: Any) -> str:
    """Return a phrase for an unexpected value, e.g. "a list"."""
    if isinstance(value, Stub):
        return f"an object of {shown(value.class_name)}, {_UNKNOWN}"
    return f"a {type(value).__name__}"


def _stored(path: Path) -> tuple[Any, list[str]]:
    """Return a file's content and its unknown classes; for a pickled module, its state dict and an empty list."""
    content = unscripted(path, load_file(path)).content
    unknown = sorted(name for name in _classes(content) if not known(name))
    if not isinstance(content, Stub):
        return content, unknown
    if "_modules" not in content.state:
        raise CheckpointError(f"{path}: {_refers_to(unknown or [content.class_name])}")
    try:
        return dict(module_state(content)[0]), []
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _classes(content: Any) -> set[str]:
    """Return the names of all classes and functions for which the content has stubs."""
    classes, waiting = set(), [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Stub):
            classes.add(value.class_name)
            waiting += [value.state, value.args, value.built]
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
    return classes


def _refers_to(names: Sequence[str]) -> str:
    message = f"refers to {some([*map(shown, names)])}, {_UNKNOWN}"
    return f"{message}; load the file where it was trained and save model.state_dict()"
