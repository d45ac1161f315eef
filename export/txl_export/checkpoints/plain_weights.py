"""A file's weights as plain data, for whoever builds a module of their own: nothing in the file is imported or run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from txl_runtime.errors import CheckpointError, UsageError

from txl_export.checkpoints.files.loading import load_file, module_state, scan_globals
from txl_export.checkpoints.files.numpy_data import without_numpy
from txl_export.checkpoints.files.pickle_names import KNOWN, Stub
from txl_export.checkpoints.files.unpickling import PYTHON_2

_INERT = "torch.nn.modules.linear.Identity"
"""What a class that is not known is read as: a stand-in that only keeps attributes."""
_NAMED = 3
"""So many classes stand in a message."""


def read_weights(path: str | Path | None) -> dict[str, Any]:
    """What torch.save or safetensors wrote: a state dict, a dictionary that holds one, or a whole module's state dict.

    Raises:
        UsageError: there is no path.
        CheckpointError: there is no such file, it is damaged, or it holds something else.
    """
    if path is None:
        raise UsageError("no weights were given, and this module reads a file of them; give --weights FILE")
    path = Path(path)
    content, unknown = _stored(path)
    if unknown and not isinstance(content, Stub):
        listed = ", ".join(unknown[:_NAMED]) + (f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else "")
        raise CheckpointError(
            f"{path}: refers to {listed}, not known here (nothing was imported or run); load the file where it was "
            "trained and save model.state_dict()"
        )
    if isinstance(content, Stub):
        return dict(module_state(content)[0])
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: holds a {type(content).__name__}, expected a state dict or a dictionary with one in it; "
            "save model.state_dict()"
        )
    return content


def read_stored(path: str | Path) -> Any:
    """Whatever a file holds, for an adapter that takes the weights and the config out of it: plain data, and tensors.

    Objects of classes that are not known are stand-ins that nothing can be done with.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    content, _ = _stored(Path(path))
    return dict(module_state(content)[0]) if isinstance(content, Stub) else content


def _stored(path: Path) -> tuple[Any, list[str]]:
    """What a file holds, and the classes in it that are not known."""
    unknown = _unknown_names(path)
    content = load_file(path, dict.fromkeys(unknown, _INERT), others=True).content
    return without_numpy(content), unknown


def _unknown_names(path: Path) -> list[str]:
    """The classes that a pickle names and nobody knows here; none for another file, which `load_file` tells."""
    try:
        named = [name.rpartition(".") for name in scan_globals(path)]
    except CheckpointError:
        return []
    return [f"{home}.{name}" for home, _, name in named if f"{PYTHON_2.get(home, home)}.{name}" not in KNOWN]
