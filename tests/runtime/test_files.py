"""Plain files and nothing else; locks that one descriptor has at a time, on Windows with its own calls."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from txl_runtime import files
from txl_runtime.files import NotPlainError, lock, open_plain

unix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders, and other locks")


def test_a_plain_file_is_read_and_described(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"four")
    with open_plain(path) as (file, facts):
        assert (file.read(), facts.st_size) == (b"four", 4)


@unix
@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "a"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    said = r"^Is a directory$" if kind == "folder" else r"^no plain file$"
    with pytest.raises(NotPlainError, match=said), open_plain(path):
        pass


@unix
def test_a_link_is_followed_or_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"here")
    link = tmp_path / "b"
    link.symlink_to("a")
    with open_plain(link) as (file, _):
        assert file.read() == b"here"
    with pytest.raises(OSError, match="symbolic link"), open_plain(link, links=False):
        pass


def test_what_is_not_there_is_said_as_the_system_says_it(tmp_path):
    with pytest.raises(FileNotFoundError), open_plain(tmp_path / "a"):
        pass


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

    monkeypatch.setattr(files.sys, "platform", "win32")
    monkeypatch.setattr(files, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking), raising=False)
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
