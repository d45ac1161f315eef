"""The self-test of half precision on a device that rounds after every operator: right engines pass, wrong ones do not.

The device is `torch_engine` over the stand-in for CUDA's driver. Its values are of the graph's own types, so every one
is rounded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from seeded_graph_faults import Fault, graph_faults
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device
from stand_ins.late_place import LatePlace
from support import FIXTURES
from torch_engine import open_torch
from txl_export.exporting import _add_selftest
from txl_export.families.transformer_xl.family import reference_for, weights_of_bundle
from txl_export.families.transformer_xl.parity.vectors import selftest_vectors
from txl_runtime import BundleError, CheckError, load
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.listener import Silent
from txl_runtime.model import Model
from txl_runtime.selftest import SelftestResult, run_selftest
from txl_runtime.streaming.stream import Stream

OLD = FIXTURES / "release_0_8" / "half"
RULES = ("ring", "rolled")
OnDevice = Callable[..., SelftestResult]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    """The self-test of a bundle on the stand-in, with a fault in every graph where one is given."""

    def test(path: Path, update: str, fault: Fault | None = None) -> SelftestResult:
        driver = FakeDriver(seed=0)
        bundle = open_bundle(path)
        backend = open_torch(bundle, open_fake_device(driver), LatePlace(driver), update, ("logprobs",))
        if fault is not None:
            for executable in backend.executables.values():
                fault(executable._interpreter, update)
        with monkeypatch.context() as patch:
            patch.setattr("txl_runtime.model._open", lambda *_: (backend, {}))
            result = run_selftest(Model(bundle, "cuda"))
        driver.check()
        return result

    return test


def check(path: Path, on_device: OnDevice) -> None:
    for update in RULES:
        right = on_device(path, update)
        right.require()
        assert right.largest["rows"] > 0.3, "it rounds as often as was measured"
        for title, fault in graph_faults(open_bundle(path).manifest.transformer_xl.config.n_layer).items():
            assert not on_device(path, update, fault).passed, (update, title)


def renewed(folder: Path, spoil: Callable[[dict[str, Any]], None] = lambda _: None) -> Path:
    """A bundle whose vectors are made anew by its own weights, as exporting again does."""
    manifest = open_bundle(folder).manifest
    model = manifest.transformer_xl
    weights = weights_of_bundle(folder / manifest.weights, manifest)
    reference = reference_for(model.config, model.dialect, manifest.memory_length, weights)

    def vectors(_: Any) -> dict[str, Any]:
        made = selftest_vectors(manifest, reference)
        spoil(made)
        return made

    _add_selftest(SimpleNamespace(vectors=vectors), folder, manifest, Silent())
    return folder


@pytest.mark.device
def test_a_right_engine_of_fp16_passes_and_no_wrong_one(tmp_path: Path, on_device: OnDevice) -> None:
    path = renewed(Path(shutil.copytree(OLD, tmp_path / "b.txl")))
    check(path, on_device)
    for update in RULES:
        run_selftest(load(path, "cpu", threads=1, update=update)).require()


@pytest.mark.device
def test_a_right_engine_of_bf16_passes_and_no_wrong_one(make_bundle: Any, on_device: OnDevice) -> None:
    check(make_bundle(precision="bf16", verify=False), on_device)


def test_a_row_in_the_middle_of_the_memory_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest and the newest row alone were compared, and nothing that a step gave was wrong."""
    model, state = load(renewed(Path(shutil.copytree(OLD, tmp_path / "b.txl"))), "cpu", threads=1), Stream.state
    (axes,) = {entry.axes.shape: entry.axes for entry in model.manifest.states_of("rolled")}.values()

    def stale(stream: Stream) -> dict[str, Any]:
        held = state(stream)
        rows = axes.rows(held["layers.00.key"])
        rows[:, -3] = rows[:, -4]
        return held

    run_selftest(model).require()
    monkeypatch.setattr(Stream, "state", stale)
    found = run_selftest(model)
    assert found.largest["rows"] > 30 * found.limits["rows"]
    with pytest.raises(CheckError, match=r"rows relative to their rounding by .* \(limit 3\); do not use this"):
        found.require()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda vectors: vectors.pop("row/layers.01.value"),
        lambda vectors: vectors.update(rows=np.zeros(10**6, np.int32)),
        lambda vectors: vectors.update(channels=vectors["channels"] + 10**6),
        lambda vectors: vectors.update(rows=vectors["rows"] + 10**6),
    ],
    ids=["none of a state", "more rows than values", "channels out of range", "rows out of range"],
)
def test_rows_that_do_not_fit_are_refused(spoil: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"stored vectors do not fit .*; export the model again"):
        renewed(Path(shutil.copytree(OLD, tmp_path / "b.txl")), spoil)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("logprobs", lambda reached: reached[:, None]),
        ("logprobs", lambda reached: np.broadcast_to(reached, (10**4, *reached.shape))),
        ("layers.00.key", lambda reached: np.full_like(reached, np.nan)),
        ("layers.00.key", lambda reached: np.full_like(reached, np.inf)),
        ("layers.00.key", lambda reached: reached[:1, :1]),
    ],
    ids=["other dimensions", "many times as large", "NaN", "infinite", "fewer rows"],
)
def test_what_rows_reached_is_held_to_them(
    name: str, spoil: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be spread over them, to any size, and would let all pass."""
    path = renewed(Path(shutil.copytree(OLD, tmp_path / "b.txl")))
    model = load(path, "cpu", threads=1)
    vectors = dict(model.bundle.selftest())
    vectors[f"reached/{name}"] = spoil(vectors[f"reached/{name}"])
    monkeypatch.setattr(Bundle, "selftest", lambda _: vectors)
    with pytest.raises(BundleError, match=rf"what rows of {name} reached has shape .*; export the model again"):
        run_selftest(model)


@pytest.mark.device
@pytest.mark.parametrize("update", RULES)
def test_a_bundle_of_0_8_is_judged_by_what_it_has(update: str, tmp_path: Path, on_device: OnDevice) -> None:
    """It was measured where fp16 is rounded less often: on a device it may be refused, and is not after an export."""
    before = run_selftest(load(OLD, "cpu", threads=1, update=update))
    before.require()
    assert before.largest.keys() == {"logprobs", "memory"}
    on_a_device = on_device(OLD, update)
    again = on_device(renewed(Path(shutil.copytree(OLD, tmp_path / "b.txl"))), update)
    again.require()
    assert again.limits["rows"] == 3
    assert on_a_device.largest["logprobs"] / on_a_device.limits["logprobs"] > 0.5
    assert again.largest["logprobs"] / again.limits["logprobs"] < 0.6
