"""Checkpoints, which keep all sessions of a server in a folder, so that a restart continues even after a crash.

    sessions.lock       locked while a server uses the folder; the system unlocks it when the process ends
    sessions.json       the index: each session's name, file, size and SHA-256; replaced last in a save
    <number>.session    one session's state, written once; the number is random

A file is on the disk before an index names it, and is removed only after an index without it is on the disk. So every
file in an index is whole, and files that no index names are left over from a killed server.

Sessions are independent of one another, so their states may be copied at different moments: one by one, between rounds.
This delays a round by one copy at most. A second thread writes the copies.
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

from txl_runtime.bundle.writing import PARTIAL, write_whole
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
from txl_runtime.system import sync_folder

FORMAT = "txl-deploy.sessions/1"
"""Value of the field `format` in the index."""
INDEX = "sessions.json"
"""File name of the index."""
FILE = r"^[0-9a-f]{32}\.session\Z"
"""Regular expression of a session file's name: a random number, so that the name reveals nothing about the session."""
MOST = 2**28
"""Maximum size of an index in bytes, 256 MiB: enough for half a million sessions."""


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A session's entry in the index: its name, file, size in bytes and hash."""

    name: str
    file: Annotated[str, Meta(pattern=FILE)]
    size: Annotated[int, Meta(ge=0, lt=2**62)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Index(Struct, frozen=True):
    """The content of `sessions.json`; the least recently used session comes first."""

    format: str
    model_id: str
    sessions: tuple[_Entry, ...]


class LostSessionError(TxlError):
    """The saved state of one session is damaged or missing."""


class SessionVersions(Protocol):
    """The methods of `Sessions` that a checkpoint calls."""

    def versions(self) -> Mapping[str, int]:
        """Return the version number of each named session, the least recently used session first.

        A version changes whenever the session's state changes, and never repeats.
        """

    def take(self, name: str) -> SessionState:
        """Return a copy of a session's state."""

    def put(self, name: str, state: SessionState) -> None:
        """Begin a session that has this state."""


class Checkpoint:
    """A folder in which one server keeps its sessions; it is locked until `close`.

    Args:
        folder: path of the folder, which is made if it does not exist.
        model_id: the model id in the manifest of the server's bundle.

    Raises:
        UsageError: a second server uses the folder, its sessions are of a different model, or the index is damaged.
        TxlError: the folder cannot be read or written to.
    """

    def __init__(self, folder: str | Path, model_id: str) -> None:
        self.folder, self._model_id = check_path(folder), model_id
        self._lock = Lock(self.folder)
        self._perhaps = set[str]()  # files of an index whose write failed, but which may have replaced the old index
        try:
            self._entries = {entry.name: entry for entry in self._read_index()}
            self._remove_left_over()
        except BaseException:
            self._lock.release()
            raise
        self._versions: dict[str, int] = {}
        # `_stale` is True if somebody removed the index or a file, so that the index must be written again
        self._saving = self._stale = False

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the saved sessions, the least recently used first."""
        return tuple(self._entries)

    def load(self, name: str) -> SessionState:
        """Return the saved state of a session.

        Raises:
            LostSessionError: the session's file is damaged or missing.
            TxlError: the file cannot be read at the moment, but may be whole.
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

    def restore(self, sessions: SessionVersions) -> dict[str, LostSessionError]:
        """Begin every saved session, with its saved state.

        Args:
            sessions: a `Sessions` that holds no session yet.

        Returns:
            An error for each session whose file is damaged or missing, by name. All other sessions are restored. The
            next save drops the lost sessions.

        Raises:
            TxlError: a state does not fit the bundle or cannot be read, or the limits are too small. The folder stays
                unchanged.
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
        """Begin a save of sessions; only one save may run at a time.

        Args:
            versions: versions of all sessions to save, from `SessionVersions.versions`.

        Raises:
            UsageError: a save is running.
            TxlError: the folder cannot be read, or is gone.
        """
        if self._saving:
            raise UsageError(f"{self.folder}: sessions are being saved, expected one save at a time; wait for its end")
        there = self._there()
        self._stale |= INDEX not in there and bool(self._entries)
        for name in [name for name, entry in self._entries.items() if entry.file not in there]:
            del self._entries[name]  # the session's file was removed: save the session again
            self._versions.pop(name, None)
            self._stale = True
        self._saving = True
        return Save(self, versions)

    def save(self, sessions: SessionVersions) -> int:
        """Save all sessions, in this thread; a state that has not changed since the last save is not written again.

        Returns:
            The number of states that were written.

        Raises:
            TxlError: the disk is full or fails; the folder keeps its previous checkpoint.
        """
        with self.begin(sessions.versions()) as save:
            for name in save.wanted:
                try:
                    state = sessions.take(name)
                except TxlError:  # the state is lost: keep the state that was saved before
                    continue
                save.add(name, state)
            return save.finish()

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def _there(self) -> set[str]:
        """Return the names of all files in the folder."""
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
        """Remove session files that no index names, and partly written indexes; the lock keeps other writers away."""
        known = {entry.file for entry in self._entries.values()} | self._perhaps
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.iterdir()):
                ours = re.match(FILE, path.name) is not None and path.name not in known
                if ours or path.name.startswith(f".{INDEX}{PARTIAL}"):
                    remove(path)

    def _put_in_place(self, entries: dict[str, _Entry], versions: dict[str, int]) -> None:
        """Write an index of the new entries, which makes them the checkpoint."""
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
    """A save in progress. If it ends before `finish`, the files that it wrote are removed.

    Attributes:
        wanted: names of sessions whose current state is not saved yet.
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
        """Write a session's state, taken after the `versions` of this save. Any thread may call this, one at a time.

        Raises:
            TxlError: the disk is full or fails.
        """
        data = state.to_bytes()
        path = self._checkpoint.folder / f"{secrets.token_hex(16)}.session"
        try:
            write_private(path, data)
        except OSError as error:
            raise unwritable(path, error) from None
        self._new[name] = _Entry(name, path.name, len(data), hashlib.sha256(data).hexdigest())

    def finish(self) -> int:
        """Make the new checkpoint: the added states, and the old states of unchanged sessions.

        If a session in `wanted` was not added, the checkpoint keeps the session's previous state.

        Returns:
            The number of states that were written.

        Raises:
            TxlError: the disk is full or fails, and the folder keeps its previous checkpoint; or somebody removed files
                during the save, which the next save writes again.
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
        """End the save and remove files that it added and no checkpoint names; a second call does nothing."""
        if self._checkpoint._saving:
            self._checkpoint._saving = False
            self._checkpoint._remove_left_over()


def save_sessions(sessions: SessionVersions, folder: str | Path, model_id: str) -> int:
    """Save all sessions to a folder once; see `Checkpoint.save`."""
    with Checkpoint(folder, model_id) as checkpoint:
        return checkpoint.save(sessions)


def restore_sessions(sessions: SessionVersions, folder: str | Path, model_id: str) -> dict[str, LostSessionError]:
    """Begin all sessions in a folder; see `Checkpoint.restore`."""
    with Checkpoint(folder, model_id) as checkpoint:
        return checkpoint.restore(sessions)
