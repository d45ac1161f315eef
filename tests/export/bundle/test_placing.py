"""A bundle gets its name when it is complete, or not at all: errors, signals, dead processes, full disks."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import txl_export
import txl_runtime
from frozen import frozen
from support import random_state, small_config
from txl_export.bundle import placing as writing
from txl_export.bundle.placing import check_destination, publishing
from txl_runtime.bundle.reading import MANIFEST
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.selftest import run_selftest


def write(folder: Path, what: str = "new") -> None:
    """Something that looks like a bundle to `writing`."""
    (folder / "engines").mkdir()
    (folder / "engines" / "engine.bin").write_text(what)
    (folder / "weights.bin").write_text(what)
    (folder / MANIFEST).write_text(what)


def publish(target: Path, force: bool = False, what: str = "new") -> None:
    with publishing(target, force) as folder:
        write(folder, what)


def publish_and_raise(target: Path, error: BaseException, force: bool = False) -> None:
    with publishing(target, force) as folder:
        write(folder)
        raise error


def content(target: Path) -> set[str]:
    return {path.read_text() for path in target.rglob("*") if path.is_file()}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model.txl"


@pytest.fixture
def old(target: Path) -> Path:
    publish(target, what="old")
    return target


def only(target: Path) -> bool:
    """Whether nothing but the target, hidden files included, is in its folder."""
    return list(target.parent.iterdir()) == [target]


# ---- success and failure


def test_a_finished_bundle_gets_its_name_and_leaves_nothing_beside_it(target):
    with publishing(target, force=False) as folder:
        assert folder.parent == target.parent
        assert folder.name.startswith(".model.txl.")
        write(folder)
        assert not target.exists()
    assert only(target)
    assert content(target) == {"new"}
    assert {path.name for path in target.iterdir()} == {"engines", "weights.bin", MANIFEST}


def test_files_and_folder_have_the_rights_the_user_asked_for(target):
    mask = os.umask(0o027)
    try:
        with publishing(target, force=False) as folder:
            write(folder)
            (folder / "weights.bin").chmod(0o600)
    finally:
        os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in target.rglob("*") if path.is_file()} == {0o640}


@pytest.mark.parametrize(
    "error", [UsageError("no"), RuntimeError("no"), KeyboardInterrupt(), SystemExit(143)], ids=repr
)
@pytest.mark.parametrize("force", [False, True])
def test_whatever_ends_the_block_nothing_new_is_left(target, error, force):
    if force:
        publish(target, what="old")
    with pytest.raises(type(error)):
        publish_and_raise(target, error, force)
    if force:
        assert only(target)
        assert content(target) == {"old"}
    else:
        assert not list(target.parent.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(5, "Input/output error")], ids=str)
def test_an_error_of_the_system_is_told_in_one_line(target, error):
    with pytest.raises(TxlError, match="nothing was written") as told:
        publish_and_raise(target, error)
    assert ("the disk is full" in str(told.value)) == (error.errno == 28)
    assert told.value.exit_code == 2
    assert not list(target.parent.iterdir())


# ---- what stands in the way


def test_an_existing_bundle_is_replaced_only_with_force(old):
    with pytest.raises(UsageError, match="exists already, expected a free name; add --force"):
        publish(old)
    assert content(old) == {"old"}
    publish(old, force=True)
    assert only(old)
    assert content(old) == {"new"}


def test_an_empty_folder_may_be_replaced_with_force(target):
    target.mkdir()
    with pytest.raises(UsageError, match="exists already"):
        publish(target)
    publish(target, force=True)
    assert content(target) == {"new"}


@pytest.mark.parametrize("kind", ["file", "link to a bundle", "broken link", "other folder"])
def test_what_is_no_bundle_is_never_replaced(target, tmp_path_factory, kind):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    if kind == "file":
        target.write_text("precious")
    elif kind == "link to a bundle":
        publish(elsewhere / "model.txl", what="precious")
        target.symlink_to(elsewhere / "model.txl")
    elif kind == "broken link":
        target.symlink_to(elsewhere / "nothing")
    else:
        target.mkdir()
        (target / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        check_destination(target, force=False)
    with pytest.raises(UsageError, match="is not a bundle, --force replaces only bundles"):
        publish(target, force=True)
    assert only(target)
    if kind == "file":
        assert target.read_text() == "precious"
    elif kind != "broken link":
        assert content(target) == {"precious"}


def test_a_parent_that_is_missing_or_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("precious")
    for parent, found in (("missing", "nothing"), ("file", "a file"), ("file/below", "nothing")):
        with pytest.raises(UsageError, match=f"{parent}: found {found}, expected a folder"):
            publish(tmp_path / parent / "model.txl")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", [".", "..", "/"])
@pytest.mark.parametrize("force", [False, True])
def test_a_target_without_a_name_of_its_own_is_refused(tmp_path, monkeypatch, name, force):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    with pytest.raises(UsageError):
        publish(Path(name), force)
    assert [path.name for path in tmp_path.rglob("*")] == ["inside"]


def test_a_name_too_long_for_the_disk_is_told(tmp_path):
    with pytest.raises(TxlError, match="File name too long"):
        publish(tmp_path / ("m" * 250))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("force", "reason"), [(False, "exists already"), (True, "is not a bundle")])
def test_a_target_that_appears_meanwhile_is_not_overwritten(target, force, reason):
    def meanwhile() -> None:
        with publishing(target, force) as folder:
            write(folder)
            target.mkdir()
            (target / "thesis.tex").write_text("precious")

    with pytest.raises(UsageError, match=reason):
        meanwhile()
    assert only(target)
    assert content(target) == {"precious"}


# ---- what dead and living processes leave


def test_the_partial_of_a_dead_process_is_removed_by_the_next_run(target):
    partial = target.parent / ".model.txl.partial-abc"
    partial.mkdir()
    write(partial, "unfinished")
    unrelated = [target.parent / name for name in (".other.txl.partial-abc", ".model.txl", "model.txl.partial-abc")]
    for folder in unrelated:
        folder.mkdir()
    publish(target)
    assert sorted(target.parent.iterdir()) == sorted([target, *unrelated])


def hold(path: str, ready: Any, done: Any) -> None:
    with publishing(Path(path), False) as folder:
        (folder / "file").write_text("alive")
        ready.set()
        done.wait(60)


def test_the_partial_of_a_living_process_is_left_alone(target):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(str(target), ready, done))
    other.start()
    try:
        assert ready.wait(60)
        (partial,) = (path for path in target.parent.iterdir() if path.is_dir())
        publish(target)
        assert content(partial) == {"alive"}
    finally:
        done.set()
        other.join(60)
    # It finds the name taken, and takes its own away.
    assert other.exitcode == 1
    assert only(target)
    assert content(target) == {"new"}


@pytest.mark.parametrize("placed", [False, True], ids=["before the new one was placed", "after it"])
def test_a_bundle_that_stepped_aside_is_put_back_or_removed(target, placed):
    aside = target.parent / ".model.txl.replaced-123"
    publish(aside, what="old")
    if placed:
        publish(target, what="newer", force=True)
    with contextlib.suppress(RuntimeError), publishing(target, force=True):
        raise RuntimeError
    assert only(target)
    assert content(target) == {"newer" if placed else "old"}


@pytest.mark.parametrize("name", ["mo[d]el*?.txl", "-rf", "mod el\n.txl", "модель.txl"])
def test_strange_names_are_names_like_others(tmp_path, name):
    target = tmp_path / name
    partial = tmp_path / f".{name}.partial-abc"
    partial.mkdir()
    neighbour = tmp_path / ".model.txl.partial-abc"
    neighbour.mkdir()
    publish(target)
    publish(target, force=True, what="newer")
    assert sorted(tmp_path.iterdir()) == sorted([target, neighbour])
    assert content(target) == {"newer"}


def test_without_an_exchange_in_one_step_an_error_puts_the_old_bundle_back(old, monkeypatch):
    monkeypatch.setattr(writing, "_exchange", lambda *_: False)
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(TxlError, match="Input/output error"):
        publish(old, force=True)
    assert only(old)
    assert content(old) == {"old"}


# ---- stopped at every single step

STEPS = """
import contextlib, importlib.util, json, os, shutil, signal, sys
from pathlib import Path

