"""Decisions out of bytes: whoever changes a byte changes one decision, so that a fuzzer can build structured input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Bytes, read from the front; behind their end every decision is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        """The next bytes, at most `count`."""
        taken = self._data[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self.left)

    def number(self, most: int) -> int:
        """0 … most."""
        return int.from_bytes(self.take((most.bit_length() + 7) // 8), "little") % (most + 1)

    def flag(self) -> bool:
        """No or yes."""
        return self.number(1) == 1

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.number(len(options) - 1)]

    def some(self, most: int = 255) -> bytes:
        """Bytes behind their own number."""
        return self.take(self.number(most))

    def text(self, most: int = 31) -> str:
        """Text of any kind, lone surrogates too."""
        return self.some(most).decode("utf-8", "surrogateescape" if self.flag() else "replace")
