"""Tensors of modules in files by dotted names, and the class of each part. Their code is never run."""

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
"""Layers that pickle their patterns and nothing of a module."""
WRAPPERS = ("DataParallel", "DistributedDataParallel", "BalancedDataParallel")
LONGEST = 4096
"""Characters of the name of a tensor or a part: a file may ask for as many of them as it has bytes."""
_MANGLED = re.compile(r"^__torch__\.|\.?___torch_mangle_\d+(?=\.)")
"""The part of a TorchScript class's name that it did not have in Python."""


def module_state(module: Stub) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict and the hyper-parameters of a pickle of a whole module.

    Names are those of model.state_dict(), without wrappers for several devices; tied tensors are one object under
    every name. Hyper-parameters are the plain attributes of the model itself: numbers, text, None, and lists of them.

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
    """A part of a module by its dotted name, e.g. "layers.0.pos_ff", without wrappers; None if there is none.

    "" is the module itself.

    Raises:
        CheckpointError: the object, or one on the way, is not a module.
    """
    found = _unwrapped(module)
    for part in name.split(".") if name else ():
        child = _parts(found, "_modules").get(part)
        if not isinstance(child, Stub):
            return None
        found = _unwrapped(child)
    return found


def _tensors(module: Stub, path: str) -> Iterator[tuple[str, Tensor]]:
    """A module's tensors and those of its parts, by their names; a part is met as often as it is shared."""
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
    """A file with the tensors by name in place of a TorchScript archive's module, and the classes of its parts.

    Tensors are those of `torch.jit.load(file).state_dict()`, in its order, and those that other attributes hold: behind
    them come the tensors in lists and dictionaries that have no other name, as in "caches.0". A class is named as it
    was in Python, e.g. "torch.nn.modules.rnn.LSTM".

    Raises:
        CheckpointError: the archive holds no module, or a part that says in no readable way what it holds.
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
    """The tensors in a list, tuple or dictionary, with their names."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _inside(item, joined(path, str(key)))


def joined(path: str, name: str) -> str:
    """The dotted name of a part of what has the name `path`, "" for the whole.

    Raises:
        CheckpointError: it is longer than `LONGEST`.
    """
    dotted = f"{path}.{name}" if path else name
    if len(dotted) > LONGEST:
        raise CheckpointError(f"{shown(dotted)} has {len(dotted)} characters, expected a name of at most {LONGEST}")
    return dotted
