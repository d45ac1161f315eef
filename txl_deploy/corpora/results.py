"""The file of results: JSON lines, appended document by document, from which an interrupted run goes on.

The first line says what the results are of: model, corpus and options. Every further line is one document's
(`totals.Scores`), in the order in which they were computed. Only whole lines are written; a line that a kill or a full
disk has torn is the last one, and is cut off before the run goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from txl_export.token_files import regular
from txl_runtime.errors import UsageError, brief, one_line
from txl_runtime.files import lock

from txl_deploy.console import stderr
from txl_deploy.corpora.totals import Scores, Totals

FORMAT = "txl-deploy.scores/1"
LATER = ("weights", "vocabulary")
UNKNOWN = "was begun by version 0.8.0, so nothing tells whether weights and vocabulary are still the same"
SYNC_SECONDS = 5.0
"""How much work a power cut may cost; a kill costs none."""
MOST_BYTES = 1 << 24
"""Of a line."""


class Header(Struct, frozen=True, kw_only=True):
    """What a file of results is of.

    Attributes:
        format: "txl-deploy.scores/1".
        model_id, precision, segment_length: of the bundle; where segments are cut is a part of what is computed.
        corpus: its identity, a SHA-256 over names and contents.
        boundary_token: what every document began with, or None.
        field: what --field said, or None.
        weights: SHA-256 of the file of weights. Two exports of one model to int8 may quantise different ones.
        vocabulary: SHA-256 of the vocabulary's file, or None.
    """

    model_id: str
    precision: str
    segment_length: int
    corpus: str
    boundary_token: int | None
    field: str | None
    weights: str
    vocabulary: str | None
    format: str = FORMAT


class Finished:
    """Indices of documents that are finished: all below a number, and some above it, so that few are held."""

    def __init__(self) -> None:
        self._all_below, self._beyond = 0, set[int]()

    def __contains__(self, index: int) -> bool:
        return index < self._all_below or index in self._beyond

    def __len__(self) -> int:
        return self._all_below + len(self._beyond)

    @property
    def last(self) -> int:
        """The largest of them; -1 where there is none."""
        return max(self._beyond, default=self._all_below - 1)

    def add(self, index: int) -> None:
        """One more."""
        self._beyond.add(index)
        while self._all_below in self._beyond:
            self._beyond.remove(self._all_below)
            self._all_below += 1


class Results:
    """A file of results that is open for writing, locked against a second run.

    Args:
        path: the file.
        header: what the results will be of.
        resume: go on with a file that is there.
        force: replace a file that is there.

    Attributes:
        finished: documents whose results are in the file.
        totals: what they add up to.

    Raises:
        UsageError: the file is there and neither option is given; it is of something else, or damaged; another run
            writes to it; or it cannot be written.
    """

    def __init__(self, path: Path, header: Header, resume: bool = False, force: bool = False) -> None:
        self.finished, self.totals, self._path, self._synced = Finished(), Totals(), path, time.monotonic()
        self._begin: bytes | None = msgspec.json.encode(header) + b"\n"  # until there is something to write
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        try:
            self._file = os.open(regular(path), flags, 0o666)
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise UsageError(f"{path}: {said}, expected a file to write results to; check -o") from None
        try:
            self._lock()
            if not (resume or force) and os.fstat(self._file).st_size:
                raise UsageError(
                    f"{path}: is there already, expected a new file; --resume goes on, --force begins anew"
                )
            if resume and self._take_over(header):
                self._begin = None
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.add([])
            self._sync()
        finally:
            os.close(self._file)

    def add(self, scores: Sequence[Scores]) -> None:
        """Append lines in one piece. What `force` replaces is kept until there is something to write.

        Raises:
            OSError: the disk takes no more; what was written of a line is cut off when the run goes on.
        """
        if self._begin is not None:
            os.ftruncate(self._file, 0)
            self._append(self._begin)
            self._begin = None
        self._append(b"".join(msgspec.json.encode(each) + b"\n" for each in scores))
        for each in scores:
            self.finished.add(each.index)
            self.totals.add(each)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def check_count(self, documents: int) -> None:
        """Refuse results of documents that the corpus does not have, once it is known how many those are.

        Raises:
            UsageError: there are some.
        """
        last = self.finished.last
        if last >= documents:
            raise UsageError(
                f"{self._path}: holds a result of document {last}, and the corpus has {documents}; the file is "
                "damaged: take the line out, or begin anew with --force"
            )

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = time.monotonic()

    def _lock(self) -> None:
        try:
            free = lock(self._file)
        except OSError:  # a file system without locks
            return
        if not free:
            raise UsageError(f"{self._path}: another run writes to it, expected one at a time; wait for it")

    def _take_over(self, header: Header) -> bool:
        """Read what is there and cut off a torn line; whether anything was there.

        Raises:
            UsageError: it is of something else, or damaged.
        """
        lines = self._whole_lines()
        first = next(lines, None)
        if first is None:
            return False
        self._compare(first, header)
        for number, line in enumerate(lines, 2):
            try:
                scores = msgspec.json.decode(line, type=Scores)
                scores.check()
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"{self._path}:{number}: {brief(one_line(error))}, expected a document's result; the file is "
                    "damaged: take the line out, or begin anew with --force"
                ) from None
            if scores.index in self.finished:
                raise UsageError(
                    f"{self._path}:{number}: document {scores.index} stands there again, expected each once; take the "
                    "line out, or begin anew with --force"
                )
            self.finished.add(scores.index)
            self.totals.add(scores)
        return True

    def _whole_lines(self) -> Iterator[bytes]:
        """The lines that end; what stands behind them is cut off."""
        whole = 0
        with open(os.dup(self._file), "rb") as stream:  # noqa: PTH123 - a descriptor
            stream.seek(0)
            while line := stream.readline(MOST_BYTES):
                if not line.endswith(b"\n"):
                    if len(line) == MOST_BYTES or (not whole and not _begins_ours(line)):
                        raise self._foreign()
                    break
                yield line
                whole += len(line)
        os.ftruncate(self._file, whole)

    def _compare(self, line: bytes, header: Header) -> None:
        try:
            found = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            found = {}
        if found.get("format") != FORMAT:
            raise self._foreign()
        asked = msgspec.to_builtins(header)
        if found.keys().isdisjoint(LATER):
            asked = {name: value for name, value in asked.items() if name not in LATER}
            stderr.print(f"note: {self._path}: {UNKNOWN}", soft_wrap=True)
        for name, value in asked.items():
            if found.get(name) != value:
                raise UsageError(
                    f"{self._path}: holds results of another run, {name} is {brief(str(found.get(name)))}, expected "
                    f"{brief(str(value))}; give another -o, or begin anew with --force"
                )

    def _foreign(self) -> UsageError:
        return UsageError(
            f"{self._path}: holds no results of `txl-deploy score`, expected those of this run; give another -o, or "
            "replace it with --force"
        )


def _begins_ours(line: bytes) -> bool:
    """Whether a torn first line is one of ours."""
    begin = b'{"model_id":"'
    return line[: len(begin)] == begin[: len(line)]
