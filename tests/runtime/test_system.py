"""Locks that one descriptor has at a time, on Windows with its own calls; folders that are synchronised."""

from __future__ import annotations

import errno
import os
import sys
from types import SimpleNamespace

import pytest
from txl_runtime import system
from txl_runtime.system import lock, sync_folder

unix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other locks, and does not synchronise folders")


@unix
def test_a_lock_is_one_descriptors_until_it_is_closed(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"")
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert lock(first)
    assert not lock(second)
    os.close(first)
    assert lock(second, wait=True)
    os.close(second)


def test_on_windows_a_byte_behind_the_file_is_locked_and_the_place_in_it_stays(tmp_path, monkeypatch):
    """Nobody else can read a byte that Windows has locked, so none of the file's own is."""
    calls: list[tuple[int, int]] = []

    def locking(descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        if any(other != descriptor and at == place for other, at in calls):
            raise PermissionError(13, "Permission denied")
        calls.append((descriptor, place))

    monkeypatch.setattr(system.sys, "platform", "win32")
    monkeypatch.setattr(system, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking), raising=False)
    path = tmp_path / "a"
    path.write_bytes(b"results")
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    os.lseek(first, 3, os.SEEK_SET)
    assert lock(first)
    assert not lock(second)
    assert os.lseek(first, 0, os.SEEK_CUR) == 3
    assert calls == [(first, 2**30)]
    os.close(first)
    os.close(second)


@unix
@pytest.mark.parametrize(("number", "raised"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_synchronise_folders_is_no_error_and_a_disk_that_fails_is(
    tmp_path, monkeypatch, number, raised
):
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    if raised:
        with pytest.raises(OSError, match="Input/output"):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)
