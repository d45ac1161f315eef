"""All sessions of a server in a folder, and back: what a restart continues from, whatever ended the server.

    sessions.lock       held while a server has the folder; a lock ends with its process
    sessions.json       the index: names, and the file of each with its size and SHA-256. It is replaced last
    <number>.session    one session's state each, written once, under a number that was drawn

A file is written through to the disk before an index names it, and removed after an index that does not name it. So an
index is always of whole files, and what a killed server has left over is what no index names.

Sessions are independent of one another, so a checkpoint need not be of one moment: states are copied one by one between
rounds, which stalls nobody for longer than one copy takes, and written by another thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from txl_runtime.bundle.writing import PARTIAL, sync_folder, write_whole
from txl_runtime.errors import TxlError, UsageError, brief
from txl_runtime.sessions.folders import (
    PRIVATE_FILE,
    Lock,
    read_private,
    remove,
    unwritable,
    write_private,
)
from txl_runtime.sessions.state import SessionState, check_name
from txl_runtime.streaming.checks import check_path

FORMAT = "txl-deploy.sessions/1"
INDEX = "sessions.json"
FILE = r"^[0-9a-f]{32}\.session\Z"
"""Names of sessions' files: a random number, which says nothing of what is in them."""
MOST = 2**28
"""Bytes of an index at most: half a million sessions."""


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """Where one session's state is."""

    name: str
    file: Annotated[str, Meta(pattern=FILE)]
    size: Annotated[int, Meta(ge=0, lt=2**62)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Index(Struct, frozen=True):
    """What `sessions.json` holds: of the sessions, the least recently used first."""

    format: str
    model_id: str
    sessions: tuple[_Entry, ...]


class LostSessionError(TxlError):
    """One session's saved state is damaged or missing; all others are not."""


class Kept(Protocol):
    """What a checkpoint asks of sessions."""

    def versions(self) -> Mapping[str, int]:
        """By the names of sessions that outlive requests, the least recently used first.

        Returns:
            A number that changes whenever the session's state does, and never comes back.
        """

    def take(self, name: str) -> SessionState:
        """A copy of a session's state."""

    def put(self, name: str, state: SessionState) -> None:
        """Begin a session with a state."""


class Checkpoint:
    """A folder that one server keeps its sessions in. It is the server's alone until it is closed.

    Args:
        folder: made where there is none.
        model_id: of the server's bundle.

    Raises:
        UsageError: another server has the folder, or the sessions in it are another model's; or the index is damaged.
        TxlError: the folder cannot be read or written to.
    """

    def __init__(self, folder: str | Path, model_id: str) -> None:
        self.folder, self._model_id = check_path(folder), model_id
        self._lock = Lock(self.folder)
        self._perhaps = set[str]()  # files of an index that may have got into place although writing it failed
        try:
            self._entries = {entry.name: entry for entry in self._read_index()}
            self._remove_left_over()
        except BaseException:
            self._lock.release()
            raise
        self._versions: dict[str, int] = {}
        self._saving = self._stale = False  # stale: the index in the folder is another one than it was

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sessions that are saved, the least recently used first."""
        return tuple(self._entries)

    def load(self, name: str) -> SessionState:
        """The saved state of a session.

        Raises:
            LostSessionError: its file is damaged or missing.
            TxlError: it may be whole, and cannot be read.
        """
        entry = self._entries[name]
        path = self.folder / entry.file
        try:
            data = read_private(path, entry.size)
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise ValueError("has other bytes than were saved")
            return SessionState.from_bytes(data, str(path))
        except FileNotFoundError:
            raise LostSessionError(f"session {brief(name)!r} is lost: {path} is missing; begin it again") from None
        except OSError as error:
            raise TxlError(
                f"session {brief(name)!r}: {path} cannot be read ({error.strerror}), expected its saved state; try "
                "again, or remove that file to go on without this session"
            ) from None
        except ValueError as error:
            raise LostSessionError(f"session {brief(name)!r} is lost: {path} {error}; begin it again") from None

    def restore(self, sessions: Kept) -> dict[str, LostSessionError]:
        """Begin every session that is saved.

        Args:
            sessions: without any yet.

        Returns:
            Why sessions could not be restored, by their names: their files are damaged or missing. All others are
            there. The next save forgets those.

        Raises:
            TxlError: a state does not fit the bundle or cannot be read, or there is no room for so many sessions. The
                folder stays as it is.
        """
        lost: dict[str, LostSessionError] = {}
        for name in self.names:
            try:
                state = self.load(name)
            except LostSessionError as error:
                lost[name] = error
                continue
            sessions.put(name, state)
        versions = sessions.versions()
        self._versions = {name: versions[name] for name in self.names if name not in lost}
        return lost

    def begin(self, versions: Mapping[str, int]) -> Save:
        """Begin to save.

        Args:
            versions: of all sessions that are to be saved, see `Kept.versions`.

        Raises:
            UsageError: a save is under way already.
            TxlError: the folder cannot be read, or is gone.
        """
        if self._saving:
            raise UsageError(f"{self.folder}: sessions are being saved, expected one save at a time; wait for its end")
        there = self._there()
        self._stale |= INDEX not in there and bool(self._entries)
        for name in [name for name, entry in self._entries.items() if entry.file not in there]:
            del self._entries[name]  # others removed its file: it is saved again
            self._versions.pop(name, None)
            self._stale = True
        self._saving = True
        return Save(self, versions)

    def save(self, sessions: Kept) -> int:
        """Save all sessions, in this thread: what has not changed since the last time is not written again.

        Returns:
            How many states were written.

        Raises:
            TxlError: the disk does not take them; what is there is the last checkpoint, whole.
        """
        with self.begin(sessions.versions()) as save:
            for name in save.wanted:
                try:
                    state = sessions.take(name)
                except TxlError:  # it is lost: what was saved of it before stays
                    continue
                save.add(name, state)
            return save.finish()

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.release()

    def _there(self) -> set[str]:
        """Names of what is in the folder."""
        try:
            return {path.name for path in self.folder.iterdir()}
        except OSError as error:
            raise unwritable(self.folder, error) from None

    def _read_index(self) -> tuple[_Entry, ...]:
        path = self.folder / INDEX
        advice = "move the folder away to begin without sessions"
        try:
            size = path.lstat().st_size
            if size > MOST:
                raise ValueError(f"it has {size} bytes, expected at most {MOST}")
            index = msgspec.json.decode(read_private(path, size), type=_Index)
            if index.format != FORMAT:
                raise ValueError(f"it is of format {brief(index.format)!r}, expected {FORMAT}")
            names = [check_name(entry.name) for entry in index.sessions]
            files = {entry.file for entry in index.sessions}
            if not len(names) == len(set(names)) == len(files):
                raise ValueError("it names a session or a file twice")
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise TxlError(f"{path}: cannot be read ({error.strerror}), expected saved sessions; {advice}") from None
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise UsageError(f"{path}: damaged ({error}); {advice}") from None
        if index.model_id != self._model_id:
            raise UsageError(
                f"{self.folder}: its sessions belong to model {brief(index.model_id[:12])}, this bundle is "
                f"{self._model_id[:12]}; choose another folder, or the bundle that they were saved from"
            )
        return index.sessions

    def _remove_left_over(self) -> None:
        """Remove what no index names, and what is left of an index that was being written: nobody else writes here."""
        known = {entry.file for entry in self._entries.values()} | self._perhaps
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.iterdir()):
                ours = re.match(FILE, path.name) is not None and path.name not in known
                if ours or path.name.startswith(f".{INDEX}{PARTIAL}"):
                    remove(path)

    def _put_in_place(self, entries: dict[str, _Entry], versions: dict[str, int]) -> None:
        """Let an index of new entries be the checkpoint."""
        if self._stale or self._perhaps or list(entries.items()) != list(self._entries.items()):
            index = _Index(FORMAT, self._model_id, tuple(entries.values()))
            sync_folder(self.folder)
            before, self._perhaps = self._perhaps, self._perhaps | {entry.file for entry in index.sessions}
            try:
                write_whole(self.folder / INDEX, msgspec.json.encode(index), PRIVATE_FILE)
            except OSError:
                with contextlib.suppress(TxlError):
                    if self._read_index() == tuple(self._entries.values()):
                        self._perhaps = before
                raise
        self._entries, self._versions, self._perhaps, self._stale = entries, versions, set(), False
        self._remove_left_over()


class Save:
    """A checkpoint that is being made. What it has written is removed if it ends before `finish`.

    Attributes:
        wanted: names of sessions whose state is not saved as it is now.
    """

    def __init__(self, checkpoint: Checkpoint, versions: Mapping[str, int]) -> None:
        self._checkpoint, self._new = checkpoint, dict[str, _Entry]()
        self._now = dict(versions)
        before = checkpoint._versions
        self.wanted = [name for name, version in versions.items() if before.get(name) != version]

    def __enter__(self) -> Save:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def add(self, name: str, state: SessionState) -> None:
        """Write a state that was taken after the versions were; any thread may, one at a time.

        Raises:
            TxlError: the disk does not take it.
        """
        data = state.to_bytes()
        path = self._checkpoint.folder / f"{secrets.token_hex(16)}.session"
        try:
            write_private(path, data)
        except OSError as error:
            raise unwritable(path, error) from None
        self._new[name] = _Entry(name, path.name, len(data), hashlib.sha256(data).hexdigest())

    def finish(self) -> int:
        """Let what was added, and what has not changed, be the checkpoint.

        Of a session that was wanted and not added it keeps what it had.

        Returns:
            How many states were written.

        Raises:
            TxlError: the disk does not take it, what is there is the last checkpoint, whole; or others removed files
                meanwhile, which the next save writes again.
        """
        checkpoint = self._checkpoint
        before = checkpoint._entries
        known = {name: self._new.get(name) or before.get(name) for name in self._now}
        entries = {name: entry for name, entry in known.items() if entry is not None}
        gone = {entry.file for entry in entries.values()} - checkpoint._there()
        if gone:
            raise TxlError(
                f"{checkpoint.folder}: {len(gone)} files of saved sessions were removed by others, expected them to "
                "stay; save again, and leave the folder to its server"
            )
        unwritten = set(self.wanted) - set(self._new)
        versions = {name: version for name, version in self._now.items() if name not in unwritten}
        try:
            checkpoint._put_in_place(entries, versions)
        except OSError as error:
            raise unwritable(checkpoint.folder / INDEX, error) from None
        return len(self._new)

    def end(self) -> None:
        """Remove what was added and is in no checkpoint; calling it again does nothing."""
        if self._checkpoint._saving:
            self._checkpoint._saving = False
            self._checkpoint._remove_left_over()


def save_sessions(sessions: Kept, folder: str | Path, model_id: str) -> int:
    """Save all sessions to a folder once; see `Checkpoint.save`."""
    with Checkpoint(folder, model_id) as checkpoint:
        return checkpoint.save(sessions)


def restore_sessions(sessions: Kept, folder: str | Path, model_id: str) -> dict[str, LostSessionError]:
    """Begin all sessions that a folder holds; see `Checkpoint.restore`."""
    with Checkpoint(folder, model_id) as checkpoint:
        return checkpoint.restore(sessions)
