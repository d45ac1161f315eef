"""Documents in a file of JSON lines: `{"text": "…", "id": "…"}` or `{"tokens": [1, 2, 3]}`, one in each line."""

from __future__ import annotations

from collections.abc import Generator
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from txl_export.token_files import regular
from txl_runtime.errors import UsageError, brief, one_line
from txl_runtime.streaming.checks import shown

from txl_deploy.corpora.documents import Bad, Document, Done, spelled

MOST_BYTES = 1 << 30
"""Of a line: a document has to fit into memory several times."""
MOST_OF_ID = 4096
TokenIds = list[Annotated[int, Meta(ge=0, lt=2**31)]]


def read_json_lines(
    file: Path, name: str, named: str | None, index: int, done: Done
) -> Generator[Document | Bad, None, int]:
    """The documents of a file, but for those that are done. Empty lines are none.

    Args:
        file: to read.
        name: how documents call it that have no name of their own.
        named: the field that holds the text or the token ids; None for `text`, else `tokens`.
        index: of the first document.
        done: which documents are not needed.

    Returns:
        The index after the last document.

    Raises:
        UsageError: the file cannot be read to its end. It is not skipped, because nobody knows how many documents
            there are in the rest, and with another number every later document would have another index.
    """
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    first, place = index, spelled(file)
    try:
        with regular(file).open("rb") as stream:
            number = 0
            while line := stream.readline(MOST_BYTES + 1):
                number += 1
                weight, said = len(line), f"{name}:{number}"
                if weight > MOST_BYTES and not line.endswith(b"\n"):
                    weight += _skip_line(stream)
                    line = b""
                elif not line.strip():
                    continue
                if not done(index, weight):
                    yield _document(decoder, line, named, Document(index, said, f"{place}:{number}", b"", weight))
                index += 1
    except OSError as error:
        raise broken_off(file, index - first, error) from None
    return index


def broken_off(file: Path, documents: int, error: Exception) -> UsageError:
    """The error of a file that could not be read further after so many documents."""
    said = getattr(error, "strerror", None) or one_line(error) or type(error).__name__
    return UsageError(
        f"{spelled(file)}: breaks off after {documents} documents ({said}), expected to be read to its end; run the "
        "same command again once it can be read, with --resume where there is -o; or take the file out and begin anew"
    )


def _skip_line(stream: BufferedReader) -> int:
    """Go to the end of a line that is not held; how many bytes that was."""
    many = 0
    while piece := stream.readline(1 << 20):
        many += len(piece)
        if piece.endswith(b"\n"):
            break
    return many


def _document(decoder: msgspec.json.Decoder[Any], line: bytes, named: str | None, at: Document) -> Document | Bad:
    """What a line holds; `at` says its place. An empty line here is one that was too long."""
    try:
        if not line:
            raise UsageError(f"is longer than {MOST_BYTES} bytes, expected a document that fits into memory")
        fields = decoder.decode(line)
        given = fields.get("id")
        id = None if given is None else msgspec.json.decode(given, type=str | int | None)
        id = at.id if id is None else str(id)
        if len(id) > MOST_OF_ID:
            raise UsageError(f"has an id of {len(id)} characters, expected at most {MOST_OF_ID}")
        return Document(at.index, id, at.place, content_of(fields, named), at.weight)
    except UsageError as error:
        why = str(error)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        why = f"{brief(one_line(error))}, expected a JSON object with a text or token ids"
    return Bad(at.index, at.id, at.weight, f"{at.place}: {why}; mend it, or leave such documents out with --skip-bad")


def content_of(fields: dict[str, msgspec.Raw], named: str | None) -> bytes | list[int]:
    """The text or the token ids among the fields of an object.

    Raises:
        UsageError: there is no such field, or it is not clear which.
        msgspec.MsgspecError: it holds something else.
    """
    if named is None:
        there = [name for name in ("text", "tokens") if name in fields]
        if len(there) != 1:
            found = " and ".join(there) or f"fields {shown(list(fields)[:8])}"
            raise UsageError(f"has {found}, expected one of text and tokens; name the field with --field")
        named = there[0]
    if named not in fields:
        raise UsageError(f"has fields {shown(list(fields)[:8])}, expected {shown(named)}; check --field")
    found = msgspec.json.decode(fields[named], type=str | TokenIds)
    return found.encode(errors="surrogatepass") if isinstance(found, str) else found
