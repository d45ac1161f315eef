"""How strictly a file is read that a stranger may have changed: whole, bounded, and by the structure it has to have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from txl_runtime.errors import one_line
from txl_runtime.files import open_plain

MOST_BYTES = 1 << 24
"""Of a document: a verification of 100,000 segments takes less."""

MOST_TEXT = 400
"""Characters of a text that a message or a terminal shows: names in a stranger's file may be of any length."""

Word = Annotated[str, Meta(max_length=100_000)]
Number = Annotated[float, Meta(ge=0)]
"""What is measured is not negative; what is infinite stands in JSON as null."""
Amount = Annotated[int, Meta(ge=0, le=2**63 - 1)]

T = TypeVar("T")


def short(value: object, most: int = MOST_TEXT) -> str:
    """A text as it is, or its beginning and an ellipsis where it has more than `most` characters."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def check_size(size: int) -> None:
    """Refuse so many bytes, before they are read where that is known.

    Raises:
        ValueError: they are too many for a document.
    """
    if size > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")


def decode_document(data: bytes, kind: type[T]) -> T:
    """A document from its bytes.

    Raises:
        ValueError: it is too long, no JSON, or of another structure; the message is one line.
    """
    check_size(len(data))
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(short(one_line(error), 200)) from None


def read_plain(path: Path, most: int) -> bytes:
    """At most so many bytes of a plain file; a pipe does not hang, and neither does what only looks like a file.

    Raises:
        OSError: there is none, or it is something else.
    """
    with open_plain(path) as (file, _):
        return file.read(most) or b""  # None of a file of the system's that has nothing now, such as /proc/kmsg


def read_document(path: Path) -> bytes:
    """A document's bytes; of one that is too long as many as tell that it is.

    Raises:
        OSError: there is no such plain file.
    """
    return read_plain(path, MOST_BYTES + 1)
