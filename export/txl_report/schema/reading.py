"""Read a file that a stranger may have changed: bounded, whole, and by the structure that it has to have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from txl_runtime.errors import one_line
from txl_runtime.files import open_plain

MOST_BYTES = 1 << 24
"""Most bytes of a document: a verification of 100,000 segments is smaller."""

MOST_TEXT = 400
"""Most characters of a text in a message or a terminal: names in a stranger's file may be of any length."""

Word = Annotated[str, Meta(max_length=100_000)]
Number = Annotated[float, Meta(ge=0)]
"""A measured value, never negative; infinity is null in JSON."""
Amount = Annotated[int, Meta(ge=0, le=2**63 - 1)]

T = TypeVar("T")


def short(value: object, most: int = MOST_TEXT) -> str:
    """Return a text unchanged, or its beginning and an ellipsis if it has more than `most` characters."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def check_size(size: int) -> None:
    """Refuse a document of too many bytes, before it is read if its size is known.

    Raises:
        ValueError: the size is more than `MOST_BYTES`.
    """
    if size > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")


def decode_document(data: bytes, kind: type[T]) -> T:
    """Decode a document from its bytes.

    Raises:
        ValueError: it is too long, no JSON, or of a different structure; the message is one line.
    """
    check_size(len(data))
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(short(one_line(error), 200)) from None


def read_plain(path: Path, most: int) -> bytes:
    """Read at most `most` bytes of a plain file; a pipe or a device does not hang the reader.

    Raises:
        OSError: the file is missing, or is something else.
    """
    with open_plain(path) as (file, _):
        return file.read(most) or b""  # None for a system file that has nothing now, such as /proc/kmsg


def read_document(path: Path) -> bytes:
    """Read a document's bytes, at most one more than the limit, which is enough to refuse it.

    Raises:
        OSError: there is no such plain file.
    """
    return read_plain(path, MOST_BYTES + 1)
