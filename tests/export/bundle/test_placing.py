"""A bundle gets its name when it is complete, or not at all: errors, signals, dead processes, full disks."""

import contextlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from txl_export.bundle.placing import check_destination, publishing
from txl_runtime.bundle.reading import MANIFEST
from txl_runtime.errors import TxlError, UsageError


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
    """Return whether nothing but the target, hidden files included, is in its folder."""
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
