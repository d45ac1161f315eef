"""What a TorchScript archive holds by dotted names: tensors, and the class of each part. Its code is never opened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.pickle_names import SCRIPTED, Name, Stub, joined, shown

CONTAINER = "TorchScript"
_MANGLED = re.compile(r"^__torch__\.|\.?___torch_mangle_\d+(?=\.)")
"""What stands in the name of a class beside the name that it had in Python."""


def script_state(module: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of the archive's module, and the classes of its parts, "" the module itself.

    Tensors are those of `torch.jit.load(file).state_dict()`, in its order, and those that other attributes hold: behind
    them come the tensors in lists and dictionaries that have no other name, as in "caches.0". A class is named as it
    was in Python, e.g. "torch.nn.modules.rnn.LSTM".

    Raises:
        CheckpointError: the archive holds no module, or a part that says in no readable way what it holds.
    """
    if not _is_part(module):
        raise CheckpointError("the TorchScript archive holds no module; save it again with torch.jit.save")
    state: dict[str, Tensor] = {}
    classes: dict[str, str] = {}
    held: list[tuple[str, Tensor]] = []
    waiting = [("", module)]
    while waiting:
        name, part = waiting.pop()
        kind = classes[name] = _MANGLED.sub("", part.class_name).lstrip(".")
        if part.built is not None:
            raise CheckpointError(
                f"{shown(name) or 'the module'} is a {shown(kind)}, which stores itself in a form of its own, as "
                "quantised layers do; save the state dict of a plain module"
            )
        parts = []
        for key, value in part.state.items():
            path = joined(name, key)
            if isinstance(value, Tensor):
                state[path] = value
            elif _is_part(value):
                parts.append((path, value))
            else:
                held += _inside(value, path)
        waiting += reversed(parts)
    named = {id(tensor) for tensor in state.values()}
    state |= {path: tensor for path, tensor in held if id(tensor) not in named and path not in state}
    return state, classes


def _is_part(value: Any) -> bool:
    return isinstance(value, Stub) and not isinstance(value, Name) and value.class_name.startswith(SCRIPTED)


def _inside(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a list, tuple or dictionary, with their names."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _inside(item, joined(path, str(key)))
