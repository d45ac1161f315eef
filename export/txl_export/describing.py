"""What a checkpoint file is, for `inspect`: nothing in it is run, imported or believed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from txl_runtime.errors import CheckpointError, TxlError

from txl_export.checkpoints import read_checkpoint
from txl_export.checkpoints.hf import read_folder
from txl_export.checkpoints.loading import Loaded, Stub, load_file, module_state, scan_globals
from txl_export.weights import check_state, parameter_count

__all__ = ["describe_checkpoint"]


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Family, container, hyper-parameters, tensors and the names of code the file refers to.

    A file that is refused is described by the names it refers to and the reason.

    Raises:
        CheckpointError: nothing can be said of it.
    """
    try:
        loaded = read_folder(path)[1] if path.is_dir() else load_file(path)
    except CheckpointError as error:
        if path.is_dir():
            raise
        names = scan_globals(path)
        if not names:
            raise
        return {"kind": "checkpoint", "file": path.name, "refused": str(error), "globals": list(names)}
    document: dict[str, Any] = {
        "kind": "checkpoint",
        "file": path.name,
        "container": loaded.container,
        "sha256": loaded.sha256,
        "globals": list(loaded.global_names),
        "notes": list(loaded.notes),
    }
    try:
        imported, source = read_checkpoint(path)
        state = check_state(imported.config, imported.state, path.name)
    except TxlError as error:
        document["family"] = f"not recognised: {error}"
    else:
        document |= {
            "family": imported.family,
            "recognised": source.recognised,
            "parameters": parameter_count(state),
            "vocabulary": "yes" if imported.vocabulary else "none",
            "config": msgspec.to_builtins(imported.config),
            "evaluation": {name: value for name, value in vars(imported.evaluation).items() if value is not None},
        }
        document["notes"] += [note for note in imported.notes if note not in document["notes"]]
    document["tensors"] = [
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in _tensors(_content(loaded))
    ]
    return document


def _content(loaded: Loaded) -> Any:
    return module_state(loaded.content)[0] if isinstance(loaded.content, Stub) else loaded.content


def _tensors(content: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Every tensor of nested mappings, with its path."""
    if isinstance(content, Tensor):
        return [(prefix, content)]
    if not isinstance(content, Mapping):
        return []
    found: list[tuple[str, Tensor]] = []
    for key, value in content.items():
        found += _tensors(value, f"{prefix}.{key}" if prefix else str(key))
    return found
