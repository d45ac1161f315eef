"""Read documents from a folder, or from a file of JSON lines.

A folder's documents are the files in it, and with `recursive` also the files in its folders, sorted by name; hidden
files are left out. A file's suffix says what it holds: `.npy` holds token ids; `.jsonl` holds one document per line,
`{"text": "…", "id": "…"}` or `{"tokens": [1, 2, 3]}`; any other file is one text.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from txl_export.token_files import read_ids, regular
from txl_runtime.errors import UsageError, brief, one_line
from txl_runtime.streaming.checks import shown

from txl_deploy.corpora.documents import Bad, Document, spelled

HOLDING = ".jsonl"
"""Suffix of files that hold many documents."""
Done = Callable[[int, int], bool]
"""A function (index, weight of a document) → True if the document has a result already and need not be read."""
TokenIds = list[Annotated[int, Meta(ge=0, lt=2**31)]]
"""Type of the token ids in a line of a corpus."""


def is_corpus(path: Path) -> bool:
    """Return True if a path holds documents; False for a single text or a single row of token ids."""
    return path.is_dir() or path.suffix == HOLDING


@dataclass
class Corpus:
    """The documents of a folder or a file.

    Attributes:
        path: the folder or the file.
        named: the field of a line that has the text or the token ids; None to use `text` or else `tokens`.
        recursive: True to search folders inside the folder, too.
        files: the files to read, in this order.
        left_out: number of folders that were found but not searched.
    """

    path: Path
    named: str | None = None
    recursive: bool = False
    files: list[Path] = field(default_factory=list)
    left_out: int = 0

    def __post_init__(self) -> None:
        """List the files of the corpus in `files`.

        Raises:
            UsageError: there is no file, a folder cannot be read, or the field's name is not printable.
        """
        if self.named is not None and not self.named.isprintable():
            raise UsageError(f"--field is {shown(self.named)}, expected the name of a field; check it")
        if self.path.is_dir():
            self._list(self.path)
        elif not self.path.is_file():
            raise UsageError(f"{self.path}: no such file, expected documents; check the path")
        else:
            self.files = [self.path]
        if not self.files:
            hint = f"; --recursive looks into its {self.left_out} folders" if self.left_out else ""
            raise UsageError(f"{self.path}: holds no document, expected a document, or a folder of them{hint}")

    def _list(self, folder: Path) -> None:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}, expected a folder of documents; check its rights") from None
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                self.files.append(folder / entry.name)
            elif self.recursive and not entry.is_symlink():  # a link could lead in a circle
                self._list(folder / entry.name)
            else:
                self.left_out += 1

    def name(self, file: Path) -> str:
        """Return the name of a file's documents: its path in the folder, with bytes that are not UTF-8 escaped."""
        return spelled(file.relative_to(self.path) if file != self.path else Path(file.name))

    def size(self) -> int:
        """Return the size of all files in bytes; a path that is no plain file counts 0."""
        return sum(map(_size, self.files))

    def identity(self) -> str:
        """Return a SHA-256 of the names and contents of all files, and of the names of unreadable files.

        The path of the corpus itself is not included.

        Raises:
            UsageError: a file of many documents cannot be read.
        """
        digest = hashlib.sha256()
        for file in self.files:
            opened = False
            try:
                with regular(file).open("rb") as stream:
                    opened = True
                    digest.update(f"{self.name(file)}\0{_size(file)}\0".encode())
                    while piece := stream.read(1 << 20):
                        digest.update(piece)
            except (OSError, UsageError) as error:
                if opened or file.suffix == HOLDING:
                    raise _broken_off(file, 0, error) from None
                digest.update(f"{self.name(file)}\0unreadable\0".encode())
        return digest.hexdigest()

    def documents(self, done: Done) -> Iterator[Document | Bad]:
        """Yield all documents for which `done` returns False, in the corpus's order.

        Raises:
            UsageError: a file of many documents cannot be read to its end. Such a file is not skipped, because the
                number of its documents is unknown, and every later document would have a wrong index.
        """
        index = 0
        for file in self.files:
            if file.suffix != HOLDING:
                if not done(index, _size(file)):
                    yield _whole(file, self.name(file), index)
                index += 1
                continue
            first, place, decoder = index, spelled(file), msgspec.json.Decoder(dict[str, msgspec.Raw])
            try:
                with regular(file).open("rb") as stream:
                    for number, line in enumerate(stream, 1):
                        if not line.strip():
                            continue
                        if not done(index, len(line)):
                            at = Document(index, f"{self.name(file)}:{number}", f"{place}:{number}", b"", len(line))
                            yield _document(decoder, line, self.named, at)
                        index += 1
            except OSError as error:
                raise _broken_off(file, index - first, error) from None


def _broken_off(file: Path, documents: int, error: Exception) -> UsageError:
    """Return the error for a file that could not be read further after `documents` documents."""
    return UsageError(
        f"{spelled(file)}: breaks off after {documents} documents ({getattr(error, 'strerror', None) or error}), "
        "expected to be read to its end; run the same command again once it can be read, with --resume where there is "
        "-o; or take the file out and begin anew"
    )


def _document(decoder: msgspec.json.Decoder[Any], line: bytes, named: str | None, at: Document) -> Document | Bad:
    """Parse one line into a document; `at` has the document's index, default name and place."""
    try:
        fields = decoder.decode(line)
        id = msgspec.json.decode(fields.get("id", b"null"), type=str | int | None)
        return Document(at.index, at.id if id is None else str(id), at.place, content_of(fields, named), at.weight)
    except UsageError as error:
        why = str(error)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        why = f"{brief(one_line(error))}, expected a JSON object with a text or token ids"
    return Bad(at.index, at.id, f"{at.place}: {why}; mend it, or take it out")


def content_of(fields: dict[str, msgspec.Raw], named: str | None) -> bytes | list[int]:
    """Return the text or the token ids from the fields of a line.

    For example, b"abc" of {"text": "abc"}, and [5, 9] of {"tokens": [5, 9]}.

    Raises:
        UsageError: there is no such field, or both `text` and `tokens`.
        msgspec.MsgspecError: the field holds neither a text nor token ids.
    """
    if named is None:
        there = [name for name in ("text", "tokens") if name in fields]
        if len(there) != 1:
            fields_found = " and ".join(there) or f"fields {shown(list(fields)[:8])}"
            raise UsageError(f"has {fields_found}, expected one of text and tokens; name the field with --field")
        named = there[0]
    if named not in fields:
        raise UsageError(f"has fields {shown(list(fields)[:8])}, expected {shown(named)}; check --field")
    fields_found = msgspec.json.decode(fields[named], type=str | TokenIds)
    return fields_found.encode(errors="surrogatepass") if isinstance(fields_found, str) else fields_found


def _whole(file: Path, name: str, index: int) -> Document | Bad:
    """Read a file that holds one document."""
    weight = _size(file)
    try:
        if file.suffix == ".npy":
            ids = read_ids(file)
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise UsageError(
                    f"{spelled(file)}: {ids.dtype} {list(ids.shape)}, expected token ids, whole numbers of shape [T]; "
                    "save it with numpy.save"
                )
            return Document(index, name, spelled(file), ids, weight)
        return Document(index, name, spelled(file), regular(file).read_bytes(), weight)
    except UsageError as error:
        return Bad(index, name, str(error))
    except OSError as error:
        why = f"{spelled(file)}: {error.strerror or one_line(error)}, expected a text; check its rights"
        return Bad(index, name, why)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
