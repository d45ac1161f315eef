"""Write the file of results: JSON lines, one per document, from which an interrupted run can continue.

The first line names the model, the corpus and the options. Every further line is the result of one document
(`totals.Scores`), in the order of computation. Only the last line can be incomplete, after a kill or on a full disk; it
is removed before the run continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from txl_export.token_files import regular
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError, brief, one_line
from txl_runtime.system import lock

from txl_deploy.console import stderr
from txl_deploy.corpora.sources import Corpus
from txl_deploy.corpora.totals import Scores, Totals
from txl_deploy.retrieval.store import Store

FORMAT = "txl-deploy.scores/1"
"""Value of the field `format` in the first line."""
LATER = {"weights", "vocabulary"}
"""Fields of the first line that files of version 0.8.0 lack."""
UNKNOWN = "was begun by version 0.8.0, so nothing tells whether weights and vocabulary are still the same"
"""Warning when a run continues a file of version 0.8.0."""


def header_of(manifest: Manifest, corpus: Corpus, store: Store | None = None) -> dict[str, Any]:
    """Return the first line of the file, which identifies the bundle, the documents and the datastore.

    The model id does not suffice: two int8 exports that quantised different weights have the same model id, and so have
    two exports with different vocabularies. The segment length is included because it changes the results.
    """
    return {
        "model_id": manifest.model_id,
        "precision": manifest.precision,
        "segment_length": manifest.segment_lengths[0],
        "corpus": corpus.identity(),
        "boundary_token": manifest.boundary_token,
        "field": corpus.named,
        "weights": manifest.files[manifest.weights].sha256,
        "vocabulary": manifest.files[manifest.vocabulary].sha256 if manifest.vocabulary else None,
        "datastore": None if store is None else store.identity,
        "format": FORMAT,
    }


class Results:
    """A file of results that is open for writing, and locked so that no second run writes to it.

    Attributes:
        finished: indices of the documents whose results are in the file.
        totals: the sums of these results.

    Raises:
        UsageError: the file exists and neither `resume` nor `force` is given; or the file is not of this run, is
            damaged, cannot be written, or a second run writes to it.
    """

    def __init__(self, path: Path, header: dict[str, Any], resume: bool = False, force: bool = False) -> None:
        self.finished, self.totals, self._path = set[int](), Totals(), path
        try:
            self._file = regular(path).open("a+b")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{path}: {reason}, expected a file to write results to; check -o") from None
        try:
            if not _is_free(self._file.fileno()):
                raise UsageError(f"{path}: another run writes to it, expected one at a time; wait for it")
            if self._file.tell() and not (resume or force):
                raise UsageError(
                    f"{path}: is there already, expected a new file; --resume goes on, --force begins anew"
                )
            length = self._read(header) if resume else 0
            self._begin = b"" if length else msgspec.json.encode(header) + b"\n"
            if length:
                self._file.truncate(length)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.add([])
        self._file.close()

    def add(self, scores: Sequence[Scores]) -> None:
        """Append a line for each of the scores.

        Raises:
            OSError: the disk is full; an incomplete line is removed when the run continues.
        """
        # the old content is replaced only now, so that a run that fails before its first result does not lose it
        if self._begin:
            self._file.truncate(0)
        self._file.write(self._begin + b"".join(msgspec.json.encode(each) + b"\n" for each in scores))
        self._file.flush()
        self._begin = b""
        for each in scores:
            self.finished.add(each.index)
            self.totals.add(each)

    def _read(self, header: dict[str, Any]) -> int:
        """Read the results of an earlier run, and return the number of bytes of its complete lines.

        Raises:
            UsageError: the file is not a file of results of this run, or is damaged.
        """
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                if number == 1 and not msgspec.json.encode(header).startswith(line):
                    raise self._foreign()
                break
            if number == 1:
                self._compare(line, header)
            else:
                try:
                    scores = msgspec.json.decode(line, type=Scores)
                    if scores.index in self.finished:
                        raise ValueError(f"document {scores.index} stands there again")
                except (ValueError, RecursionError) as error:
                    raise UsageError(
                        f"{self._path}:{number}: {brief(one_line(error))}, expected the result of one more document; "
                        "the file is damaged: take the line out, or begin anew with --force"
                    ) from None
                self.finished.add(scores.index)
                self.totals.add(scores)
            whole += len(line)
        return whole

    def _compare(self, line: bytes, header: dict[str, Any]) -> None:
        try:
            header_in_file = msgspec.json.decode(line, type=dict[str, Any])
        except (ValueError, RecursionError):
            header_in_file = {}
        if header_in_file.get("format") != FORMAT:
            raise self._foreign()
        if header_in_file.keys().isdisjoint(LATER):
            stderr.print(f"note: {self._path}: {UNKNOWN}", soft_wrap=True)
            header = {name: value for name, value in header.items() if name not in LATER}
        for name, value in header.items():
            if header_in_file.get(name) != value:
                raise UsageError(
                    f"{self._path}: holds results of another run, {name} is {brief(str(header_in_file.get(name)))}, "
                    f"expected {brief(str(value))}; give another -o, or begin anew with --force"
                )

    def _foreign(self) -> UsageError:
        return UsageError(
            f"{self._path}: holds no results of `txl-deploy score`, expected those of this run; give another -o, or "
            "replace it with --force"
        )


def _is_free(file: int) -> bool:
    """Lock a file; return True if this succeeds, or if the file system has no locks."""
    try:
        return lock(file)
    except OSError:
        return True
