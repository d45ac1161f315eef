"""Describes a checkpoint file for `txl-deploy inspect`; no code in the file is run or imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from txl_runtime.errors import CheckpointError, TxlError

from txl_export.checkpoints import check_code_base, identify, import_model, load, scripted
from txl_export.checkpoints.files.containers import SCRIPTED
from txl_export.checkpoints.files.loading import Loaded, scan_globals
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.imported import ConfigNeededError, Imported
from txl_export.checkpoints.modules import joined, module_state
from txl_export.families.own_module.skeleton import recognised, skeleton
from txl_export.families.transformer_xl.weights import Weights, check_weights, parameter_count


def describe_checkpoint(
    path: Path,
    family: str = "auto",
    config: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's code base, container, hyper-parameters and tensors, and the names of code it refers to.

    If the file cannot be loaded, only these names and the reason ("refused") are returned. If the file lacks config
    values, "needed" says which options to give. `family`, `config` and `aliases` are those of an export.

    Raises:
        CheckpointError: the file cannot be loaded and refers to no code, or it is a folder that cannot be loaded.
        UsageError: an unknown code base.
    """
    check_code_base(family)
    try:
        content, loaded = load(path, aliases)
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
        code_base, unwrapped = identify(content, family, str(path))
    except TxlError as error:
        is_scripted = loaded.container == SCRIPTED
        document["family"] = f"not recognised: {scripted(str(path), content) if is_scripted else error}"
        document |= _layers(loaded, path) if is_scripted else {}
    else:
        document |= {"family": code_base, "recognised": f"{code_base}: {unwrapped.reason}"}
        try:
            imported = import_model(code_base, unwrapped, config, str(path))
            weights = check_weights(imported.config, imported.weights, path.name)
        except ConfigNeededError as error:
            document["needed"] = str(error)
        except TxlError as error:
            document["refused"] = str(error)
        else:
            document |= _model(imported, weights)
            document["notes"] += [note for note in imported.notes if note not in document["notes"]]
    document["tensors"] = [
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in _tensors(_content(loaded))
    ]
    return document


def _model(imported: Imported, weights: Weights) -> dict[str, Any]:
    evaluation = {name: value for name, value in vars(imported.evaluation).items() if value is not None}
    return {
        "parameters": parameter_count(weights),
        "vocabulary": "yes" if imported.vocabulary else "none",
        "config": msgspec.to_builtins(imported.config),
        "evaluation": evaluation,
        "dialect": {"initial_memory": imported.memory_start, "cluster_order": imported.cluster_order},
    }


def _layers(loaded: Loaded, path: Path) -> dict[str, Any]:
    """Return the layers of a TorchScript archive and a Python file that makes them, or the reason for no such file."""
    try:
        layers = recognised(loaded.content, loaded.classes)
        return {
            "layers": [{"name": name, "layer": text} for name, text in layers],
            "skeleton": skeleton(loaded.content, loaded.classes, path.name),
        }
    except CheckpointError as error:
        return {"layers": [], "skeleton": None, "refused": str(error)}


def _content(loaded: Loaded) -> Any:
    """Return a checkpoint's content; for a pickled module its state, and None for any other pickled object."""
    if not isinstance(loaded.content, Stub):
        return loaded.content
    try:
        return module_state(loaded.content)[0]
    except CheckpointError:
        return None


def _tensors(content: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Return every tensor of nested mappings with its path, e.g. "model.embedding.weight"."""
    if isinstance(content, Tensor):
        return [(path, content)]
    inside = content.items() if isinstance(content, Mapping) else ()
    return [tensor for key, value in inside for tensor in _tensors(value, joined(path, _key(key)))]


def _key(key: Any) -> str:
    return str(key) if isinstance(key, str | int | float | None) else f"({type(key).__name__})"
