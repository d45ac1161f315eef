"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from kept_bundles import ROOT, Maker, place, state_of
from published import holding
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
    """Hold every manifest that this project reads against the schema, which readers in other languages have."""
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


def pytest_configure() -> None:
    """Choose the folder of kept bundles, in .bundles or where TXL_BUNDLES says: the workers of xdist inherit it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["TXL_BUNDLES"] = str(place(Path(os.environ.get("TXL_BUNDLES") or ROOT / ".bundles").resolve()))


@pytest.fixture(scope="session")
def kept_bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Export a small random model, once for all runs of the same sources; see `Maker`."""
    maker = Maker(Path(os.environ["TXL_BUNDLES"]), tmp_path_factory.getbasetemp() / "bundles", lambda: state_of(ROOT))
    yield maker.make
    assert not maker.changed(), "a test (not the last one, which is named here) changed a shared bundle; copy it first"


@pytest.fixture(scope="session")
def make_bundle(kept_bundles: Callable[..., Path]) -> Callable[..., Path]:
    """A small random model's bundle: `make_bundle(batch_size=3)`. Tests of what an export writes get a fresh one."""
    return kept_bundles
