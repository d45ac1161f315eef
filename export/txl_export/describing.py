"""What a checkpoint file is, for `inspect`: nothing in it is run, imported or believed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from txl_runtime.errors import TxlError

from txl_export.checkpoints import read_checkpoint
from txl_export.checkpoints.loading import load_file
from txl_export.weights import parameter_count

__all__ = ["describe_checkpoint"]


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Family, container, hyper-parameters, tensors and the names of code the file refers to.

    Raises:
        CheckpointError: the file cannot be read safely.
    """
    loaded = load_file(path)
    document: dict[str, Any] = {
        "kind": "checkpoint",
        "file": path.name,
        "container": loaded.container,
        "sha256": loaded.sha256,
        "globals": list(loaded.global_names),
        "notes": list(loaded.notes),
    }
    try:
        imported, _ = read_checkpoint(path)
    except TxlError as error:
        document["family"] = f"not recognised: {error}"
    else:
        document |= {
            "family": imported.family,
            "parameters": parameter_count(imported.state),
            "config": msgspec.to_builtins(imported.config),
            "evaluation": {name: value for name, value in vars(imported.evaluation).items() if value is not None},
        }
        document["notes"] += list(imported.notes)
    document["tensors"] = [
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in _tensors(loaded.content)
    ]
    return document


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
