"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import txl_export
from filelock import FileLock
from published import holding
from support import random_state, save_checkpoint, small_config
from txl_runtime.bundle import manifest

pytest_plugins = ["sweeping"]
hypothesis.settings.register_profile(
    "the same in every run", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("the same in every run")
torch.set_num_threads(1)  # models this small lose more to handing work around than they gain


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and never among what is there by now: that took a third of the time of an export."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def every_manifest_fits_the_schema() -> Iterator[None]:
    """What this project reads, the schema lets through, which readers in other languages have."""
    own = manifest.contradictions
    manifest.contradictions = holding(own, set())
    yield
    manifest.contradictions = own


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Puts modules into a stranger's folder that tell when they are run; none of them may ever be.

    PYTHONPATH has an empty entry, as `PYTHONPATH=$PYTHONPATH:/more` often leaves one: it means the working folder.
    """
    note = tmp_path / "strangers-code-was-run"
    monkeypatch.setenv("PYTHONPATH", os.pathsep + os.environ.get("PYTHONPATH", ""))

    def plant(folder: Path) -> None:
        for name in ("msgspec", "multiprocessing", "numpy", "sitecustomize", "txl_deploy", "txl_engines"):
            said = f"{name} in {folder}\n"
            (folder / f"{name}.py").write_text(f"open({str(note)!r}, 'a').write({said!r})\nraise ImportError\n")

    yield plant
    assert not note.exists(), note.read_text()


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Export a small random model, once per set of options: `make_bundle(config={...}, batch_size=3)`.

    `config` changes fields of the model's config; `vocabulary` goes through a checkpoint file with a byte
    vocabulary (256 ids); everything else goes to `txl_export.export`. Runs of the same sources share their bundles
    where TXL_BUNDLES names a folder, as `.ci/run` does.
    """
    made: dict[str, Path] = {}
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    base = tmp_path_factory.getbasetemp()
    own = base.parent if worker else base  # one folder for all workers
    shared = Path(os.environ.get("TXL_BUNDLES") or own / "bundles")
    shared.mkdir(exist_ok=True)

    def make(config: dict[str, Any] | None = None, seed: int = 0, vocabulary: bool = False, **options: Any) -> Path:
        key = repr((sorted((config or {}).items()), seed, vocabulary, sorted(options.items())))
        if key not in made:
            # An address means something in one process alone.
            name = key + str(base) if " at 0x" in key else key
            path = shared / hashlib.sha256(name.encode()).hexdigest()[:16] / "small.txl"
            path.parent.mkdir(exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():  # an export is there whole or not at all
                    _export(path, small_config(**(config or {})), seed, vocabulary, options)
            made[key] = path
        return made[key]

    return make


def _export(path: Path, values: dict[str, Any], seed: int, vocabulary: bool, options: dict[str, Any]) -> None:
    options = {"segment_length": (4, 1)} | options
    if vocabulary:
        file = save_checkpoint(path.with_suffix(".pt"), values, vocabulary={"kind": "bytes"})
        txl_export.export(file, path, **options)
    else:
        txl_export.export(random_state(values, seed), path, config=values, **options)
