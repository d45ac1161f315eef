"""Read a file that a stranger may have changed: with a size limit, and only if it has the expected structure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from txl_runtime.errors import one_line
from txl_runtime.files import open_plain

MOST_BYTES = 1 << 24
"""Maximum size of a document in bytes, 16 MiB: a verification of 100,000 segments is smaller."""

MOST_TEXT = 400
"""Maximum number of characters of a text in a message or a terminal: names in a stranger's file may be of
any length.
"""

Word = Annotated[str, Meta(max_length=100_000)]
"""A text from a file, with a limit because a stranger may have written it."""
Number = Annotated[float, Meta(ge=0)]
"""A measured value, never negative; in JSON, infinity is null."""
Amount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A count that fits into 64 bits."""

T = TypeVar("T")


def short(value: object, most: int = MOST_TEXT) -> str:
    """Return a text unchanged, or shortened to `most` characters with an ellipsis at its end."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def check_size(size: int) -> None:
    """Refuse a document that is too large; call this before reading it if its size is known.

    Raises:
        ValueError: the size is more than `MOST_BYTES`.
    """
    if size > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")


def decode_document(data: bytes, kind: type[T]) -> T:
    """Decode a document from its bytes.

    Raises:
        ValueError: the document is too long, not JSON, or of a different structure; the message is one line.
    """
    check_size(len(data))
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(short(one_line(error), 200)) from None


def read_plain(path: Path, most: int) -> bytes:
    """Read at most `most` bytes of a plain file; a pipe or a device is refused, because reading it could hang.

    Raises:
        OSError: the file is missing, or is not a plain file.
    """
    with open_plain(path) as (file, _):
        return file.read(most) or b""  # read gives None for a system file without content now, e.g. /proc/kmsg


def read_document(path: Path) -> bytes:
    """Read a document, at most one byte more than the limit, which is enough to refuse it.

    Raises:
        OSError: there is no plain file at the path.
    """
    return read_plain(path, MOST_BYTES + 1)