source, root, how, force, exchange = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "1", sys.argv[5] == "1"
spec = importlib.util.spec_from_file_location("writing", source)  # without torch, so that forking is cheap and safe
writing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(writing)
if not exchange:
    writing._exchange = lambda *_: False
target = root / "model.txl"


def publish(what, force):
    with writing.publishing(target, force) as folder:
        for name in ("weights.bin", "graph.onnx", "manifest.json"):
            (folder / name).write_text(what)


def found():
    if not target.exists():
        return "nothing"
    texts = [(target / name).read_text() if (target / name).exists() else "?" for name in
             ("weights.bin", "graph.onnx", "manifest.json")]
    return texts[0] if len(set(texts)) == 1 and len(list(target.iterdir())) == 3 else "broken"


def stop_at(number):
    seen = [0]

    def hook(event, arguments):
        if event == "open" or event.startswith(("os.", "shutil.", "fcntl.", "tempfile.", "ctypes.dlsym")):
            seen[0] += 1
            if seen[0] == number:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt

    sys.addaudithook(hook)


records, status = [], None
while status != 0:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    if force:
        publish("old", False)
    child = os.fork()
    if not child:
        code = 99
        try:
            stop_at(len(records) + 1)
            publish("new", force)
            code = 0
        except KeyboardInterrupt:
            code = 42
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    record = {"status": status, "found": found(), "left": [p.name for p in root.iterdir() if p != target]}
    publish("next", True)
    record |= {"next": found(), "left_by_next": [p.name for p in root.iterdir() if p != target]}
    records.append(record)
