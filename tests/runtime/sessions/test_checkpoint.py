"""Sessions in a folder and back: only changes are written, failures leave the last checkpoint, one server at a time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from plain_sessions import MODEL, PlainSessions, plain_state
from stand_ins.disk import compiler, run_cases
from txl_runtime import TxlError, UsageError
from txl_runtime.sessions import checkpoint as checkpoint_module
from txl_runtime.sessions.checkpoint import Checkpoint, restore_sessions, save_sessions


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.session"))


def restored(folder: Path) -> dict[str, float]:
    sessions = PlainSessions()
    assert restore_sessions(sessions, folder, MODEL) == {}
    return sessions.marks


NAMES = ["../../escaped", "a/b", "nul\0", "день 🌊", "x" * 256, ".", "CON", "a\nb", '"', "\x7f"]


def test_sessions_come_back_in_their_order_whatever_they_are_called(tmp_path):
    sessions = PlainSessions(**{name: number for number, name in enumerate(NAMES)})
    sessions.put("with a token", plain_state(77, pending=5))
    assert save_sessions(sessions, tmp_path / "saved", MODEL) == 11
    assert list(restored(tmp_path / "saved").items()) == list(sessions.marks.items())
    again = PlainSessions()
    restore_sessions(again, tmp_path / "saved", MODEL)
    assert again.states["with a token"].pending == 5
    assert not list(tmp_path.parent.glob("*escaped*"))


@pytest.mark.skipif(os.name != "posix", reason="rights of files are POSIX's")
def test_a_checkpoint_can_be_read_by_its_owner_alone(tmp_path):
    """Whatever else the owner lets others read: states hold what was said."""
    folder, before = tmp_path / "saved", os.umask(0)
    try:
        save_sessions(PlainSessions(a=1, b=2), folder, MODEL)
    finally:
        os.umask(before)
    assert len(files(folder)) == 2
    assert [path.name for path in (folder, *folder.iterdir()) if path.stat().st_mode & 0o077] == []


def test_only_what_changed_is_written_again_after_a_restart_too(tmp_path):
    sessions = PlainSessions(a=1, b=2, c=3)
    with Checkpoint(tmp_path, MODEL) as checkpoint:
        assert checkpoint.save(sessions) == 3
        before, index = set(files(tmp_path)), (tmp_path / "sessions.json").stat().st_ino
        assert checkpoint.save(sessions) == 0
        assert (tmp_path / "sessions.json").stat().st_ino == index
        sessions.put("b", plain_state(20))
        sessions.taken.clear()
        assert checkpoint.save(sessions) == 1
        assert sessions.taken == ["b"]
        assert len(before & set(files(tmp_path))) == 2
        assert len(files(tmp_path)) == 3
        sessions.close("a")
        assert checkpoint.save(sessions) == 0
        assert len(files(tmp_path)) == 2
    again = PlainSessions()
    with Checkpoint(tmp_path, MODEL) as checkpoint:
        assert checkpoint.restore(again) == {}
        assert list(again.marks.items()) == [("c", 3), ("b", 20)]
        assert checkpoint.save(again) == 0
        again.put("c", plain_state(30))
        assert checkpoint.save(again) == 1
    assert restored(tmp_path) == {"b": 20, "c": 30}


def test_a_session_that_was_begun_anew_under_its_name_is_written(tmp_path):
    sessions = PlainSessions(a=1)
    with Checkpoint(tmp_path, MODEL) as checkpoint:
        checkpoint.save(sessions)
        sessions.close("a")
        sessions.put("a", plain_state(9))
        assert checkpoint.save(sessions) == 1
    assert restored(tmp_path) == {"a": 9}


def test_a_session_whose_state_is_lost_keeps_what_was_saved(tmp_path):
    sessions = PlainSessions(a=1, b=2)
    with Checkpoint(tmp_path, MODEL) as checkpoint:
        checkpoint.save(sessions)
        sessions.put("a", plain_state(10))
        sessions.put("b", plain_state(20))

        def lost(name):
            if name == "a":
                raise TxlError("session 'a' is lost")
            return sessions.states[name]

        sessions.take, take = lost, sessions.take
        assert checkpoint.save(sessions) == 1
        sessions.take = take
        assert checkpoint.save(sessions) == 1  # it is still wanted
    assert restored(tmp_path) == {"a": 10, "b": 20}


def test_another_models_sessions_are_refused_by_name(tmp_path):
    save_sessions(PlainSessions(a=1), tmp_path, MODEL)
    for act in (save_sessions, restore_sessions):
        with pytest.raises(UsageError, match=r"sessions belong to model 555555555555, this bundle is 666666666666;"):
            act(PlainSessions(b=1), tmp_path, "6" * 64)
    assert restored(tmp_path) == {"a": 1}


def test_a_folder_is_one_servers_alone(tmp_path):
    with Checkpoint(tmp_path, MODEL) as checkpoint:
        for act in (save_sessions, restore_sessions):
            with pytest.raises(UsageError, match=r"another server uses it"):
                act(PlainSessions(a=1), tmp_path, MODEL)
        checkpoint.save(PlainSessions(a=2))
    assert restored(tmp_path) == {"a": 2}


def test_one_save_at_a_time_and_one_that_ends_early_leaves_nothing(tmp_path):
    sessions = PlainSessions(a=1, b=2)
    with Checkpoint(tmp_path, MODEL) as checkpoint:
        checkpoint.save(sessions)
        before = files(tmp_path)
        sessions.put("a", plain_state(10))
        with checkpoint.begin(sessions.versions()) as save:
            assert save.wanted == ["a"]
            with pytest.raises(UsageError, match=r"sessions are being saved, expected one save at a time"):
                checkpoint.begin(sessions.versions())
            save.add("a", sessions.take("a"))
            assert len(files(tmp_path)) == 3
        assert files(tmp_path) == before
        assert checkpoint.save(sessions) == 1
    assert restored(tmp_path) == {"a": 10, "b": 2}


def test_what_a_killed_save_left_is_removed_at_the_next_start(tmp_path):
    save_sessions(PlainSessions(a=1), tmp_path, MODEL)
    kept = files(tmp_path)
    for number in range(3):
        (tmp_path / f"{number:032x}.session").write_bytes(b"half")
    (tmp_path / ".sessions.json.partial-0123456789ab").write_bytes(b"half")
    (tmp_path / "my notes.session").write_text("nobody drew this name")
    Checkpoint(tmp_path, MODEL).close()
    assert files(tmp_path) == sorted([*kept, "my notes.session"])
    assert not list(tmp_path.glob(".*"))


DAMAGE = {
    "cut short": lambda path: os.truncate(path, 70),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"),
    "gone": lambda path: path.unlink(),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


def test_a_file_that_cannot_be_read_just_now_stops_the_restore(tmp_path, monkeypatch):
    """It may be whole: a save would forget it."""
    save_sessions(PlainSessions(a=1, b=2), tmp_path, MODEL)

    def busy(path, size):
        raise OSError(24, os.strerror(24))

    with Checkpoint(tmp_path, MODEL) as checkpoint:
        monkeypatch.setattr(checkpoint_module, "read_private", busy)
        with pytest.raises(TxlError, match=r"cannot be read \(Too many open files\), .* remove that file to go on"):
            checkpoint.restore(PlainSessions())
        monkeypatch.undo()
    assert restored(tmp_path) == {"a": 1, "b": 2}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_sessions_loss(tmp_path, damage):
    save_sessions(PlainSessions(a=1, b=2, c=3), tmp_path, MODEL)
    index = json.loads((tmp_path / "sessions.json").read_text())
    DAMAGE[damage](tmp_path / index["sessions"][1]["file"])
    sessions = PlainSessions()
    lost = restore_sessions(sessions, tmp_path, MODEL)
    assert list(lost) == ["b"]
    assert "session 'b' is lost: " in str(lost["b"])
    assert sessions.marks == {"a": 1, "c": 3}


INDEXES = {
    "no JSON": (lambda text: text[:-5], "damaged .*"),
    "nothing": (lambda text: "", "damaged .*"),
    "deep": (lambda text: "[" * 100000, "damaged .*"),
    "another format": (lambda text: text.replace("sessions/1", "sessions/9"), "is of format 'txl-deploy.sessions/9'"),
    "another file": (lambda text: text.replace(".session", "/../../x"), "damaged .*"),
    "one file for two": (
        lambda text: re.sub(r"\w{32}\.session", f"{0:032x}.session", text),
        "names a session or a file twice",
    ),
    "one name for two": (lambda text: text.replace('"b"', '"a"'), "names a session or a file twice"),
    "no name": (lambda text: text.replace('"b"', '""'), "session's name is ''"),
    "a long name": (lambda text: text.replace('"b"', f'"{"x" * 5000}"'), "5000 characters"),
    "a negative size": (lambda text: text.replace('"size":', '"size":-'), "damaged .*"),
    "latin-1": (lambda text: text.replace('"b"', '"\udcff"'), "damaged .*"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_damaged_index_is_refused_and_nothing_is_removed(tmp_path, kind):
    save_sessions(PlainSessions(a=1, b=2), tmp_path, MODEL)
    change, said = INDEXES[kind]
    path = tmp_path / "sessions.json"
    path.write_text(change(path.read_text()), errors="surrogateescape")
    before = files(tmp_path)
    with pytest.raises(UsageError, match=rf"sessions\.json: .*{said}.*move the folder away") as caught:
        Checkpoint(tmp_path, MODEL)
    assert len(str(caught.value)) < 600
    assert files(tmp_path) == before


def test_an_index_that_is_no_file_is_refused(tmp_path):
    save_sessions(PlainSessions(a=1), tmp_path, MODEL)
    path = tmp_path / "sessions.json"
    path.rename(tmp_path / "moved")
    os.mkfifo(path)
    with pytest.raises(UsageError, match=r"damaged .is no plain file"):
        Checkpoint(tmp_path, MODEL)
    path.unlink()
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(TxlError, match=r"cannot be read"):
        Checkpoint(tmp_path, MODEL)
    path.unlink()
    with path.open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(UsageError, match=r"1099511627776 bytes, expected at most"):
        Checkpoint(tmp_path, MODEL)
    assert len(files(tmp_path)) == 1


def test_a_file_that_lies_of_its_size_is_not_believed(tmp_path):
    save_sessions(PlainSessions(a=1), tmp_path, MODEL)
    index = json.loads((tmp_path / "sessions.json").read_text())
    index["sessions"][0]["size"] = 2**60
    (tmp_path / "sessions.json").write_text(json.dumps(index))
    assert "expected 1152921504606846976" in str(restore_sessions(PlainSessions(), tmp_path, MODEL)["a"])


def test_a_state_that_does_not_fit_stops_the_restore_and_the_folder_stays(tmp_path):
    """A bundle that keeps another form of memory would refuse every session: none of them must be lost by a restart."""
    save_sessions(PlainSessions(a=1, b=2), tmp_path, MODEL)

    class Full(PlainSessions):
        def put(self, name, state):
            if len(self.states) == 1:
                raise UsageError("2 sessions, expected at most 1")
            super().put(name, state)

    with pytest.raises(UsageError, match="expected at most 1"):
        restore_sessions(Full(), tmp_path, MODEL)
    assert restored(tmp_path) == {"a": 1, "b": 2}


def test_a_state_file_is_one_that_streams_read(tmp_path):
    from txl_runtime import StreamState

    save_sessions(PlainSessions(a=1), tmp_path, MODEL)
    entry = json.loads((tmp_path / "sessions.json").read_text())["sessions"][0]
    path = tmp_path / entry["file"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
    assert StreamState.load(path).model_id == MODEL


@pytest.mark.parametrize("gone", ["all of them", "one file", "the index"])
def test_what_others_removed_under_a_server_is_saved_again(tmp_path, gone):
    """Sessions that have not changed too: the server has their states."""
    folder, sessions = tmp_path / "saved", PlainSessions(a=1, b=2, c=3)
    with Checkpoint(folder, MODEL) as checkpoint:
        checkpoint.save(sessions)
        if gone == "all of them":
            for path in (folder / "sessions.json", *folder.glob("*.session")):
                path.unlink()
        elif gone == "the index":
            (folder / "sessions.json").unlink()
        else:
            (folder / checkpoint._entries["a"].file).unlink()
        sessions.put("c", plain_state(30))
        assert checkpoint.save(sessions) == {"one file": 2, "the index": 1}.get(gone, 3)
        assert checkpoint.save(sessions) == 0
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(UsageError, match="another server uses it"):
            Checkpoint(folder, MODEL)
    assert restored(folder) == {"a": 1, "b": 2, "c": 30}


def test_a_folder_that_is_gone_is_said_at_each_save_and_the_sessions_go_on(tmp_path):
    folder, sessions = tmp_path / "saved", PlainSessions(a=1)
    with Checkpoint(folder, MODEL) as checkpoint:
        checkpoint.save(sessions)
        shutil.rmtree(folder)
        for _ in range(2):
            with pytest.raises(TxlError, match=r"saved: cannot be written \(No such file or directory\)"):
                checkpoint.save(sessions)
    assert not folder.exists()


def test_files_that_go_while_a_save_is_made_leave_the_last_index(tmp_path):
    sessions = PlainSessions(a=1, b=2)
    with Checkpoint(tmp_path, MODEL) as checkpoint:
        checkpoint.save(sessions)
        kept = {path.name for path in tmp_path.glob("*.session")}
        sessions.put("b", plain_state(20))
        with checkpoint.begin(sessions.versions()) as save:
            save.add("b", sessions.take("b"))
            for name in kept:
                (tmp_path / name).unlink()
            with pytest.raises(TxlError, match=r"files of saved sessions were removed by others, expected"):
                save.finish()
        assert checkpoint.save(sessions) == 2
    assert restored(tmp_path) == {"a": 1, "b": 20}


faulty = pytest.mark.skipif(compiler() is None, reason="the failing disk is C for Linux, expected a C compiler")


@faulty
@pytest.mark.slow
def test_a_checkpoint_is_the_old_or_the_new_one_whichever_call_fails(tmp_path):
    """`benchmarks/soak/faults.py --only sessions` tries every call, and errors and signals of every kind."""
    found = run_cases(tmp_path, "sessions", "EIO", "kill", "--step", 3)
    assert found["failures"] == []
    assert found["cases"] >= 30


@faulty
def test_a_checkpoint_survives_a_loss_of_power(tmp_path):
    found = run_cases(tmp_path, "sessions", "power", "--subsets", 6)
    assert found["failures"] == []
    assert found["cases"] >= 150
