"""Protocol buffers, read strictly: what two readers could understand differently is refused.

A message is fields one after the other: a tag (number and kind) and a value. A reader has to skip a field that it does
not know, to take the last of two values, to merge two messages: so what one checks need not be what another one runs.
Here a field is one of a table or refused, and one that can be there once is there once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

VARINT, BYTES, FIXED32, FIXED64 = 0, 2, 5, 1
Table: TypeAlias = dict[int, tuple[int, int, int]]
"""By a tag that a message may have: number, kind, and a bit of its own for a field that is there once, else 0."""


class RefusedError(Exception):
    """What was found, and what was expected in its place."""


def table(once: str = "", many: str = "") -> Table:
    """The fields of a message: numbers, each followed by v (a whole number), b (bytes), f or d (4 or 8 bytes)."""
    kinds = {"v": VARINT, "b": BYTES, "f": FIXED32, "d": FIXED64}
    found: Table = {}
    for place, field in enumerate([*once.split(), *many.split()]):
        number, kind = int(field[:-1]), kinds[field[-1]]
        found[number << 3 | kind] = number, kind, 1 << place if place < len(once.split()) else 0
    return found


def fields(message: bytes, known: Table, name: str) -> list[tuple[int, int | bytes]]:
    """Number and value of every field of a message, in time and memory linear in it.

    Raises:
        RefusedError: it is cut off, or has a field that is not known or is there twice.
    """
    found: list[tuple[int, int | bytes]] = []
    at, end, seen = 0, len(message), 0
    try:
        while at < end:
            tag = message[at]
            at += 1
            if tag > 127:
                tag, at = varint(message, at - 1)
            if tag not in known:
                raise RefusedError(f"a field {tag >> 3} of kind {tag & 7} in {name}", "those that graphs need")
            number, kind, bit = known[tag]
            if seen & bit:
                raise RefusedError(f"two fields {number} in {name}", "one")
            seen |= bit
            if kind in (BYTES, VARINT):
                value = message[at]
                at += 1
                if value > 127:
                    value, at = varint(message, at - 1)
                if kind == VARINT:
                    found.append((number, value))
                    continue
            else:
                value = 8 if kind == FIXED64 else 4
            found.append((number, message[at : at + value]))
            at += value
    except IndexError:
        at = end + 1
    if at > end:
        raise RefusedError(f"{name} that is cut off", "all of it")
    return found


def message(found: Iterable[tuple[int, int | bytes]]) -> bytes:
    """The message of which `fields` gives these numbers and values: byte for byte, where none has 4 or 8 bytes."""
    written = bytearray()
    for number, value in found:
        kind, figure, rest = (VARINT, value, b"") if isinstance(value, int) else (BYTES, len(value), value)
        for left in (number << 3 | kind, figure):
            while left > 127:
                written.append(left & 127 | 128)
                left >>= 7
            written.append(left)
        written += rest
    return bytes(written)


def varint(message: bytes, at: int) -> tuple[int, int]:
    """A whole number of at most 64 bits in its shortest form, and the place behind it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            if value >> 64 or (byte == 0 and shift > 7):
                raise RefusedError("a number of more than 64 bits, or with zeros before it", "its shortest form")
            return value, at
        if shift > 63:
            raise RefusedError("a number of more than 64 bits", "at most 64")


def varints(packed: bytes) -> list[int]:
    """Whole numbers one after the other, signed."""
    values, at = list[int](), 0
    try:
        while at < len(packed):
            value, at = varint(packed, at)
            values.append(signed(value))
    except IndexError:
        raise RefusedError("numbers that are cut off", "all of them") from None
    return values


def signed(value: int) -> int:
    """What 64 bits mean as a number with a sign."""
    return value - (1 << 64) if value >> 63 else value
