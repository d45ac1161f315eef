"""One opened bundle is one bundle: files that are no files, files that change, folders and links that are switched."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resealing import reseal
from step_models import counting
from support import until
from txl_runtime import BundleError, load
from txl_runtime.bundle import folder as folders
from txl_runtime.bundle.folder import Folder, stepped_aside, undisturbed
from txl_runtime.bundle.reading import open_bundle, read_bundle

posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no such files on Windows")


@pytest.fixture
def bundle(tmp_path) -> Path:
    path = counting().write(tmp_path / "step.txl")
    (path / "notes.json").write_text("{}")
    return reseal(path)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def looped(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**10)


@posix
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("manifest.json", pipe),
        ("weights.safetensors", endless),
        ("step-4.onnx", listening),
        ("notes.json", looped),
        ("weights.safetensors", sparse),
        ("manifest.json", sparse),
        ("notes.json", pipe),
    ],
)
def test_what_is_no_plain_file_is_refused_at_once(bundle, name, make: Callable[[Path], None]):
    (bundle / name).unlink()
    make(bundle / name)
    for verify_files in (True, False):
        with pytest.raises(BundleError, match=rf"{name}: .*expected"):
            load(bundle, "cpu", verify_files=verify_files)


@posix
def test_a_link_that_is_put_in_place_between_the_look_and_the_opening_is_refused(bundle, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("{}")
    folder, realpath = Folder(bundle), os.path.realpath

    def switched(path: Any, **options: Any) -> str:
        found = realpath(path, **options)
        (bundle / "notes.json").unlink()
        (bundle / "notes.json").symlink_to(tmp_path / "secret")
        return found

    monkeypatch.setattr(folders.os.path, "realpath", switched)
    with pytest.raises(OSError, match="symbolic link") as caught, folder.open("notes.json"):
        pass
    assert caught.value.errno == errno.ELOOP


@posix
def test_no_descriptor_stays_open_whatever_is_found(bundle):
    held = Path("/proc/self/fd")
    before = len([*held.iterdir()]) if held.is_dir() else 0
    (bundle / "notes.json").unlink()
    for make, remove in ((pipe, Path.unlink), (Path.mkdir, Path.rmdir)):
        make(bundle / "notes.json")
        for _ in range(20):
            with pytest.raises(BundleError):
                open_bundle(bundle)
        remove(bundle / "notes.json")
    if before:
        assert len([*held.iterdir()]) <= before + 1


@posix
def test_links_that_stay_in_the_bundle_and_further_names_of_a_file_are_fine(bundle):
    (bundle / "notes.json").rename(bundle / "other")
    (bundle / "notes.json").symlink_to("other")
    os.link(bundle / "manifest.json", bundle.parent / "another name")
    load(bundle, "cpu")


@posix
def test_a_folder_of_the_bundle_that_is_a_link_out_of_it_is_refused(bundle, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (bundle / "notes.json").rename(tmp_path / "elsewhere" / "notes.json")
    (bundle / "more").symlink_to(tmp_path / "elsewhere")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"]["more/notes.json"] = manifest["files"].pop("notes.json")
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="a link that leaves the bundle, expected a plain file"):
        load(bundle, "cpu")


def test_what_is_read_is_what_was_hashed(bundle):
    opened = open_bundle(bundle)
    assert opened.read("notes.json") == b"{}"
    (bundle / "notes.json").write_bytes(b"[]")
    with pytest.raises(BundleError, match="is not the file that the bundle was opened with"):
        opened.read("notes.json")
    with pytest.raises(BundleError, match="is used but not in the list of files"):
        opened.read("never listed")


def test_without_hashes_another_file_is_read_only_with_the_same_content(bundle):
    opened = open_bundle(bundle, verify_files=False)
    (bundle / "beside").write_bytes(b"{}")
    (bundle / "beside").replace(bundle / "notes.json")
    assert opened.read("notes.json") == b"{}"
    (bundle / "beside").write_bytes(b"[]")
    (bundle / "beside").replace(bundle / "notes.json")
    with pytest.raises(BundleError, match="is not the file that the bundle was opened with"):
        opened.read("notes.json")


def test_weights_of_another_file_are_refused(bundle):
    opened = open_bundle(bundle)
    assert opened.weights() == {}
    path = opened.file(opened.manifest.weights)
    shutil.copy(path, bundle / "beside")
    (bundle / "beside").replace(path)
    with pytest.raises(BundleError, match="is not the file that the bundle was opened with"):
        opened.weights()


@posix
def test_a_link_that_is_switched_afterwards_does_not_matter(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "other.txl")
    (tmp_path / "other.txl" / "notes.json").write_bytes(b"[]")
    reseal(tmp_path / "other.txl")
    current = tmp_path / "current"
    current.symlink_to(bundle)
    opened = open_bundle(current)
    current.unlink()
    current.symlink_to(tmp_path / "other.txl")
    assert opened.read("notes.json") == b"{}"
    assert open_bundle(current).read("notes.json") == b"[]"


def renamed_over(path: Path) -> None:
    shutil.copy(path, path.with_name("beside"))
    path.with_name("beside").replace(path)


def folder_there_and_back(path: Path) -> None:
    for source, target in ((path.parent, "aside"), (path.parent.with_name("aside"), path.parent.name)):
        source.rename(source.with_name(target))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("manifest.json", renamed_over),
        ("weights.safetensors", lambda path: path.write_bytes(path.read_bytes())),
        ("step-4.onnx", folder_there_and_back),
    ],
)
def test_a_change_while_a_bundle_is_opened_is_noticed(bundle, name, change: Callable[[Path], None]):
    """Though what is there afterwards has the same content: an engine may have seen something else in between."""
    assert undisturbed(bundle, read_bundle).path == bundle

    for error in (None, BundleError("its SHA-256 is not the manifest's")):
        until(lambda: time.time() - (bundle / name).stat().st_ctime > 0.05)  # ticks of the clock tell changes apart

        def make(folder: Folder, error: BundleError | None = error) -> None:
            read_bundle(folder)
            change(bundle / name)
            if error is not None:
                raise error

        with pytest.raises(BundleError, match=r"was replaced or removed while it was being loaded, .*; load it again$"):
            undisturbed(bundle, make)


def test_an_error_of_a_bundle_that_nobody_replaced_is_its_own(bundle):
    def damaged(folder: Folder) -> None:
        folder.holds("missing")
        raise BundleError("damaged")

    with pytest.raises(BundleError, match="damaged"):
        undisturbed(bundle, damaged)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_a_manifest_of_any_length_takes_no_more_than_its_limit(bundle):
    (bundle / "manifest.json").write_bytes(b'{"a":' + b"[" * (1 << 25))
    with pytest.raises(BundleError, match=r"more than 16777216 bytes, expected the few kilobytes of a manifest"):
        load(bundle, "cpu")


def test_an_old_bundle_that_stepped_aside_is_pointed_at(bundle):
    """On systems that cannot exchange folders in one step, a replacement may be cut short between its two renames."""
    bundle.rename(bundle.with_name(f".{bundle.name}.replaced-1234"))
    with pytest.raises(BundleError, match=r"found nothing.*\.step\.txl\.replaced-1234 beside it is what stood there"):
        load(bundle, "cpu")


def test_a_bundle_that_stepped_aside_is_named(tmp_path):
    assert stepped_aside(tmp_path / "a.txl") == ""
    assert stepped_aside(tmp_path / "nowhere" / "a.txl") == ""
    for name in (".a.txl.replaced-12", ".b.txl.replaced-13"):
        (tmp_path / name).mkdir()
    assert ".a.txl.replaced-12 beside it is what stood there" in stepped_aside(tmp_path / "a.txl")
