"""Pickle programs, as each container runs them; and NumPy's arrays in what they make."""

from __future__ import annotations

import ast
import collections
import io
import pickle  # noqa: TID251 - seeds are what others wrote with it
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from txl_export.checkpoints.files.budget import Budget
from txl_export.checkpoints.files.loading import module_state
from txl_export.checkpoints.files.pickle_names import Name, Storage, Stub
from txl_export.checkpoints.files.plain_data import plain_data
from txl_export.checkpoints.files.torchscript import script_state
from txl_export.checkpoints.files.unpickling import Unpickler, names_in
from txl_export.families.own_module.skeleton import skeleton
from txl_runtime.errors import CheckpointError

PLAIN = (str, int, float, bool, bytes, type(None), Tensor)
SCRIPTED = 128
"""From this way on a program may make objects of a TorchScript archive's classes."""
AMPLIFIED = 1 << 16
"""Of the elements that a program may make beside a fixed number for each of its bytes."""


def one_input(data: bytes) -> None:
    """Run a program in one of the ways there are, walk through what it made, and run it again."""
    way, program = (data[0], data[1:]) if data else (0, b"")
    names_in(io.BytesIO(program), Budget(len(program)))
    content = _run(way, program)
    if not isinstance(content, Storage):
        count = _walk(content)
        assert count <= AMPLIFIED + 64 * len(program), f"{count} objects of {len(program)} bytes"
        again = _run(way, program)
        assert _equal(content, again), "a program made two things"
        plain_data(content, Budget(len(program)))
        if isinstance(content, Stub):
            module_state(content)
        if way >= SCRIPTED:
            state, classes = script_state(content, Budget(len(program)))
            made = len(state) + len(classes)
            assert made <= AMPLIFIED + 64 * len(program), f"{made} names of {len(program)} bytes"
            assert all(type(value) is Tensor for value in state.values())
            _written(state, classes)


def seeds() -> Iterator[bytes]:
    """What torch.save, pickle.dump and NumPy write."""
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(2, dtype=torch.float16)}
    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    ordered = collections.OrderedDict([("a", 1), ("b", [1, 2.5, "c", None, True])])
    shared = [1, 2]
    for way, content in (
        (1, tensors),
        (2, tensors),
        (0, {"a": [1, (2, 3), {"b": b"c"}, frozenset({4})]}),
        (0, ordered),
        (0, collections.Counter("abca")),
        (0, [shared, shared, [shared]]),
        (3, {"array": array, "number": array[0, 0], "fortran": np.asfortranarray(array)}),
        (3, {"half": array.astype(np.float16), "none": np.zeros((0, 2))}),
        (0, torch.Size([2, 3])),
    ):
        yield bytes([way]) + program_of(content)
    for protocol in (2, 4, 5):
        yield bytes([3]) + pickle.dumps({"a": 1, "bytes": b"\xff", "set": {1}}, protocol)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    yield bytes([4]) + program_of(module)
    yield bytes([SCRIPTED + 1]) + record_of(scripted())


def scripted() -> bytes:
    """A TorchScript archive: a small module with a list of tensors."""
    module, file = torch.nn.Sequential(torch.nn.GRUCell(2, 2), torch.nn.ReLU()), io.BytesIO()
    module.caches = [torch.zeros(1)]  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), file)
    return file.getvalue()


def program_of(content: Any) -> bytes:
    """The pickle in what torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return record_of(file.getvalue())


def record_of(archive: bytes) -> bytes:
    """The pickle in an archive of torch's."""
    return torch._C.PyTorchFileReader(io.BytesIO(archive)).get_record("data.pkl")


def _written(state: dict[str, Tensor], classes: dict[str, str]) -> None:
    """The file for a module is Python, and imports what it always does."""
    try:
        text = skeleton(state, classes, "policy.pt")
    except CheckpointError:
        return
    found = ast.walk(ast.parse(text))
    assert sum(isinstance(node, ast.Import | ast.ImportFrom) for node in found) == 3, text


def _run(way: int, program: bytes) -> Any:
    room = [1 << 16]

    def storage(key: str, dtype: torch.dtype, count: int) -> Tensor:
        room[0] -= count * dtype.itemsize
        if room[0] < 0:
            raise CheckpointError("the file does not hold that")
        return torch.zeros(count, dtype=dtype)

    def nested(inner: bytes) -> Storage:
        return Storage(torch.zeros(len(inner) % 64))

    read = None if way % 6 == 0 else storage
    options: dict[str, Any] = {"legacy": way % 6 in (2, 5), "lenient": way % 6 in (3, 4)}
    if way % 6 == 3:
        options |= {"nested": nested}
    if way % 6 == 5:
        options |= {"bare": True}
    if way >= SCRIPTED:
        options |= {"scripted": True}
    return Unpickler(Budget(len(program)), read, **options).load(io.BytesIO(program))


def _walk(content: Any) -> int:
    """How many objects there are, shared ones once; everything has to be plain."""
    seen, waiting, count = set(), [content], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if isinstance(value, Stub | dict | list | tuple):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Stub):
                assert type(value) in (Stub, Name)
                waiting += [value.state, value.args, value.built]
            elif isinstance(value, dict):
                waiting += [*value, *value.values()]
            else:
                waiting += value
        else:
            assert type(value) in PLAIN, f"a {type(value).__name__}"
    return count


def _equal(left: Any, right: Any) -> bool:
    """Whether two contents are the same; shared parts are compared once."""
    seen: set[tuple[int, int]] = set()
    waiting = [(left, right)]
    while waiting:
        one, other = waiting.pop()
        if (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        if type(one) is not type(other):
            return False
        if isinstance(one, Stub):
            waiting += [(one.class_name, other.class_name), (one.state, other.state), (one.args, other.args)]
        elif isinstance(one, Tensor):
            if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
                return False
        elif isinstance(one, dict):
            if len(one) != len(other):
                return False
            waiting += [
                pair for items in zip(one.items(), other.items(), strict=True) for pair in zip(*items, strict=True)
            ]
        elif isinstance(one, list | tuple):
            if len(one) != len(other):
                return False
            waiting += zip(one, other, strict=True)
        elif one != other and one == one:  # NaN differs from itself
            return False
    return True
