"""Constants of a graph: one encoding, and numbers of their type."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from txl_runtime.guard.graph_check import Walk
from txl_runtime.guard.protobuf import RefusedError


def varint(value: int) -> bytes:
    return (varint_rest(value) if value > 127 else b"") or bytes([value])


def varint_rest(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7)


def held(kind: int, numbers: Sequence[int], field: int = 5, packed: bool = True, more: bytes = b"") -> Walk:
    """A constant whose numbers are written as whole ones of up to 64 bits, in a graph of nothing else."""
    parts = [varint(number % 2**64) for number in numbers]
    body = b"".join(parts)
    tag = varint(field << 3 | 2) + varint(len(body)) if packed else b""
    data = tag + body if packed else b"".join(varint(field << 3) + part for part in parts)
    tensor = varint(1 << 3) + varint(len(numbers)) + varint(2 << 3) + varint(kind) + b"\x42\x01c" + data + more
    inner = b"\x2a" + varint(len(tensor)) + tensor
    return Walk(b"\x08\x0a\x42\x02\x10\x12\x3a" + varint(len(inner)) + inner, "step", "weights", 0)


WHOLE = [(2, 0, 8), (3, 1, 8), (4, 0, 16), (5, 1, 16), (6, 1, 32), (9, 0, 1), (10, 0, 16), (16, 0, 16)]
"""ONNX's number of each type whose numbers stand in the field for 32 bits, whether it has a sign, and its bits."""


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("kind", "sign", "bits"), [*WHOLE, (12, 0, 32)])
def test_whole_numbers_are_held_to_their_type_however_they_are_written(kind, sign, bits, packed):
    """ONNX Runtime takes the low bits of what is larger, so it would see other sizes than the check."""
    field, low, high = 11 if kind == 12 else 5, -(2 ** (bits - 1)) if sign else 0, 2 ** (bits - sign) - 1
    held(kind, [low, high], field, packed)
    for number in (low - 1, high + 1, 2**32 + low, 2**63 - 1, -(2**63), high - 2**64 + 2**40):
        with pytest.raises(RefusedError, match="numbers beyond its type"):
            held(kind, [number], field, packed)


def test_a_constant_has_one_encoding_which_is_its_types_own():
    numbers = held(7, [-(2**63), 2**63 - 1], 7).values["c"].numbers
    assert numbers is not None
    assert numbers.tolist() == [-(2**63), 2**63 - 1]
    held(13, [2**64 - 1], 11)
    for kind, numbers, field, more in (
        (6, [1], 7, b""),  # another type's field
        (7, [1], 5, b""),
        (6, [1], 5, b"\x3a\x01\x01"),  # a second one
        (6, [1], 5, b"\x4a\x04\1\0\0\0"),  # raw bytes as well
        (6, [1, 2], 5, b"\x08\x03"),  # of another number than its sizes say
        (1, [1], 5, b""),
        (8, [1], 5, b""),  # text
        (21, [1], 5, b""),  # 4 bits
        (6, [1], 5, b"\x70\x01"),  # said to be outside
    ):
        with pytest.raises(RefusedError):
            held(kind, numbers, field, more=more)
    with pytest.raises(RefusedError, match="other truth values"):
        held(9, [], packed=False, more=b"\x08\x01\x4a\x01\2")
