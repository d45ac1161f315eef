"""Plain data and tensors of what `program` wrote in its bounded process: nothing that a file names is looked for here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from txl_runtime.errors import CheckpointError
from txl_runtime.sandbox.process import Bounded, Bounds, EndedError

from txl_export.checkpoints.files import program
from txl_export.checkpoints.files.pickle_names import STORAGE_TYPES, Name, Stub, shown
from txl_export.checkpoints.files.program import HARM

MOST = 1 << 27
"""Bytes of a program; a vocabulary of 800,000 words in an NVIDIA checkpoint takes 40 MB."""
MEMORY, EACH, SECONDS = 1 << 28, 64, 20
"""Bytes that reading may take, and for each byte of a program; seconds of processor time."""
DIMENSIONS, LONGEST = 16, 1 << 40
"""Axes of a tensor, and their sizes: torch multiplies those of a tensor that is empty, too."""
VIEWS = 16
"""So many times the elements of a storage its views may have together: someone may convert each of them."""
NUMPY = {"f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "b1": torch.bool}
NUMPY |= {"i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64, "u1": torch.uint8}
PYTHON_2 = {"__builtin__.": "builtins.", "copy_reg.": "copyreg."}
StorageReader = Callable[[str, torch.dtype, int], Tensor]
"""The elements of a storage, one-dimensional, by key, dtype and number."""


class Written(Struct, frozen=True):
    """What programs made, as `program` writes it.

    Attributes:
        contents: of each program that was read.
        error: what is wrong with the next one; "" for nothing.
        end: where the last program ended.
        names: every dotted name that the programs refer to.
        blob: the bytes in them.
    """

    contents: list[Any]
    error: str
    end: int
    names: list[str]
    blob: bytes


def run(data: bytes, count: int) -> Written:
    """Run the first programs in some bytes, in a process that may die of them.

    Raises:
        CheckpointError: it did, or took more than its bounds.
    """
    bounds = Bounds(MEMORY + EACH * len(data), SECONDS, 10.0 * SECONDS)
    try:
        with Bounded(program.__file__, bounds, bounds.memory) as process:
            answer = process.ask(bytes([count]) + data)
    except EndedError as error:
        raise CheckpointError(f"the process that reads its pickle {error}; {HARM}") from None
    behind = 8 + int.from_bytes(answer[:8], "little")
    return Written(**json.loads(answer[8:behind]), blob=answer[behind:])


def canonical(name: str, aliases: Mapping[str, str]) -> str:
    """A name as an alias translates it, or as Python 3 has it."""
    for old, new in PYTHON_2.items():
        name = new + name.removeprefix(old) if name.startswith(old) else name
    return aliases.get(name, name)


@dataclass(eq=False)
class Storage:
    """The elements of one storage (or of a part of it), and the tensors already made of them.

    Equal views are one tensor object, so that ties are found with `is` in state dicts too.
    """

    elements: Tensor
    views: dict[Any, Tensor] = field(default_factory=dict)
    parts: dict[Any, Storage] = field(default_factory=dict)
    viewed: int = 0


class Builder:
    """Makes contents of what a program has written.

    Args:
        blob: the bytes that it refers to.
        storage: gives a storage's elements; raises CheckpointError where the file does not hold that.
        nested: gives the storage in a whole file, from its contents as they are written and what lies behind them.
        aliases: names in the file, and those to read them as.
    """

    def __init__(
        self,
        blob: bytes,
        storage: StorageReader,
        aliases: Mapping[str, str],
        nested: Callable[[list[Any], bytes], Storage] | None = None,
    ) -> None:
        self._blob, self._read, self._aliases, self._nested = blob, storage, aliases, nested
        self._storages: dict[str, tuple[torch.dtype, int, Storage]] = {}

    def content(self, written: Any) -> Any:
        """A program's content.

        Raises:
            CheckpointError: it is no plain data, or a tensor lies outside its storage.
        """
        found = self._made(written)
        if isinstance(found, Storage):
            raise CheckpointError("the content is a storage, expected plain data; save a state dict")
        return found

    def storage(self, written: Any) -> Storage:
        """A program's content, which is one storage.

        Raises:
            CheckpointError: it is something else.
        """
        if not isinstance(found := self._made(written), Storage):
            raise CheckpointError(f"a nested file holds no storage; {HARM}")
        return found

    def _made(self, written: Any) -> Any:
        if type(written) is not list:
            return written
        kind, *parts = written
        if kind == program.MADE:
            return self._object(*parts)
        ...
