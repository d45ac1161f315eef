"""Plain files and nothing else."""

from __future__ import annotations

import os
import sys

import pytest
from txl_runtime.files import NotPlainError, open_plain

unix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")


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
