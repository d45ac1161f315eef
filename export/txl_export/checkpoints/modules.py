"""Finds tensors of pickled modules by dotted name, and each part's class, without running their code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.containers import SAVE_AGAIN, SCRIPTED
from txl_export.checkpoints.files.loading import Loaded
from txl_export.checkpoints.files.pickle_names import CODE, Name, Stub, shown

_WITHOUT_TENSORS = ("einops.layers.torch.Rearrange", "einops.layers.torch.Reduce")
"""Layers without tensors whose pickles lack `_modules`, `_parameters` and `_buffers`."""
WRAPPERS = ("DataParallel", "DistributedDataParallel", "BalancedDataParallel")
LONGEST = 4096
"""Maximum number of characters in the name of a tensor or a part: nested modules in a small hostile file could make far
longer names."""
_MANGLED = re.compile(r"^__torch__\.|\.?___torch_mangle_\d+(?=\.)")
"""Matches what TorchScript adds to a class's Python name, e.g. "__torch__." and ".___torch_mangle_3"."""


def module_state(module: Stub) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state dict and the hyper-parameters of a pickled module.

    Tensors have the names that model.state_dict() gives them, without wrappers for several devices; tied tensors are
    the same object. Hyper-parameters are the model's own attributes that are numbers, text, None, or lists of them. For
    example, ({"word_emb.weight": [256, 32]}, {"n_layer": 4}).

    Raises:
        CheckpointError: the object is not a module.
    """
    top = _unwrapped(module)
    state = dict(_tensors(top, ""))
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    plain = {name: value for name, value in top.state.items() if not name.startswith("_") and _is_plain(value)}
    plain.pop("training", None)
    return state, plain


def submodule(module: Stub, name: str) -> Stub | None:
    """Return a part of a module by its dotted name, e.g. "layers.0.pos_ff", without wrappers; None if there is none.

    "" is the module itself.

    Raises:
        CheckpointError: the object, or a parent of the part, is not a module.
    """
    candidate = _unwrapped(module)
    for part in name.split(".") if name else ():
        child = _parts(candidate, "_modules").get(part)
        if not isinstance(child, Stub):
            return None
        candidate = _unwrapped(child)
    return candidate


def _tensors(module: Stub, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a module and its parts; a part with two names is yielded under both."""
    listed = module.state.get("_non_persistent_buffers_set")
    transient = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
    buffers = {name: value for name, value in _parts(module, "_buffers").items() if name not in transient}
    for name, tensor in (_parts(module, "_parameters") | buffers).items():
        if isinstance(tensor, Tensor):
            yield joined(path, name), tensor
        elif tensor is not None:
            raise CheckpointError(f"{shown(joined(path, name))} is not a tensor; {SAVE_AGAIN}")
    for name, child in _parts(module, "_modules").items():
        if isinstance(child, Stub):
            if child.class_name not in _WITHOUT_TENSORS:
                yield from _tensors(_unwrapped(child), joined(path, name))
        elif child is not None:
            raise CheckpointError(f"{shown(joined(path, name))} is not a module; {SAVE_AGAIN}")


def _unwrapped(module: Stub) -> Stub:
    while module.class_name.rpartition(".")[2] in WRAPPERS:
        inner = _parts(module, "_modules").get("module")
        if not isinstance(inner, Stub):
            raise CheckpointError(f"a {shown(module.class_name)} holds no module; {SAVE_AGAIN}")
        module = inner
    return module


def _parts(module: Stub, kind: str) -> dict[str, Any]:
    parts = module.state.get(kind)
    if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts):
        raise CheckpointError(
            f"{shown(module.class_name)} has no {kind}, expected a module as torch.save(model) writes it; {SAVE_AGAIN}"
        )
    return parts


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def unscripted(path: Path, loaded: Loaded) -> Loaded:
    """Replace the module of a TorchScript archive by its state dict, and add the classes of its parts.

    Content of other files is returned as it is. The tensors come in the order of `torch.jit.load(file).state_dict()`;
    tensors of other attributes stand between them, and tensors in lists and dictionaries, e.g. "caches.0", at the end.
    Classes have their Python names, e.g. "torch.nn.modules.rnn.LSTM".

    Raises:
        CheckpointError: the archive holds no module, or a part stores itself in a form that is not read here.
    """
    if loaded.container != SCRIPTED:
        return loaded
    if not _is_part(loaded.content):
        raise CheckpointError(f"{path}: the TorchScript archive holds no module; save it again with torch.jit.save")
    state: dict[str, Tensor] = {}
    classes: dict[str, str] = {}
    held: list[tuple[str, Tensor]] = []
    waiting = [("", loaded.content)]
    while waiting:
        name, part = waiting.pop()
        kind = classes[name] = _MANGLED.sub("", part.class_name).lstrip(".")
        if part.built is not None:
            raise CheckpointError(
                f"{path}: {shown(name) or 'the module'} is a {shown(kind)}, which stores itself in a form of its own, "
                "as quantised layers do; save the state dict of a plain module"
            )
        parts = []
        for key, value in part.state.items():
            if isinstance(value, Tensor):
                state[joined(name, key)] = value
            elif _is_part(value):
                parts.append((joined(name, key), value))
            else:
                held += _inside(value, joined(name, key))
        waiting += reversed(parts)
    named = {id(tensor) for tensor in state.values()}
    state |= {place: tensor for place, tensor in held if id(tensor) not in named and place not in state}
    if loaded.constants and not state:
        raise CheckpointError(
            f"{path}: its {loaded.constants} tensors are constants of its code, without names, as torch.jit.freeze "
            "leaves them; save the module before it is frozen"
        )
    return replace(loaded, content=state, classes=classes)


def _is_part(value: Any) -> bool:
    return isinstance(value, Stub) and not isinstance(value, Name) and value.class_name.startswith(CODE)


def _inside(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested lists, tuples and dictionaries, with names such as "caches.0"."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _inside(item, joined(path, str(key)))


def joined(path: str, name: str) -> str:
    """Return the dotted name of a part, e.g. "layers.0" for "layers" and "0"; the path "" is the module itself.

    Raises:
        CheckpointError: the name is longer than `LONGEST`.
    """
    dotted = f"{path}.{name}" if path else name
    if len(dotted) > LONGEST:
        raise CheckpointError(f"{shown(dotted)} has {len(dotted)} characters, expected a name of at most {LONGEST}")
    return dotted
