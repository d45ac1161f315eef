"""How much work a file may ask for: in proportion to its size, whatever stands in it.

A pickle is a program. A few of its bytes can copy a list that thousands of others wrote, join names of a megabyte, or
read a nested file once more; so whoever does such a thing for a file first charges it to the file's `Budget`. What
every byte can do only once, an instruction or a storage that is read, needs no charge.

The contract for a file of n bytes: reading it takes at most 256 × n bytes of memory beyond a constant of 64 MiB, and
time linear in n. Honest checkpoints stay far below; most take little more than their own size.
"""

from __future__ import annotations

from typing import Any

from txl_runtime.errors import CheckpointError

PER_BYTE = 4
"""Units of work for each byte of a file; honest checkpoints need less than two. A unit is about a microsecond and 64
bytes: one entry that is copied, `TEXT` characters, a key that has to be held against another, `MEETINGS` of them that
only share a place in a dictionary."""
FREE = 1 << 16
"""Units for every file, however small."""
TEXT = 16
MEETINGS = 1024
FEW = 64
"""So many keys may have the same hash, whatever they are."""
VIEW = 2
"""So many bytes of a tensor that shares its storage with others are a unit: someone may convert each of them."""
OBJECT = 8
"""Units for an object of torch."""


class Budget:
    """The work that a file may still ask for.

    Attributes:
        size: of the file, in bytes.
        left: units of work.
    """

    __slots__ = ("_hashes", "left", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._hashes: dict[tuple[int, int], int] = {}
        self.left = PER_BYTE * size + FREE

    def charge(self, work: int) -> None:
        """Take off some units.

        Raises:
            CheckpointError: there are not as many left.
        """
        self.left -= work
        if self.left < 0:
            raise CheckpointError(
                f"asks for more than {PER_BYTE} steps of work for each of its {self.size} bytes, expected fewer "
                "than two, as in what programs save; the file is damaged or was made to do harm"
            )

    def charge_key(self, key: object, entries: dict[Any, Any]) -> None:
        """Take off what putting a key beside other entries may take.

        Text has a hash that no file can foresee, and keys that count up (0, 1, 2 …) never meet; others are counted.
        """
        if isinstance(key, str | bytes):
            self.charge(len(key) // TEXT)
            return
        if isinstance(key, tuple):
            texts = [len(part) // TEXT for part in key if isinstance(part, str | bytes)]
            self.charge(len(key) + sum(texts))
            if len(texts) == len(key):
                return
        many = len(entries)
        if many > FEW and not (type(key) is int and 0 <= key <= many + MEETINGS):
            place = (id(entries), hash(key))
            same = self._hashes[place] = self._hashes.get(place, 0) + 1
            self.charge(same + many // MEETINGS)

    def again(self) -> Budget:
        """The whole budget, for one more walk through what was read."""
        return Budget(self.size)
