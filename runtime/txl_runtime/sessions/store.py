"""Sessions that are on no row: their states in host memory, and on a disk beyond that, the least recently parked first.

What is on the disk is this process's alone and ends with it: a lock keeps others out of the folder, and what a killed
process has left there is removed when the folder is opened again. Nothing is waited for until the disk holds it, since
a checkpoint is what outlives a process.
"""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from txl_runtime.errors import TxlError, UsageError, brief
from txl_runtime.sessions.folders import Lock, random_name, random_names, read_private, remove, write_private
from txl_runtime.sessions.state import SessionState

LOCK, SUFFIX = "parked.lock", ".parked"


class Room(Protocol):
    """How much the sessions of a server may take; see `Limits`."""

    @property
    def sessions(self) -> int:
        """Sessions in all."""

    @property
    def host_bytes(self) -> int:
        """Bytes of parked states in host memory."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of parked states on the disk."""


@dataclass(frozen=True)
class _File:
    """A state on the disk."""

    path: Path
    size: int
    checksum: int
    nbytes: int


class Store:
    """Parked states by the names of their sessions. One thread uses it.

    Args:
        room: the limits.
        folder: for states beyond `host_bytes`; made where there is none. None: all states stay in host memory.
        largest: bytes of a state at most, as `largest_state` says.

    Attributes:
        host_bytes, disk_bytes: what the parked states take now, in bytes of arrays.
        spilled, lost: how many states went to the disk so far, and how many the disk did not take or give back.

    Raises:
        UsageError: bytes of a disk without a folder; or the folder is another server's.
        TxlError: the folder cannot be written to.
    """

    def __init__(self, room: Room, folder: Path | None, largest: int) -> None:
        if room.disk_bytes and folder is None:
            raise UsageError(
                f"disk_bytes is {room.disk_bytes} and there is no folder, expected one for states beyond host_bytes; "
                "give folder=..., or disk_bytes=0"
            )
        self._room, self._largest = room, largest
        self._folder = folder if room.disk_bytes else None
        self._lock: Lock | None = None
        if self._folder is not None:
            self._lock = Lock(self._folder, LOCK)
            for left in random_names(self._folder, SUFFIX):
                remove(left)
        # By name, the least recently parked first. Anonymous sessions end with their request and come back soon, so
        # they go to the disk last.
        self._host: dict[bool, OrderedDict[str, SessionState]] = {False: OrderedDict(), True: OrderedDict()}
        self._disk: dict[str, _File] = {}
        self._gone: dict[str, str] = {}
        self.host_bytes = self.disk_bytes = self.spilled = self.lost = 0

    def capacity(self, rows: int) -> int:
        """How many sessions there may be, so that each that is not on one of the rows has room here."""
        room = self._room
        if not self._largest:
            return room.sessions
        disk = room.disk_bytes if self._folder is not None else 0
        return min(room.sessions, rows + room.host_bytes // self._largest + disk // self._largest)

    def __contains__(self, name: str) -> bool:
        return name in self._disk or name in self._gone or any(name in states for states in self._host.values())

    def place(self, name: str) -> Literal["host", "disk"]:
        """Where a parked state is, or was lost."""
        return "host" if any(name in states for states in self._host.values()) else "disk"

    def park(self, name: str, state: SessionState, anonymous: bool = False) -> None:
        """Keep a state. Beyond `host_bytes` the least recently parked go to the disk; what it refuses is lost.

        It never fails: a state that the disk does not take is lost for its session alone, and `fetch` says so.

        Args:
            name: of the session; what was parked under it before is dropped.
            state: it is kept as it is, and must not be written to.
            anonymous: whether the session ends with its request.
        """
        self.drop(name)
        self._host[anonymous][name] = state
        self.host_bytes += state.nbytes
        if self._folder is not None:
            while self.host_bytes > self._room.host_bytes:
                self._spill(self._folder)

    def fetch(self, name: str) -> SessionState:
        """Take a state out.

        Raises:
            TxlError: the disk has lost it. The session is unknown here afterwards.
        """
        try:
            return self.look(name)
        except TxlError:
            self.lost += name not in self._gone  # a state that was never written is counted already
            raise
        finally:
            self.drop(name)

    def look(self, name: str) -> SessionState:
        """A state that stays here; it must not be written to.

        Raises:
            TxlError: the disk has lost it.
            KeyError: nothing is parked under this name.
        """
        for states in self._host.values():
            if name in states:
                return states[name]
        if name in self._gone:
            raise TxlError(self._gone[name])
        file = self._disk[name]
        try:
            data = read_private(file.path, file.size)
            if zlib.crc32(data) != file.checksum:
                raise ValueError("has other bytes than were written")
            return SessionState.from_bytes(data, str(file.path))
        except (OSError, ValueError) as error:
            said = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
            raise TxlError(f"session {brief(name)!r} is lost: {file.path} {said}; begin it again") from None

    def drop(self, name: str) -> None:
        """Forget a state, if there is one."""
        self._gone.pop(name, None)
        for states in self._host.values():
            state = states.pop(name, None)
            if state is not None:
                self.host_bytes -= state.nbytes
        file = self._disk.pop(name, None)
        if file is not None:
            self.disk_bytes -= file.nbytes
            remove(file.path)

    def lose(self, name: str, told: str) -> None:
        """Note that a state is lost; its next `fetch` says why."""
        self.drop(name)
        self.lost += 1
        self._gone[name] = told

    def close(self) -> None:
        """Remove what is on the disk and let others have the folder."""
        for name in list(self._disk):
            self.drop(name)
        if self._lock is not None:
            self._lock.release()

    def _spill(self, folder: Path) -> None:
        """Move the state that is needed last to the disk."""
        name, state = (self._host[False] or self._host[True]).popitem(last=False)
        self.host_bytes -= state.nbytes
        path, data = folder / random_name(SUFFIX), state.to_bytes()
        try:
            write_private(path, data, through=False)
        except OSError as error:
            self.lost += 1
            self._gone[name] = (
                f"session {brief(name)!r} is lost: the disk of {folder} did not take it ({error.strerror}), expected "
                "room for states beyond host_bytes; begin it again"
            )
            return
        self._disk[name] = _File(path, len(data), zlib.crc32(data), state.nbytes)
        self.disk_bytes += state.nbytes
        self.spilled += 1


class Recent:
    """Names in the order of their last use.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._used = clock, OrderedDict[str, float]()

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, name: str) -> bool:
        return name in self._used

    def __iter__(self) -> Iterator[str]:
        """The least recently used first."""
        return iter(self._used)

    def touch(self, name: str) -> None:
        """The name is used now."""
        self._used[name] = self._clock()
        self._used.move_to_end(name)

    def forget(self, name: str) -> None:
        """The name is used no more."""
        self._used.pop(name, None)

    def since(self, name: str) -> float:
        """Seconds since a name was used."""
        return self._clock() - self._used[name]

    def idle(self, seconds: float) -> list[str]:
        """Names that were not used for so many seconds, the longest unused first."""
        now, found = self._clock(), list[str]()
        for name, used in self._used.items():
            if now - used <= seconds:
                break
            found.append(name)
        return found
