"""Parked states: in host memory, then on the disk; whatever the disk does hurts one session alone."""

from __future__ import annotations

import errno
import os
import stat
import string
from dataclasses import dataclass
from pathlib import Path

import pytest
from plain_sessions import SIZE, mark, plain_state
from txl_runtime import TxlError, UsageError
from txl_runtime.sessions import store as store_module
from txl_runtime.sessions.store import Recent, Store


@dataclass
class Room:
    sessions: int = 100
    host_bytes: int = 3 * SIZE
    disk_bytes: int = 100 * SIZE


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parked"))


@pytest.fixture
def store(tmp_path):
    opened = Store(Room(), tmp_path / "parked", SIZE)
    yield opened
    opened.close()


def test_the_least_recently_parked_go_to_the_disk_and_come_back(store, tmp_path):
    for number in range(8):
        store.park(f"s{number}", plain_state(number))
    assert (store.host_bytes, store.disk_bytes, store.spilled) == (3 * SIZE, 5 * SIZE, 5)
    parked = files(tmp_path / "parked")
    assert len(parked) == 5
    assert {(stat.S_IMODE(path.stat().st_mode), set(path.stem) <= set(string.hexdigits)) for path in parked} == {
        (0o600, True)
    }
    assert mark(store.look("s0")) == 0
    assert [mark(store.fetch(f"s{number}")) for number in (7, 0, 3, 5, 1, 2, 4, 6)] == [7, 0, 3, 5, 1, 2, 4, 6]
    assert (store.host_bytes, store.disk_bytes, store.lost) == (0, 0, 0)
    assert not files(tmp_path / "parked")
    assert not any(f"s{number}" in store for number in range(8))


def test_what_is_parked_again_is_the_newest_and_the_old_state_is_gone(store):
    for number in range(3):
        store.park(f"s{number}", plain_state(number))
    store.park("s0", plain_state(10))
    assert store.host_bytes == 3 * SIZE
    store.park("s3", plain_state(3))  # s1 goes
    assert store.disk_bytes == SIZE
    store.park("s1", plain_state(11))
    assert store.disk_bytes == SIZE  # s2 went
    assert [mark(store.fetch(name)) for name in ("s0", "s1", "s2", "s3")] == [10, 11, 2, 3]


def test_sessions_without_a_name_stay_in_memory_while_others_can_go(store):
    store.park("request", plain_state(1), anonymous=True)
    for number in range(5):
        store.park(f"s{number}", plain_state(number))
    assert store.disk_bytes == 3 * SIZE
    assert store.place("request") == "host"


DAMAGE = {
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_its_own_sessions_loss(store, tmp_path, damage):
    for number in range(5):
        store.park(f"s{number}", plain_state(number))
    (path,) = (file for file in files(tmp_path / "parked") if b"\0\0\x80\x3f" * 16 in file.read_bytes())  # ones
    DAMAGE[damage](path)
    for _ in range(2):
        with pytest.raises(TxlError, match=r"session 's1' is lost: .* begin it again"):
            store.look("s1")
    with pytest.raises(TxlError, match="'s1' is lost"):
        store.fetch("s1")
    assert store.lost == 1
    assert "s1" not in store
    assert [mark(store.fetch(f"s{number}")) for number in (0, 2, 3, 4)] == [0, 2, 3, 4]
    assert (store.host_bytes, store.disk_bytes) == (0, 0)


def test_a_disk_that_takes_nothing_hurts_the_sessions_that_had_to_go(store, tmp_path, monkeypatch):
    for number in range(3):
        store.park(f"s{number}", plain_state(number))
    write = store_module.write_private

    def full(path, data, through):
        write(path, data[:50], through)
        path.unlink()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module, "write_private", full)
    store.park("s3", plain_state(3))
    assert "s0" in store
    assert (store.lost, store.host_bytes, store.disk_bytes) == (1, 3 * SIZE, 0)
    with pytest.raises(TxlError, match=r"'s0' is lost: the disk of .* did not take it \(No space left on device\)"):
        store.look("s0")
    with pytest.raises(TxlError, match="'s0' is lost"):
        store.fetch("s0")
    assert "s0" not in store
    assert store.lost == 1
    monkeypatch.undo()
    store.park("s0", plain_state(20))  # begun again, and the disk has room again
    assert [mark(store.fetch(f"s{number}")) for number in range(4)] == [20, 1, 2, 3]
    assert not files(tmp_path / "parked")


def test_there_are_as_many_sessions_as_have_room_somewhere():
    assert Store(Room(host_bytes=10 * SIZE, disk_bytes=0), None, SIZE).capacity(4) == 14
    assert Store(Room(sessions=7, host_bytes=10 * SIZE, disk_bytes=0), None, SIZE).capacity(4) == 7
    assert Store(Room(sessions=7, host_bytes=0, disk_bytes=0), None, 0).capacity(1) == 7


def test_room_on_a_disk_counts_where_there_is_a_folder(store, tmp_path):
    assert store.capacity(4) == 100
    other = Store(Room(disk_bytes=2 * SIZE), tmp_path / "other", SIZE)
    assert other.capacity(4) == 4 + 3 + 2
    other.close()
    with pytest.raises(UsageError, match=r"disk_bytes is 6400 and there is no folder, expected one"):
        Store(Room(), None, SIZE)


def test_a_folder_is_one_servers_alone_and_what_a_dead_one_left_is_removed(store, tmp_path):
    for number in range(5):
        store.park(f"s{number}", plain_state(number))
    folder = tmp_path / "parked"
    with pytest.raises(UsageError, match=r"another server uses it, expected a folder for this one alone"):
        Store(Room(), folder, SIZE)
    assert len(files(folder)) == 2
    store._lock.release()  # as if it had been killed: the lock goes, the files stay
    (folder / "mine.parked").write_text("a file that nobody drew the name of")
    again = Store(Room(), folder, SIZE)
    assert [path.name for path in files(folder)] == ["mine.parked"]
    again.close()


def test_names_in_the_order_of_their_use():
    now = [0.0]
    recent = Recent(lambda: now[0])
    for name in "abc":
        recent.touch(name)
        now[0] += 1
    recent.touch("a")
    assert list(recent) == ["b", "c", "a"]
    assert recent.since("b") == 2
    assert recent.idle(1.5) == ["b"]
    assert recent.idle(0.5) == ["b", "c"]
    assert recent.idle(2) == []
    recent.forget("b")
    recent.forget("nobody")
    assert (len(recent), "b" in recent, "c" in recent) == (2, False, True)
