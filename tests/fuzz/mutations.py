"""Seeded changes of bytes, for machines without a coverage-guided fuzzer."""

from __future__ import annotations

import random
from collections.abc import Sequence

NUMBERS = tuple(
    value.to_bytes(size, order, signed=value < 0)
    for size, bits in ((1, 8), (2, 16), (4, 32), (8, 64))
    for value in (0, 1, -1, (1 << (bits - 1)) - 1, -(1 << (bits - 1)), (1 << bits) - 1)
    for order in ("little", "big")
)


def changed(draws: random.Random, corpus: Sequence[bytes], longest: int) -> bytes:
    """One of the corpus with one to eight changes."""
    data = bytearray(draws.choice(corpus))
    for _ in range(draws.choice((1, 1, 1, 2, 3, 4, 8))):
        at = draws.randrange(len(data) + 1)
        match draws.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << draws.randrange(8)
            case 1 if data:
                data[at % len(data)] = draws.randrange(256)
            case 2:
                data[at:at] = draws.randbytes(draws.choice((1, 1, 2, 4, 16)))
            case 3:
                del data[at : at + draws.choice((1, 1, 2, 4, 16, 256))]
            case 4:
                number = draws.choice(NUMBERS)
                data[at : at + len(number)] = number
            case 5:
                data[at:at] = data[at : at + draws.choice((1, 4, 16, 64))] * draws.choice((1, 1, 2, 16))
            case 6:
                other = draws.choice(corpus)
                start = draws.randrange(len(other) + 1)
                data[at:] = other[start:]
            case 7:
                other = draws.choice(corpus)
                start = draws.randrange(len(other) + 1)
                piece = other[start : start + draws.choice((2, 8, 32, 128))]
                data[at : at + len(piece)] = piece
    return bytes(data[:longest])
