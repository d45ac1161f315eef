"""Pickle programs, as each container runs them: the reader's own process, and what is made of its answers."""

from __future__ import annotations

import ast
import collections
import io
import pickle  # noqa: TID251 - seeds are what others wrote with it
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pickle_programs import in_one_process
from torch import Tensor
from txl_export.checkpoints.files import rebuilding
from txl_export.checkpoints.files.containers import SCRIPTED as ARCHIVE
from txl_export.checkpoints.files.loading import Loaded
from txl_export.checkpoints.files.pickle_names import Name, Stub
from txl_export.checkpoints.modules import module_state, unscripted
from txl_export.families.own_module.skeleton import skeleton
from txl_runtime.errors import CheckpointError

PLAIN = (str, int, float, bool, bytes, type(None), Tensor)
SCRIPTED = 128
"""From this way on the content may be a TorchScript archive's."""
AMPLIFIED = 1 << 16
"""The values that a program may make beside a fixed number for each of its bytes."""


def one_input(data: bytes) -> None:
    """Run a program, or five, look at everything that it made, and run it again."""
    way, program = (data[0], data[1:]) if data else (0, b"")
    content = _made(way, program)
    count = sum(1 for _ in _walk(content))
    assert count <= AMPLIFIED + 64 * len(program), f"{count} values of {len(program)} bytes"
    assert repr([*_walk(content)]) == repr([*_walk(_made(way, program))]), "a program made two things"
    if isinstance(content, Stub):
        module_state(content)
    if way >= SCRIPTED:
        loaded = unscripted(Path("policy.pt"), Loaded(ARCHIVE, content, (), ""))
        assert len(loaded.content) + len(loaded.classes) <= AMPLIFIED + 64 * len(program)
        assert all(type(value) is Tensor for value in loaded.content.values())
        _written(loaded)


def seeds() -> Iterator[bytes]:
    """Yield files as torch.save, pickle.dump and NumPy write them."""
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


def _written(loaded: Loaded) -> None:
    """The file for a module is Python, and imports what it always does."""
    try:
        text = skeleton(loaded.content, loaded.classes, "policy.pt")
    except CheckpointError:
        return
    found = ast.walk(ast.parse(text))
    assert sum(isinstance(node, ast.Import | ast.ImportFrom) for node in found) == 3, text


def _made(way: int, program: bytes) -> Any:
    """The content of the last program that runs; three ways have storages of files, the others none."""
    room = [1 << 16]

    def storage(key: str, dtype: torch.dtype, count: int) -> Tensor:
        room[0] -= count * dtype.itemsize
        if room[0] < 0 or way % 6 == 0:
            raise CheckpointError("the file does not hold that")
        return torch.zeros(count, dtype=dtype)

    def nested(contents: list[Any], behind: bytes) -> rebuilding.Storage:
        return rebuilding.Storage(torch.zeros(len(behind) % 64))

    with in_one_process():
        written = rebuilding.run(program, 5 if way % 6 == 5 else 1)
    if written.error:
        raise CheckpointError(written.error)
    builder = rebuilding.Builder(written.blob, storage, {"a.B": "c.D"}, nested if way % 6 == 3 else None)
    return builder.plain(written.contents[-1])


def _walk(content: Any) -> Iterator[Any]:
    """Everything in a content, containers by their length alone; all of it has to be plain."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Stub):
            assert type(value) in (Stub, Name)
            yield value.class_name
            waiting += [value.state, value.args, value.built]
        elif isinstance(value, dict):
            yield len(value)
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            yield type(value), len(value)
            waiting += value
        else:
            assert type(value) in PLAIN, f"a {type(value).__name__}"
            yield (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value