print(json.dumps(records))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals and forks are Unix's")
@pytest.mark.parametrize(
    ("force", "exchange"),
    [(False, True), (True, True), (True, False)],
    ids=["free name", "force", "force, no exchange"],
)
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_stopped_at_any_step_a_whole_bundle_or_none_is_found(tmp_path, how, force, exchange):
    arguments = [writing.__file__, str(tmp_path / "root"), how, str(int(force)), str(int(exchange))]
    command = [sys.executable, "-c", STEPS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *stopped, finished = json.loads(done.stdout)
    assert len(stopped) >= 15
    assert {record["status"] for record in stopped} == {-signal.SIGKILL if how == "kill" else 42}
    assert (finished["status"], finished["found"], finished["left"]) == (0, "new", [])
    # Without the exchange there is one moment at which the old bundle has stepped aside; the next run puts it back.
    whole = {"old", "new"} if force else {"nothing", "new"}
    gap = {"nothing"} if force and not exchange and how == "kill" else set()
    assert {record["found"] for record in stopped} <= whole | gap
    assert {record["found"] for record in stopped} >= ({"old", "new"} if force else {"nothing"})
    for record in stopped:
        if record["found"] == "nothing" and force:
            assert any(".replaced-" in name for name in record["left"])
    assert any(record["left"] for record in stopped) == (how == "kill")
    assert all((record["next"], record["left_by_next"]) == ("next", []) for record in stopped)


# ---- a full disk


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many kB, mounted here where that is permitted."""
    mounted = []

    def mount(size: int) -> Path:
        place = tmp_path / f"tiny{size}"
        place.mkdir()
        if sys.platform != "linux" or os.geteuid() or not shutil.which("mount"):
            pytest.skip("mounting a small file system needs root on Linux")
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("size", [8, 60], ids="{} kB".format)
def test_a_full_disk_ends_in_one_line_and_leaves_nothing(tiny, size):
    values = small_config()
    place = tiny(size)  # the weights need 28 kB, the graph 17, the rest 10
    with pytest.raises(TxlError, match=r"disk is full|make room") as told:
        txl_export.export(random_state(values), place / "model.txl", config=values, segment_length=(4, 3), verify=False)
    assert told.value.exit_code == 2
    assert "\n" not in str(told.value)
    assert not list(place.iterdir())


def test_a_full_disk_leaves_the_old_bundle(tiny):
    old, values = frozen("ring"), small_config()
    pages = sum(-(-file.stat().st_size // 4096) for file in old.iterdir())
    target = shutil.copytree(old, tiny(4 * pages + 24) / "model.txl")  # room for the old bundle, not for a second
    with pytest.raises(TxlError, match="make room"):
        txl_export.export(random_state(values), target, config=values, segment_length=4, verify=False, force=True)
    assert only(target)
    assert run_selftest(txl_runtime.load(target)).passed
