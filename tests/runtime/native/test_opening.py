"""A compiled step is found, held against the machine, and taken by "auto" only where this user built it."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest
from frozen import frozen
from native_steps import best, compiled
from txl_engines.native import build_native
from txl_runtime import load
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.errors import BackendError, BundleError, UsageError
from txl_runtime.native import opening
from txl_runtime.native.opening import SIDECAR, STEP, kept_step
from txl_runtime.selftest import run_selftest


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A bundle with a step that this user built: the cache folder is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = compiled(best())
    monkeypatch.setattr("txl_engines.native.compile_step", lambda command, path, *_: shutil.copy(library, path))
    bundle = shutil.copytree(frozen("ring"), tmp_path / "ring.txl")
    build_native(bundle)
    return bundle


def test_auto_takes_the_step_that_this_user_built(built):
    model = load(built)
    assert model.backend.name == "native"
    assert "native" not in model.backend_notes
    assert run_selftest(model).passed


def test_auto_never_takes_a_step_from_elsewhere(built):
    """Not even if its sidecar and manifest name a hash that this user built, for it runs the user's own copy."""
    step = built / STEP
    step.write_bytes(b"\x7fELF of a stranger's")
    assert load(built, verify_files=False).backend.name == "native"
    kept_step(file_sha256(built / SIDECAR)).unlink()
    model = load(built, verify_files=False)
    assert model.backend.name == "cpu"
    assert "this user did not compile" in model.backend_notes["native"]


def test_auto_takes_the_step_for_the_bundle_alone_that_it_was_verified_with(built):
    """The same code may serve a different bundle, or the same one with less precision, which nobody verified here."""
    path, manifest = built / SIDECAR, json.loads((built / "manifest.json").read_text())
    path.write_text(path.read_text().replace('"cache": "fp32"', '"cache": "fp16"'))  # of the same size
    assert load(built, verify_files=False).backend.name == "cpu", "the manifest's hash is that of the user's sidecar"
    path.write_bytes(msgspec.json.encode(json.loads(path.read_text()) | {"cache": "int8", "reached": [1.0, 1.0]}))
    manifest["files"][SIDECAR] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    (built / "manifest.json").write_text(json.dumps(manifest))
    assert load(built).backend.name == "cpu"
    assert "native" in load(built, "native").backend.name, "whoever names it gets it"


def test_an_altered_copy_in_the_cache_is_not_taken(built):
    kept_step(file_sha256(built / SIDECAR)).write_bytes(b"something else")
    assert load(built).backend.name == "cpu"


def test_a_trial_and_other_options_refuse_the_step(built):
    with pytest.raises(UsageError, match="trial is for the CPU alone"):
        load(built, "native", trial=True)
    assert load(built, trial=True).backend.name == "cpu"
    for options in ({"lean": True}, {"update": "rolled"}):
        assert load(built, **options).backend.name == "cpu"
        with pytest.raises(BackendError, match="neither lean nor rolled"):
            load(built, "native", **options)


def test_a_bundle_without_a_step_says_what_builds_one():
    with pytest.raises(BackendError, match=r"no compiled step.*txl-deploy build .* --target native"):
        load(frozen("ring"), "native")
    assert "txl-deploy build" in load(frozen("ring")).backend_notes["native"]


def test_an_altered_step_is_refused_even_if_hashes_are_not_asked_for(built):
    (built / STEP).write_bytes(b"x" * (built / STEP).stat().st_size)
    with pytest.raises(BundleError, match="SHA-256 is not its sidecar's"):
        load(built, "native", verify_files=False)


def test_another_machine_falls_back_by_name(built, monkeypatch):
    monkeypatch.setattr(opening, "platform_name", lambda: "Linux-aarch64")
    with pytest.raises(BackendError, match=r"compiled for Linux-x86_64.*this is Linux-aarch64"):
        load(built, "native")
    model = load(built)
    assert model.backend.name == "cpu"
    assert "aarch64" in model.backend_notes["native"]


def test_a_processor_without_the_instructions_is_told_which(built, monkeypatch):
    monkeypatch.setattr(opening, "processor_flags", lambda: frozenset({"avx"}))
    with pytest.raises(BackendError, match=r"without .*avx2"):
        load(built, "native")
    assert opening.best_instructions() == "plain"


@pytest.mark.parametrize(
    "change", [{"weights": "0" * 64}, {"sha256": "0" * 64}, {"cache": "int3"}, {"precision": "int8"}]
)
def test_a_sidecar_of_something_else_is_refused(built, change):
    path = built / SIDECAR
    path.write_bytes(msgspec.json.encode(json.loads(path.read_text()) | change))
    manifest = json.loads((built / "manifest.json").read_text())
    manifest["files"][SIDECAR]["size"] = path.stat().st_size
    (built / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"step\.json"):
        load(built, "native", verify_files=False)


def test_auto_takes_no_copy_that_others_may_change(built, monkeypatch, tmp_path):
    copy = kept_step(file_sha256(built / SIDECAR))
    for path, mode in ((copy, 0o622), (copy.parent, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert load(built).backend.name == "cpu"
        path.chmod(before)
    assert load(built).backend.name == "native"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # this user's own may have the same step
    assert load(built).backend.name == "cpu", "a relative folder is anybody's"


def test_without_a_home_folder_auto_goes_on_without_the_step(built, monkeypatch):
    def unknown() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(opening.Path, "home", unknown)
    assert load(built).backend.name == "cpu"


@pytest.mark.parametrize(
    ("change", "said"), [({"reached": [1e300, 0.0]}, "reached"), ({"instructions": "plain"}, "is of plain")]
)
def test_what_a_sidecar_says_is_bounded(built, change, said):
    if best() == "plain":
        pytest.skip("the step is of plain C")
    path = built / SIDECAR
    path.write_bytes(msgspec.json.encode(json.loads(path.read_text()) | change))
    manifest = json.loads((built / "manifest.json").read_text())
    manifest["files"][SIDECAR]["size"] = path.stat().st_size
    (built / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=said):
        load(built, "native", verify_files=False)


def test_a_step_that_was_replaced_is_the_new_one(built):
    """In one process: the system takes a library of a known path for the one that it has."""
    before = load(built, "native").backend.description
    library = compiled("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txl_engines.native.compile_step", lambda command, path, *_: shutil.copy(library, path))
        build_native(built, instructions="plain")
    assert best() == "plain" or load(built, "native").backend.description != before
