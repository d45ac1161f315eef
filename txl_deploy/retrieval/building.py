"""Builds a datastore: feeds every text from empty memory, and keeps each position's feature and next token.

After every `COMMIT_ROWS` positions there is a commit: the build writes the files to the disk, then the model's state,
then the header that counts the rows. A build that was killed continues from its last commit, with the same result.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from rich.filesize import decimal
from txl_runtime.bundle.writing import write_named
from txl_runtime.errors import BackendError, TxlError, UsageError
from txl_runtime.model import Model
from txl_runtime.streaming.inputs import require_tokens
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.system import BINARY, NO_LINK, lock, sync_folder
from txl_runtime.types import Ids

from txl_deploy.console import Display
from txl_deploy.corpora.documents import Bad, Unit
from txl_deploy.corpora.encoding import Encoder
from txl_deploy.corpora.scoring import SEGMENTS_PER_CALL
from txl_deploy.corpora.sources import Corpus
from txl_deploy.retrieval.folder import (
    FEATURES,
    HEADER,
    INDEX,
    PARTS,
    TOKENS,
    Begun,
    Feature,
    Halves,
    Header,
    Held,
    Part,
    check_files,
    file_hash,
    hash_of,
    mapped,
    read_header,
    read_parts,
    write_header,
)
from txl_deploy.retrieval.searching import EXACT_ROWS, require_faiss, write_index
from txl_deploy.retrieval.store import feature_columns, require_feature

COMMIT_ROWS = 1 << 14
"""Number of positions between two commits; after a kill, at most this number of positions is read again."""
COLUMNS = (FEATURES, TOKENS, PARTS)


class Writer:
    """A datastore that is being built, locked against a second build.

    Attributes:
        header: the committed header.
        texts: hashes of the texts that are complete.
    """

    def __init__(self, folder: Path, model_id: str, width: int, feature: Feature = "softmax") -> None:
        self._folder, self._files = folder, dict[str, BinaryIO]()
        empty = {name: Held(0) for name in COLUMNS}
        self.header = Header(model_id=model_id, width=width, feature=feature, files=empty)
        self.texts = set[str]()
        self._rows, self._first = 0, 0
        self._open: Begun | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # e.g. a full disk; rows that are not committed do not count
                file.close()

    def find(self, append: bool) -> None:
        """Lock and read the store, if the folder holds one, without changing it.

        Raises:
            UsageError: the folder holds something else, or a complete store while `append` is False; or a second build
                writes to it.
        """
        folder = self._folder
        if not (folder / HEADER).exists():
            return self._require_empty()
        self._hold(0)
        self.header = read_header(folder, self.header.model_id)
        if self.header.complete and not append:
            raise UsageError(f"{folder}: is there already; --append adds to it, or give a different -o")
        if self.header.complete:
            check_files(folder, self.header)
        self.texts = {part.sha256 for part in read_parts(folder, self.header)} if self.header.rows else set()
        self._rows, self._open = self.header.rows, self.header.begun
        self._first = self._rows if self._open is None else self._open.first

    def _require_empty(self) -> None:
        """Raise UsageError if no store can begin here: the folder holds a file, or its parent does not exist."""
        folder = self._folder
        try:
            folder.parent.stat()
            inside = [each for each in folder.iterdir() if not each.name.startswith(".")] if folder.exists() else []
            odd = [each.name for each in inside if each.name not in COLUMNS or each.stat().st_size]
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}, expected a place for a datastore; choose another") from None
        if odd:
            raise UsageError(f"{folder}: holds {odd[0]}, expected an empty folder; choose another -o")

    def _hold(self, create: int) -> None:
        """Open and lock the files; `create` is `os.O_CREAT` if they may be missing."""
        flags = os.O_RDWR | create | NO_LINK | BINARY
        place = self._folder
        try:
            if create:
                place.mkdir(exist_ok=True)
            for name in COLUMNS:
                place = self._folder / name
                self._files[name] = open(place, "r+b", opener=lambda path, _: os.open(path, flags, 0o666))  # noqa: SIM115
            if lock(self._files[TOKENS].fileno()):
                return
        except OSError as error:
            wrong = f"{error.strerror or error}, expected a file to write to; check its rights"
            raise UsageError(f"{place}: {wrong}") from None
        raise UsageError(f"{self._folder}: another build writes to it, expected one at a time; wait for it")

    def begin(self) -> None:
        """Open the store for more rows, and mark it as incomplete until `finish`."""
        if not self._files:
            self._hold(os.O_CREAT)
            if (self._folder / HEADER).exists():
                raise UsageError(f"{self._folder}: another build wrote to it, expected one at a time; build again")
        for name in COLUMNS:
            self._cut(name, self.header.files[name].bytes)
        self.header = msgspec.structs.replace(self.header, complete=False)
        write_header(self._folder, self.header)

    def begun(self, sha256: str | None) -> tuple[int, StreamState | None]:
        """Return the number of rows that a text has already, and the model's state after them.

        If a different text is incomplete, its rows are dropped; with `sha256` None, the rows of any incomplete text.
        """
        begun, self._open = self._open, None
        if begun is None:
            return 0, None
        if begun.sha256 == sha256:
            return self._rows - begun.first, StreamState.load(self._folder / begun.state)
        self._cut(FEATURES, begun.first * 2 * self.header.width)
        self._cut(TOKENS, begun.first * 4)
        self._rows = begun.first
        self._commit(None)
        return 0, None

    def _cut(self, name: str, size: int) -> None:
        """Cut a file to a size in bytes, so that writing continues at its end."""
        if (size_of_file := self._files[name].seek(0, os.SEEK_END)) < size:
            raise UsageError(
                f"{self._folder / name}: has {size_of_file} bytes, expected {size}; build into a new folder"
            )
        self._files[name].truncate(size)
        self._files[name].seek(size)

    def add(self, features: Halves, tokens: Ids) -> None:
        """Add rows: features float16 [n, F], and the tokens after them, int32 [n].

        For example, features [64, 512] and tokens [64].
        """
        self._files[FEATURES].write(features.astype("<f2").tobytes())
        self._files[TOKENS].write(tokens.astype("<i4").tobytes())
        self._rows += len(tokens)

    def pause(self, sha256: str, state: StreamState) -> None:
        """Commit rows of an incomplete text, with the model's state after them."""
        name = f"state-{self._rows}.safetensors"
        write_named(self._folder / name, state.to_bytes())
        self._commit(Begun(sha256=sha256, first=self._first, state=name))

    def end(self, name: str, sha256: str) -> None:
        """Write the line of a text that is complete, and commit if `COMMIT_ROWS` rows are not committed."""
        part = Part(name=name, sha256=sha256, first=self._first, rows=self._rows - self._first)
        self._files[PARTS].write(msgspec.json.encode(part) + b"\n")
        self.texts.add(sha256)
        self._first = self._rows
        if self._rows - self.header.rows >= COMMIT_ROWS:
            self._commit(None)

    def uncommitted(self) -> int:
        """Return the number of rows since the last commit."""
        return self._rows - self.header.rows

    def finish(self, display: Display) -> None:
        """Commit all rows, make the index if the store is large, hash all files, and mark the store as complete."""
        self._commit(None)
        clustered, names = self._index(display), list(COLUMNS)
        if clustered:
            names.append(INDEX)
        display.stage("hash the files", len(names))
        files = dict[str, Held]()
        for name in names:
            place = self._folder / name
            size = self.header.files[name].bytes if name in COLUMNS else place.stat().st_size
            files[name] = Held(size, file_hash(place, size))
            display.advance()
        self.header = msgspec.structs.replace(self.header, files=files, complete=True, clustered=clustered)
        write_header(self._folder, self.header)

    def _index(self, display: Display) -> int:
        """Write the index, if the store is large; return the number of rows from which its clusters were computed."""
        rows, held = self._rows, self.header.clustered
        if rows <= EXACT_ROWS:
            return 0
        display.stage(f"index {rows:,} rows", rows)
        place, partial = self._folder / INDEX, self._folder / f".{INDEX}.partial"
        before = None
        if held and rows < 2 * held:
            before = place, self._indexed()
        partial.unlink(missing_ok=True)  # faiss would write through a link
        write_index(partial, mapped(self._folder, self.header)[0], display.advance, before)
        partial.replace(place)
        sync_folder(self._folder)
        return held if before else rows

    def _indexed(self) -> int:
        import faiss

        return int(faiss.read_index(str(self._folder / INDEX), faiss.IO_FLAG_MMAP).ntotal)

    def _commit(self, begun: Begun | None) -> None:
        """Write all files to the disk, then the header that counts their rows, and delete older states."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        files = {**self.header.files, **{name: Held(file.tell()) for name, file in self._files.items()}}
        self.header = msgspec.structs.replace(self.header, rows=self._rows, files=files, begun=begun)
        write_header(self._folder, self.header)
        for old in self._folder.glob("state-*.safetensors"):
            if begun is None or old.name != begun.state:
                old.unlink()


def build(
    model: Model,
    texts: list[Path],
    folder: Path,
    append: bool = False,
    named: str | None = None,
    recursive: bool = False,
) -> dict[str, Any]:
    """Build a datastore from all documents in files and folders, or continue a build that was ended.

    A document whose token ids are in the store already is left out.

    Raises:
        TxlError: a text cannot be read, or the folder cannot be written; committed rows are kept.
    """
    require_tokens(model.manifest, "datastore build")
    columns = feature_columns(model)
    feature = list(columns)[-1]
    width = columns[feature].stop - columns[feature].start
    corpora = [Corpus(path, named, recursive) for path in texts]
    encoder = Encoder(model.manifest, model.vocabulary)
    with ExitStack() as opened:
        writer = opened.enter_context(Writer(folder, model.manifest.model_id, width, feature))
        writer.find(append)
        require_feature(folder, writer.header, columns)
        display = opened.enter_context(Display())
        display.stage("count tokens")
        known = {hash_of(unit.own): len(unit.ids) - 1 for unit in documents(corpora, encoder)}
        new = {sha256: rows for sha256, rows in known.items() if sha256 not in writer.texts}
        rows = sum(new.values())
        if not rows and not writer.texts:
            raise UsageError(f"{folder}: the texts hold no two tokens, expected at least one position; give more text")
        if rows or not writer.header.complete:
            begun = writer.header.begun
            whole = begun.first if begun else writer.header.rows
            there = writer.header.rows - whole if begun and begun.sha256 in new else 0
            _say_sizes(display, folder, rows - there, whole + rows, width)
            try:
                writer.begin()
                _read(model, writer, display, documents(corpora, encoder), rows, columns[writer.header.feature])
                writer.finish(display)
            except (KeyboardInterrupt, SystemExit):
                rows_before = writer.header.rows
                display.warn(f"{folder}: keeps {rows_before:,} positions; the same command goes on behind them")
                raise
            except OSError as error:
                raise TxlError(
                    f"{folder}: cannot be written ({error.strerror}), expected room; make some, then build again"
                ) from None
    sizes = {name: held.bytes for name, held in writer.header.files.items()}
    return {
        "rows": writer.header.rows,
        "added": rows,
        "texts": len(writer.texts),
        "already_there": len(known) - len(new),
        "width": width,
        "feature": writer.header.feature,
        "search": "clusters" if writer.header.clustered else "exact",
        "bytes": sum(sizes.values()),
    }


def _read(model: Model, writer: Writer, display: Display, units: Iterator[Unit], total: int, columns: slice) -> None:
    """Feed every text that is not complete in the store, and add `columns` of the rows that the model returns."""
    stream, chunk = model.stream(1), model.segment_lengths[0] * SEGMENTS_PER_CALL
    display.stage("read texts", total)
    for unit in units:
        sha256 = hash_of(unit.own)
        if sha256 in writer.texts:
            continue
        first, state = writer.begun(sha256)
        stream.reset()
        if state is not None:
            stream.restore(state)
            display.advance(first)
        ids, last = unit.ids, len(unit.ids) - 1
        for at in range(first, last, chunk):
            end = min(at + chunk, last)
            with np.errstate(over="ignore"):
                features = stream.features(ids[None, at:end])[0, :, columns].astype(np.float16)
            if not np.isfinite(features).all():
                raise BackendError(
                    f"{unit.place}: a feature of tokens {at} … {end} is NaN or beyond float16, expected numbers; "
                    "`txl-deploy verify` the bundle"
                )
            writer.add(features, ids[at + 1 : end + 1])
            if end < last and writer.uncommitted() >= COMMIT_ROWS:
                writer.pause(sha256, stream.snapshot())
            display.advance(end - at)
        writer.end(unit.id, sha256)
    writer.begun(None)


def documents(corpora: list[Corpus], encoder: Encoder) -> Iterator[Unit]:
    """Yield the units of documents with at least 2 tokens; raise UsageError for a document that cannot be read."""
    for corpus in corpora:
        for document in corpus.documents(lambda index, weight: False):
            unit = encoder.unit(document)
            if isinstance(unit, Bad):
                raise UsageError(unit.why)
            if len(unit.ids) > 1:
                yield unit


def _say_sizes(display: Display, folder: Path, rows: int, total: int, width: int) -> None:
    """Print the store's final size; refuse a store that does not fit the disk, or a large store if faiss is missing."""
    require_faiss(total)
    index = (width + 8) * total if total > EXACT_ROWS else 0
    needed = rows * (2 * width + 4) + index
    more = f", of which {decimal(index)} are an index of all {total:,}" if index else ""
    display.warn(f"{rows:,} positions take about {decimal(needed)}{more}")
    if (free := shutil.disk_usage(folder if folder.exists() else folder.parent).free) < needed:
        raise UsageError(f"{folder}: has room for {decimal(free)}, expected {decimal(needed)}; make room")
