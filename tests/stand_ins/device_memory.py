"""The memory of a device that is not there: blocks under made-up addresses, and page-locked blocks of the host.

An address of the device is no address of this process: whoever reads it on the host ends the process. New blocks are
full of garbage, freed ones are poisoned and never given out again, so what still uses them is found out.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

FIRST, APART, END = 0x2000_0000_0000, 0x1_0000_0000, 0x4000_0000_0000
"""The first address of the first device, how far those of the next are away, and where all end: nothing of a process is
ever mapped there."""
STEP = 256
GARBAGE, POISON = 0xFF, 0xDD
"""Garbage is not a number in every type of numbers that has such: what is computed from it shows."""


class ViolationError(Exception):
    """Something was asked for that a GPU would do wrong without a word."""


@dataclass(eq=False)
class Block:
    """Some bytes.

    Attributes:
        kind: "device" or "pinned".
        pending: pieces of work not yet done that use it.
        context: in which it was made.
    """

    kind: str
    address: int
    data: Bytes = field(repr=False)
    freed: bool = False
    pending: int = 0
    context: int = 0

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + len(self.data)


class Memory:
    """Every block that was ever given out.

    Args:
        unified: whether addresses of the device are addresses of the host, as executables that run on the host want.
    """

    _opened = itertools.count()

    def __init__(self, unified: bool = False) -> None:
        self._unified = unified
        self._next = FIRST + APART * (next(self._opened) % ((END - FIRST) // APART))
        self._starts: list[int] = []
        self._blocks: list[Block] = []

    @property
    def held(self) -> list[Block]:
        """Blocks that were not freed."""
        return [block for block in self._blocks if not block.freed]

    def used(self, kind: str = "device") -> int:
        """Bytes that are held."""
        return sum(len(block.data) for block in self.held if block.kind == kind)

    def allocate(self, size: int, kind: str) -> Block:
        """A block full of garbage."""
        raw = np.full(size + STEP, GARBAGE, np.uint8)
        if kind == "pinned" or self._unified:
            skipped = -raw.ctypes.data % STEP
            data = raw[skipped : skipped + size]
            address = int(data.ctypes.data)
        else:
            data, address = raw[:size], self._next
            self._next += -(-size // STEP) * STEP + 3 * STEP  # what leaves a block meets nothing
        place = bisect.bisect(self._starts, address)
        self._starts.insert(place, address)
        self._blocks.insert(place, Block(kind, address, data))
        return self._blocks[place]

    def free(self, address: int, kind: str) -> None:
        """Poison a block."""
        block = self.around(address)
        if block is None or block.address != address or block.kind != kind:
            raise ViolationError(f"freed {address:#x}, where no {kind} block starts")
        if block.freed:
            raise ViolationError(f"freed the {kind} block at {address:#x} twice")
        block.freed = True
        block.data[...] = POISON
        if block.pending:
            raise ViolationError(f"freed a {kind} block of {len(block.data)} bytes that {block.pending} tasks await")

    def around(self, address: int) -> Block | None:
        """The block in which an address lies."""
        place = bisect.bisect(self._starts, address) - 1
        if place >= 0 and address < self._blocks[place].end:
            return self._blocks[place]
        return None

    def block(self, address: int, size: int, kind: str) -> Block:
        """The living block that holds a range.

        Raises:
            ViolationError: there is none, or the range leaves it.
        """
        block = self.around(address)
        if block is None or block.kind != kind:
            raise ViolationError(f"{address:#x} is in no {kind} memory")
        if block.freed:
            raise ViolationError(f"{address:#x} is in {kind} memory that was freed")
        if address + size > block.end:
            raise ViolationError(
                f"{size} bytes from {address:#x} leave their {kind} block by {address + size - block.end}"
            )
        return block

    def view(self, address: int, size: int, kind: str = "device") -> Bytes:
        """The bytes of a range."""
        block = self.block(address, size, kind)
        return block.data[address - block.address :][:size]

    def pinned(self, address: int, size: int) -> bool:
        """Return whether a range of the host is page-locked; a device's address is no address of the host."""
        block = self.around(address)
        if block is not None and (block.kind == "pinned" or not self._unified):
            self.block(address, size, "pinned")
            return True
        if FIRST <= address < END:
            raise ViolationError(f"{address:#x} was given as an address of the host, but is one of the device")
        return False


def rows_of(view: Bytes, width: int, rows: int, pitch: int) -> Bytes:
    """Rows that lie `pitch` bytes apart in a range, as [rows, width]; changes go through."""
    return np.lib.stride_tricks.as_strided(view, (rows, width), (pitch, 1))


def host_bytes(address: int, size: int) -> Bytes:
    """A range of the host that belongs to nobody here, to be read or written at once."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
