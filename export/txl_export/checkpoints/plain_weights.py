"""A file's weights as plain data, for whoever builds a module of their own: nothing in the file is imported or run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from txl_runtime.errors import CheckpointError, UsageError

from txl_export.checkpoints.files.loading import load_file, module_state, scan_globals
from txl_export.checkpoints.files.pickle_names import KNOWN, Stub

_INERT = "torch.nn.modules.linear.Identity"
"""What a class that is not known is read as: a stand-in that only keeps attributes."""


def read_weights(path: str | Path | None) -> dict[str, Any]:
    """What torch.save or safetensors wrote: a state dict, a dictionary that holds one, or a whole module's state dict.

    Raises:
        UsageError: there is no path.
        CheckpointError: there is no such file, it is damaged, or it holds something else.
    """
    if path is None:
        raise UsageError("no weights were given, and this module reads a file of them; give --weights FILE")
    path = Path(path)
    try:
        content = load_file(path).content
    except CheckpointError as error:
        content = _whole_module(path)
        if content is None:
            raise error
    if isinstance(content, Stub):
        return dict(module_state(content)[0])
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: holds a {type(content).__name__}, expected a state dict or a dictionary with one in it; "
            "save model.state_dict()"
        )
    return content


def _whole_module(path: Path) -> Stub | None:
    """A pickled module of classes that nobody knows here, as one stand-in in another; None for anything else."""
    try:
        unknown = [name for name in scan_globals(path) if name not in KNOWN]
        content = load_file(path, dict.fromkeys(unknown, _INERT)).content if unknown else None
    except CheckpointError:
        return None
    return content if isinstance(content, Stub) else None
