"""A file's weights as plain data, for whoever builds a module of their own: nothing in the file is imported or run."""

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
    """What torch.save, torch.jit.save or safetensors wrote: a state dict, a dictionary with one, or a module's.

    Raises:
        UsageError: there is no path.
        CheckpointError: there is no such file, it is damaged, or it holds something else.
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
    """Whatever a file holds, for an adapter that takes the weights and the config out of it: plain data, and tensors.

    Objects of classes that are not known are stand-ins that nothing can be done with.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it is one object that is no module.
    """
    return _stored(Path(path))[0]


def described(value: Any) -> str:
    """What stands in a file where something else was expected."""
    if isinstance(value, Stub):
        return f"an object of {shown(value.class_name)}, {_UNKNOWN}"
    return f"a {type(value).__name__}"


def _stored(path: Path) -> tuple[Any, list[str]]:
    """What a file holds, and the unknown classes of what it holds; none for a whole module, which is its state dict."""
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
    """The classes and functions that stand-ins in this are of."""
    found, waiting = set(), [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Stub):
            found.add(value.class_name)
            waiting += [value.state, value.args, value.built]
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
    return found


def _refers_to(names: Sequence[str]) -> str:
    said = f"refers to {some([*map(shown, names)])}, {_UNKNOWN}"
    return f"{said}; load the file where it was trained and save model.state_dict()"
