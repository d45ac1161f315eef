"""Loading: one model is of one bundle, whatever happens to the folder meanwhile; what the logger is told."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from txl_runtime import BackendError, BundleError, load
from txl_runtime import model as models

V = 60


@pytest.fixture
def different(make_bundle, tmp_path) -> tuple[Path, Path]:
    """A bundle that will be loaded, and another one of the same sizes and other weights beside it."""
    places = (tmp_path / "model.txl", tmp_path / "other.txl")
    for seed, place in enumerate(places):
        shutil.copytree(make_bundle(config={}, seed=seed, batch_size=2), place)
    return places


def exchange(first: Path, second: Path) -> None:
    """Swap two folders in one step, as an export with --force does."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    assert renameat2(-100, os.fsencode(first), -100, os.fsencode(second), 2) == 0


linux = pytest.mark.skipif(sys.platform != "linux", reason="folders are exchanged in one step on Linux only")
TOKENS = np.random.default_rng(0).integers(0, V, (2, 9)).astype(np.int32)


def test_a_model_that_runs_leaves_no_file_anywhere(make_bundle, tmp_path):
    """An engine that reports to its makers keeps what it has to say in the home folder until it is sent."""
    code = """
import sys, txl_runtime
model = txl_runtime.load(sys.argv[1], "cpu")
model.stream().feed([[1, 2, 3]] * model.batch_size)
"""
    places = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"} | places
    command = [sys.executable, "-B", "-c", code, str(make_bundle(config={}, seed=0, batch_size=2))]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=60)
    assert list(tmp_path.rglob("*")) == []


@linux
@pytest.mark.parametrize("where", ["initial_values", "_open"])
def test_a_load_that_spans_a_replacement_is_of_the_new_bundle(different, monkeypatch, caplog, where):
    path, other = different
    expected = load(other).stream().feed(TOKENS).tobytes()
    real, calls = getattr(models, where), 0

    def replacing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            exchange(path, other)
        return real(*arguments)

    monkeypatch.setattr(models, where, replacing)
    with caplog.at_level(logging.WARNING, "txl_runtime"):
        model = load(path)
    assert calls == 2
    assert model.stream().feed(TOKENS).tobytes() == expected
    assert "was replaced or removed while it was being loaded" in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="links are not for everybody there")
def test_a_link_that_is_switched_during_a_load_leads_where_it_led(different, tmp_path, monkeypatch):
    """The engine is told a folder for the weights: it has to be the one whose files were checked."""
    path, other = different
    expected = load(path).stream().feed(TOKENS).tobytes()
    current, real = tmp_path / "current", models._open
    current.symlink_to(path)

    def switching(*arguments: Any) -> Any:
        current.unlink()
        current.symlink_to(other)
        return real(*arguments)

    monkeypatch.setattr(models, "_open", switching)
    assert load(current).stream().feed(TOKENS).tobytes() == expected


@linux
def test_a_bundle_that_is_replaced_again_and_again_is_refused(different, monkeypatch):
    path, other = different
    real = models.initial_values

    def replacing(bundle: Any) -> Any:
        exchange(path, other)
        return real(bundle)

    monkeypatch.setattr(models, "initial_values", replacing)
    with pytest.raises(BundleError, match="was replaced 4 times while it was being loaded, expected it to stay"):
        load(path)


@linux
def test_loads_under_constant_replacement_give_one_bundle_or_the_other(different):
    path, other = different
    truths = {load(place).stream().feed(TOKENS).tobytes() for place in different}
    assert len(truths) == 2
    done = threading.Event()

    def replace() -> None:
        while not done.wait(0.03):
            exchange(path, other)

    worker = threading.Thread(target=replace)
    worker.start()
    seen, refused = [], list[str]()
    try:
        for _ in range(40):
            try:
                seen.append(load(path, threads=1).stream().feed(TOKENS).tobytes())
            except BundleError as error:
                refused.append(str(error))
    finally:
        done.set()
        worker.join()
    assert set(seen) <= truths
    assert all("was replaced 4 times" in said for said in refused)


def test_the_vocabulary_is_the_one_the_model_was_loaded_with(make_bundle, tmp_path):
    path = tmp_path / "model.txl"
    shutil.copytree(make_bundle(config={"vocab_size": 256}, vocabulary=True), path)
    used, unused = load(path), load(path)
    assert used.vocabulary is not None
    (path / "vocabulary.json").write_bytes(b'{"kind":"words","symbols":["a"]}')
    with pytest.raises(BundleError, match="is not the file that the bundle was opened with"):
        _ = unused.vocabulary
    shutil.rmtree(path)
    assert used.vocabulary.encode(b"a").tolist() == [97]
    assert used.vocabulary is used.vocabulary
    with pytest.raises(BundleError, match=r"vocabulary\.json: missing, expected"):
        _ = unused.vocabulary


def test_the_logger_is_silent_until_somebody_listens(make_bundle, capfd, caplog):
    path = make_bundle(config={})
    load(path)
    assert capfd.readouterr() == ("", "")
    logger = logging.getLogger("txl_runtime")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    with caplog.at_level(logging.INFO, "txl_runtime"):
        model = load(path)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("txl_runtime")]
    assert any(f"loaded {path}" in line and model.backend.description in line for line in said)
    assert any("backend rtx is not taken" in line for line in said)


def test_why_better_backends_were_not_taken_is_said_where_none_runs(make_bundle, monkeypatch):
    def without(*_: object) -> None:
        raise BackendError("onnxruntime is not installed")

    path = make_bundle(verify=False)
    monkeypatch.setattr("txl_runtime.model.open_host", without)
    with pytest.raises(BackendError, match=r"onnxruntime is not installed; rtx: the bundle has no engines"):
        load(path)
