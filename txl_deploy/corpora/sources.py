"""Where documents come from: a folder, a file of JSON lines, a parquet file.

A folder's documents are the files directly in it, or below it with `recursive`, sorted by name; hidden ones are left
out. Each is read by its name: `.jsonl` and `.parquet` hold documents, `.npy` holds token ids, all else is one text.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from txl_export.token_files import read_ids, regular
from txl_runtime.errors import UsageError, one_line
from txl_runtime.streaming.checks import shown

from txl_deploy.corpora.documents import Bad, Document, Done, spelled
from txl_deploy.corpora.json_lines import read_json_lines
from txl_deploy.corpora.parquet import read_parquet, require_pyarrow

HOLDING = (".jsonl", ".parquet")
"""Ends of names of files that hold many documents."""


def is_corpus(path: Path) -> bool:
    """Whether a path holds documents, and is not one text or one row of token ids."""
    return path.is_dir() or path.suffix in HOLDING


@dataclass
class Corpus:
    """The documents of a folder or a file.

    Attributes:
        path: the folder or the file.
        named: which field of a line or a row has the text or the token ids; None for `text`, else `tokens`.
        recursive: whether folders in a folder count.
        files: what is read, in this order.
        unreadable: those of the files that could not be read when they were listed. Each is one bad document, and what
            cannot be read later ends the run: a document has the same index in every run of the same identity.
        left_out: folders that were seen and not looked into.
        count: how many documents there are, done or not; None until all of them were seen.
    """

    path: Path
    named: str | None = None
    recursive: bool = False
    files: list[Path] = field(default_factory=list)
    unreadable: set[Path] = field(default_factory=set)
    left_out: int = 0
    count: int | None = None

    def __post_init__(self) -> None:
        """List the files.

        Raises:
            UsageError: there is none, a folder cannot be read, or the name of the field is none.
            BackendError: pyarrow is needed and not installed.
        """
        if self.named is not None and not self.named.isprintable():
            raise UsageError(f"--field is {shown(self.named)}, expected the name of a field; check it")
        if self.path.is_dir():
            self._list(self.path)
        elif not self.path.is_file():
            raise UsageError(f"{self.path}: no such file, expected documents to score; check the path")
        else:
            self.files = [self.path]
        if not self.files:
            hint = f"; --recursive looks into its {self.left_out} folders" if self.left_out else ""
            raise UsageError(f"{self.path}: holds no document, expected a file to score, or a folder of them{hint}")
        if any(file.suffix == ".parquet" for file in self.files):
            require_pyarrow(next(file for file in self.files if file.suffix == ".parquet"))
        self.unreadable = {file for file in self.files if not _is_readable(file)}

    def _list(self, folder: Path) -> None:
        try:
            found = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}, expected a folder of documents; check its rights") from None
        for entry in found:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                self.files.append(folder / entry.name)
            elif self.recursive and not entry.is_symlink():  # a link may lead in a circle
                self._list(folder / entry.name)
            else:
                self.left_out += 1

    def name(self, file: Path) -> str:
        """How documents of a file are called: by its path in the folder; bytes that are no UTF-8 are escaped."""
        return spelled(file.relative_to(self.path) if file != self.path else Path(file.name))

    def size(self) -> int:
        """Bytes of all files, as far as they can be told."""
        return sum(_size(file) for file in self.files)

    def identity(self) -> str:
        """A SHA-256 over names, contents and which files are unreadable, the same wherever the corpus lies.

        Raises:
            UsageError: a file can no longer be read.
        """
        told = hashlib.sha256()
        for file in self.files:
            if file in self.unreadable:
                told.update(f"{self.name(file)}\0unreadable\0".encode())
                continue
            told.update(f"{self.name(file)}\0{_size(file)}\0".encode())
            try:
                with regular(file).open("rb") as stream:
                    while piece := stream.read(1 << 20):
                        told.update(piece)
            except OSError as error:
                why = f"{error.strerror}, expected a file to score; check its rights"
                raise UsageError(f"{spelled(file)}: {why}") from None
        return told.hexdigest()

    def documents(self, done: Done = lambda index, weight: False) -> Generator[Document | Bad]:
        """All documents but those that are done, in the corpus's order.

        Raises:
            UsageError: a file of many documents can no longer be read, or not to its end.
        """
        index = 0
        for file in self.files:
            if file.suffix in HOLDING and file in self.unreadable:
                if not done(index, 0):
                    why = "is a pipe, a device, a link to nothing or not yours to read, expected a file of documents"
                    yield Bad(index, self.name(file), 0, f"{spelled(file)}: {why}; check it")
                index += 1
            elif file.suffix in HOLDING:
                read = read_json_lines if file.suffix == ".jsonl" else read_parquet
                index = yield from read(file, self.name(file), self.named, index, done)
            else:
                if not done(index, _size(file)):
                    yield _whole(file, self.name(file), index)
                index += 1
        self.count = index


def _whole(file: Path, name: str, index: int) -> Document | Bad:
    """A file that is one document."""
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
        return Bad(index, name, weight, str(error))
    except OSError as error:
        why = f"{spelled(file)}: {error.strerror or one_line(error)}, expected a text; check its rights"
        return Bad(index, name, weight, why)


def _is_readable(file: Path) -> bool:
    try:
        return file.is_file() and os.access(file, os.R_OK)
    except OSError:
        return False


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0
