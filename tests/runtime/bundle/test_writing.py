"""A file is there as a whole or not at all: whatever fails, dies, writes at the same time, or loses power."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from stand_ins.disk import compiler, run_cases
from txl_runtime.bundle import writing
from txl_runtime.bundle.writing import PARTIAL, write_file, write_named, write_whole
from txl_runtime.errors import TxlError, UsageError

unix = pytest.mark.skipif(sys.platform == "win32", reason="Windows can neither lock nor synchronise so")
faulty = pytest.mark.skipif(compiler() is None, reason="the failing disk is C for Linux; needs gcc")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "a.state"
    for data in (b"old", b"newer", b""):
        write_whole(path, data)
        assert path.read_bytes() == data
        assert names(tmp_path) == ["a.state"]


@unix
def test_a_file_has_the_rights_the_user_asked_for(tmp_path):
    mask = os.umask(0o027)
    try:
        write_whole(tmp_path / "a.state", b"data")
    finally:
        os.umask(mask)
    assert (tmp_path / "a.state").stat().st_mode & 0o777 == 0o640


def test_a_plain_write_ends_when_the_disk_holds_the_file(tmp_path, monkeypatch):
    held: list[tuple[bool, int]] = []
    path, fsync = tmp_path / "a.bin", os.fsync

    def watched(descriptor: int) -> None:
        facts = os.fstat(descriptor)
        held.append((os.path.samestat(facts, path.stat()), facts.st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_file(path, b"data")
    assert held == [(True, 4)]


@unix
def test_what_a_killed_writer_left_is_removed_and_a_living_one_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "a.state"
    dead, others = tmp_path / f".a.state{PARTIAL}dead", tmp_path / f".b.state{PARTIAL}dead"
    for left in (dead, others):
        left.write_bytes(b"half")
    inside, goes_on, fsync = threading.Event(), threading.Event(), os.fsync

    def wait(descriptor: int) -> None:
        if threading.current_thread() is slow:
            inside.set()
            assert goes_on.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait)
    slow = threading.Thread(target=write_whole, args=(path, b"slow"))
    slow.start()
    assert inside.wait(60)
    write_whole(path, b"quick")
    assert path.read_bytes() == b"quick"
    goes_on.set()
    slow.join(60)
    assert path.read_bytes() == b"slow"
    assert names(tmp_path) == [others.name, "a.state"]


@unix
def test_an_unfinished_file_that_somebody_took_for_a_dead_ones_is_written_again(tmp_path, monkeypatch):
    lock, times = writing.lock, 0

    def late(descriptor: int, wait: bool = False) -> bool:
        nonlocal times
        times += 1
        if times == 1:
            (partial,) = tmp_path.iterdir()
            partial.unlink()
        return lock(descriptor, wait)

    monkeypatch.setattr(writing, "lock", late)
    write_whole(tmp_path / "a.state", b"data")
    assert times == 2
    assert (tmp_path / "a.state").read_bytes() == b"data"
    assert names(tmp_path) == ["a.state"]


def test_many_writers_of_one_file_leave_one_of_theirs(tmp_path):
    path = tmp_path / "a.state"
    written = [bytes([index]) * 5000 for index in range(8)]
    threads = [
        threading.Thread(target=lambda data=data: [write_whole(path, data) for _ in range(5)]) for data in written
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in written
    assert names(tmp_path) == ["a.state"]


def make_device(path: Path) -> None:
    """A /dev/full of our own: whoever breaks it breaks no other program."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("only root makes devices")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD = {
    "a device": make_device,
    "a named pipe": lambda path: os.mkfifo(path),
    "a socket": make_socket,
    "a folder": lambda path: path.mkdir(),
}


@unix
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "by a link"])
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_plain_file_is_refused_and_stays(tmp_path, monkeypatch, kind, linked):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    path = Path("odd")
    ODD[kind](path)
    before = path.stat()
    if linked:
        path = Path("link")
        path.symlink_to("odd")
    with pytest.raises(UsageError, match=f"^{path}: found {kind}, expected a plain file or nothing; choose another"):
        write_named(path, b"data")
    assert (path.stat().st_mode, path.stat().st_ino) == (before.st_mode, before.st_ino)
    assert path.is_symlink() == linked
    assert names(tmp_path) == sorted({"odd", str(path)})


@unix
@pytest.mark.parametrize("stands", [True, False], ids=["over a file", "over nothing"])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path, stands):
    disk, here = tmp_path / "disk", tmp_path / "here"
    disk.mkdir()
    here.mkdir()
    if stands:
        (disk / "kept.state").write_bytes(b"old")
    (here / "between").symlink_to("../disk/kept.state")
    (here / "a.state").symlink_to("between")
    write_named(here / "a.state", b"new")
    assert (disk / "kept.state").read_bytes() == b"new"
    assert not (disk / "kept.state").is_symlink()
    assert os.readlink(here / "a.state") == "between"  # noqa: PTH115 - as it is written there
    assert names(here) == ["a.state", "between"]
    assert names(disk) == ["kept.state"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full; make room or choose another place"),
        (errno.EDQUOT, "the disk is full; make room or choose another place"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_the_disk_refuses_is_told_without_hidden_names(tmp_path, monkeypatch, number, said):
    def refuse(self: Path, to: Path) -> None:
        raise OSError(number, os.strerror(number), str(self), None, str(to))

    (tmp_path / "a.state").write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(TxlError, match=said) as told:
        write_named(tmp_path / "a.state", b"new")
    assert str(told.value).startswith(f"{tmp_path / 'a.state'}: cannot be written")
    assert PARTIAL not in str(told.value)
    assert names(tmp_path) == ["a.state"]
    assert (tmp_path / "a.state").read_bytes() == b"old"


@unix
def test_a_missing_folder_and_a_link_to_itself_are_told(tmp_path):
    with pytest.raises(TxlError, match=r"there is no folder .*nowhere; make it or choose another place") as told:
        write_named(tmp_path / "nowhere" / "a.state", b"data")
    assert PARTIAL not in str(told.value)
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(TxlError, match="expected a folder with room and rights"):
        write_named(tmp_path / "circle", b"data")
    assert (tmp_path / "circle").is_symlink()


def checked(found: dict[str, Any], least: int) -> None:
    """No case went wrong, and there were as many as there should be."""
    assert found["failures"] == []
    assert found["cases"] >= least


@faulty
@pytest.mark.parametrize("scenario", ["snapshot, over an old one", "snapshot, free name"])
def test_a_snapshot_is_the_old_or_the_new_one_whichever_call_fails(tmp_path, scenario):
    checked(run_cases(tmp_path, scenario, "EIO", "kill"), 20)


@faulty
def test_a_snapshot_survives_a_loss_of_power(tmp_path):
    checked(run_cases(tmp_path, "snapshot, over an old one", "power"), 100)


@faulty
@pytest.mark.slow
def test_kernels_that_cannot_be_kept_are_no_error(tmp_path):
    checked(run_cases(tmp_path, "kernels", "ENOSPC", "kill", "short"), 40)
