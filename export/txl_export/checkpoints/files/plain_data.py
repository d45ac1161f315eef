"""NumPy's and OmegaConf's objects in a pickle as plain data: arrays are made of their bytes, configs of their nodes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.budget import OBJECT, VIEW, Budget
from txl_export.checkpoints.files.pickle_names import CONFIGS, Name, Stub, integers

TYPES = {"f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "b1": torch.bool}
TYPES |= {"i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64, "u1": torch.uint8}
"""Those that both have, by NumPy's names."""


def plain_data(content: Any, budget: Budget) -> Any:
    """Content as an `Unpickler` gives it, without NumPy's and OmegaConf's objects; others stay as they are.

    An interpolation of OmegaConf's, such as "${model.dim}", stays the text that it is. Each array is a copy of its
    bytes, which several may share: these are charged to the budget.

    Raises:
        CheckpointError: an array is not as large as its shape.
    """
    done: dict[int, Any] = {}

    def walk(value: Any) -> Any:
        if not isinstance(value, dict | list | tuple | Stub):
            return value
        if id(value) not in done:
            if isinstance(value, Stub) and value.class_name in CONFIGS and not isinstance(value, Name):
                done[id(value)] = walk(value.state.get("_content", value.state.get("_val")))
            elif isinstance(value, Stub):
                done[id(value)] = _number_or_array(value, budget)
            elif isinstance(value, dict):
                done[id(value)] = {key: walk(item) for key, item in value.items()}
            else:
                done[id(value)] = type(value)(map(walk, value))
        return done[id(value)]

    return walk(content)


def _number_or_array(stub: Stub, budget: Budget) -> Any:
    match stub.class_name.rpartition(".")[2], stub.args, stub.built:
        case "scalar", (Stub() as kind, bytes(data)), _:
            found = _tensor(data, kind, (), budget)
            return stub if found is None else found.item()
        case "_reconstruct", _, (_, shape, Stub() as kind, bool(columns), bytes(data)):
            found = _tensor(data, kind, shape, budget, columns)
        case "_frombuffer", (bytes(data), Stub() as kind, shape, order), _:
            found = _tensor(data, kind, shape, budget, type(order) is str and order == "F")
        case _:
            return stub
    return stub if found is None else found


def _tensor(data: bytes, kind: Stub, shape: Any, budget: Budget, columns: bool = False) -> Tensor | None:
    """The tensor; None where the type is none of `TYPES`. `columns`: the first axis runs fastest."""
    name = kind.args[0] if kind.args else None
    order = kind.built[1] if isinstance(kind.built, tuple) and len(kind.built) > 1 else "|"
    dtype = TYPES.get(name) if isinstance(name, str) and order in ("<", "|", "=") else None
    if dtype is None:
        return None
    sizes = integers(shape, "an array")
    if math.prod(sizes) * dtype.itemsize != len(data):
        raise CheckpointError(
            f"an array of {len(data)} bytes has the shape {list(sizes)} of {name}; the file is damaged, copy it again"
        )
    if max(sizes, default=0) > 1 << 40:
        raise CheckpointError(f"an array has the shape {list(sizes)} of {name}; the file is damaged, copy it again")
    budget.charge(OBJECT + len(data) // VIEW)
    if not data:
        return torch.zeros(sizes, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return flat.reshape(sizes[::-1]).permute(*range(len(sizes))[::-1]).contiguous() if columns else flat.reshape(sizes)
