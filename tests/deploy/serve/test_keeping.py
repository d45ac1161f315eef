"""A server's words on its checkpoint: at its start, now and then, and at its end."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import txl_runtime
from support import call_main
from txl_runtime.errors import TxlError
from txl_runtime.sessions import Request, Sessions
from txl_runtime.sessions.checkpoint import Checkpoint

from txl_deploy.serve import keeping
from txl_deploy.serve.keeping import Keeping
from txl_deploy.serve.logs import Log


def kept(letters: Path, folder: Path, *names: str) -> Path:
    """A folder with a checkpoint of sessions by these names."""
    with Sessions(txl_runtime.load(letters, "cpu", threads=1)) as sessions:
        for name in names:
            sessions.submit(Request([97, 98]), name)
        while sessions.round():
            pass
        assert sessions.save(folder) == len(names)
    return folder


@pytest.fixture
def ran(letters, monkeypatch, capfd) -> Callable[..., tuple[str, list[str]]]:
    """A server that ends at its Nth look at its sessions: what it wrote to standard output, and lines of its log."""

    def run(looks: int, *options: object) -> tuple[str, list[str]]:
        left, real = [looks], Sessions.expire

        def expire(self):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self)

        monkeypatch.setattr(Sessions, "expire", expire)
        code, out, err = call_main(
            ("serve", letters, "--port", 0, "--idle-seconds", 1000, *options), monkeypatch, capfd
        )
        assert code == 0, err
        return out, err.splitlines()

    return run


@pytest.mark.parametrize(
    ("names", "damaged", "said"),
    [
        (("ada",), 0, "1 session came back"),
        (("ada", "bea", "tab-0123456789abcdef-text"), 0, "2 sessions came back"),
        (("ada", "bea", "carl"), 2, "1 session came back, 2 are lost"),
    ],
)
def test_the_line_at_the_start_says_how_many_sessions_came_back(letters, tmp_path, ran, names, damaged, said):
    folder = kept(letters, tmp_path / "kept", *names)
    for file in sorted(folder.glob("*.session"))[:damaged]:
        file.write_bytes(b"damaged")
    out, log = ran(1, "--checkpoint-dir", folder, "--checkpoint-every", 0.05)
    assert f"self-test passed; {said}; for this machine alone" in out
    assert sum(line.startswith("note: session ") for line in log) == damaged


def test_programs_are_told_of_sessions_and_of_every_checkpoint(letters, tmp_path, ran):
    folder = kept(letters, tmp_path / "kept", "ada", "bea")
    next(folder.glob("*.session")).unlink()
    out, log = ran(4, "--checkpoint-dir", folder, "--checkpoint-every", 0.01, "--json-logs")
    ready = json.loads(out)
    assert (ready["sessions_restored"], ready["sessions_lost"]) == (1, 1)
    lines = [json.loads(line) for line in log]
    made = [line for line in lines if line["event"] == "checkpoint"]
    assert len(made) >= 3, "one for each look, and the last one"
    assert all((line["sessions"], line["held"]) == (0, 1) and line["seconds"] >= 0 for line in made)
    assert [line["event"] for line in lines[-2:]] == ["checkpoint", "stopped"]


def test_people_are_told_of_the_last_checkpoint_and_of_those_that_fail(letters, tmp_path, ran, monkeypatch):
    """A line every minute would hide the lines that matter."""
    folder, real, tries = kept(letters, tmp_path / "kept", "ada"), keeping.save_beside, []

    async def save(front, checkpoint):
        tries.append(1)
        if len(tries) in (2, 3):
            raise TxlError("the disk is full")
        return await real(front, checkpoint)

    monkeypatch.setattr(keeping, "save_beside", save)
    _, log = ran(6, "--checkpoint-dir", folder, "--checkpoint-every", 0.01)
    assert len(tries) >= 4
    line = "checkpoint: 1 session, 0 of them written anew"
    assert log == [
        "note: no checkpoint: the disk is full",
        "note: no checkpoint: the disk is full",
        line,
        "stopping: 0 requests are given 30 s",
        line,
        "stopped",
    ]


def test_where_the_last_checkpoint_fails_it_says_what_comes_back(letters, tmp_path, monkeypatch, capfd):
    def full(self, sessions):
        raise TxlError("the disk is full")

    monkeypatch.setattr(Checkpoint, "save", full)
    monkeypatch.setattr(Sessions, "expire", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    options = ("--port", 0, "--idle-seconds", 0.1, "--checkpoint-dir", tmp_path / "kept")
    code, _, err = call_main(("serve", letters, *options), monkeypatch, capfd)
    assert code == 2
    assert re.fullmatch(r"error: the disk is full; sessions come back as they were \d+ s ago", err.splitlines()[-1])


@pytest.mark.parametrize("option", ["--max-sessions", "--session-bytes"])
def test_a_checkpoint_of_more_sessions_than_there_is_room_for_is_refused(letters, tmp_path, option, monkeypatch, capfd):
    folder = kept(letters, tmp_path / "kept", "ada", "bea", "carl", "dora")
    before = sorted((file.name, file.read_bytes()) for file in folder.iterdir())
    options = ("--port", 0, "--rows", 2, "--checkpoint-dir", folder, option, 2 if option == "--max-sessions" else 0)
    code, out, err = call_main(("serve", letters, *options), monkeypatch, capfd)
    assert (code, out) == (2, "")
    assert err == (
        f"error: {folder}: 4 sessions are kept here, expected at most the 2 that there is room for; raise "
        "--max-sessions or --session-bytes\n"
    )
    assert sorted((file.name, file.read_bytes()) for file in folder.iterdir()) == before


def test_without_a_folder_it_says_that_sessions_end_with_the_server(ran):
    out, log = ran(1, "--checkpoint-every", 0.05)
    assert "self-test passed; sessions end with the server; for this machine alone" in out
    assert log == ["stopping: 0 requests are given 30 s", "stopped"]


def test_the_age_of_a_checkpoint_is_counted_from_its_beginning(letters, tmp_path, monkeypatch):
    """The checkpoint may lack what a session was fed while it was written."""
    now = [1000.0]
    monkeypatch.setattr(keeping.time, "monotonic", lambda: now[0])
    assert Keeping(Log(True)).age is None
    with Checkpoint(tmp_path / "kept", "a") as checkpoint:
        told = Keeping(Log(True), checkpoint)
        now[0] += 5
        assert told.age == 5
        began, now[0] = now[0], now[0] + 2
        told._made(0, checkpoint, began)
        assert (told.age, told.written) == (2, 1)
