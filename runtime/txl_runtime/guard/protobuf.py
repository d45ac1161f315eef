"""A strict reader of protocol buffers: it refuses messages that two readers could understand differently.

A message is a sequence of fields, each a tag (number and kind) and a value. Ordinary readers skip unknown fields, take
the last of two values and merge two messages, so a checker and an engine may see different content. This reader refuses
a field that is not in its table, and a repeated field that may occur only once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

VARINT, BYTES, FIXED32, FIXED64 = 0, 2, 5, 1
"""Kinds of fields: the numbers of protocol buffers' wire types."""
Table: TypeAlias = dict[int, tuple[int, int, int]]
"""The allowed tags, each with (the field's number, its kind, a bit of its own if it may occur only once, else 0)."""


class RefusedError(Exception):
    """An error: a file breaks a rule. The arguments are two texts: the found content, and the expected content."""


def table(once: str = "", many: str = "") -> Table:
    """Make the table of a message from texts such as "1v 2b": field numbers with v for integer, b bytes, f 4 and d 8
    bytes.

    Args:
        once: fields that may occur at most once.
        many: fields that may occur any number of times.
    """
    kinds = {"v": VARINT, "b": BYTES, "f": FIXED32, "d": FIXED64}
    entries: Table = {}
    for place, field in enumerate([*once.split(), *many.split()]):
        number, kind = int(field[:-1]), kinds[field[-1]]
        entries[number << 3 | kind] = number, kind, 1 << place if place < len(once.split()) else 0
    return entries


def fields(message: bytes, known: Table, name: str) -> list[tuple[int, int | bytes]]:
    """Return (number, value) of every field of a message, in time and memory linear in its size.

    Raises:
        RefusedError: the message is cut off, or a field is unknown or occurs too often.
    """
    pairs: list[tuple[int, int | bytes]] = []
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
                    pairs.append((number, value))
                    continue
            else:
                value = 8 if kind == FIXED64 else 4
            pairs.append((number, message[at : at + value]))
            at += value
    except IndexError:
        at = end + 1
    if at > end:
        raise RefusedError(f"{name} that is cut off", "all of it")
    return pairs


def message(found: Iterable[tuple[int, int | bytes]]) -> bytes:
    """Return the message from which `fields` reads these pairs, except that kinds f and d become bytes."""
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
    """Read an integer of at most 64 bits, in its shortest form, at index `at`; return (integer, index after it)."""
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
    """Return the signed integers in a packed field."""
    values, at = list[int](), 0
    try:
        while at < len(packed):
            value, at = varint(packed, at)
            values.append(signed(value))
    except IndexError:
        raise RefusedError("numbers that are cut off", "all of them") from None
    return values


def signed(value: int) -> int:
    """Return 64 bits as a signed integer: -1 for 2**64 - 1."""
    return value - (1 << 64) if value >> 63 else value
