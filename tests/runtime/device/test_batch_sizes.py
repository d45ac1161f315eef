"""Engines of several B: a stream runs those of the smallest B that holds its sequences."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_ins.engine import open_stand_in
from stand_ins.onnxruntime import load_with, opened
from txl_engines.bundles import build_bundle
from txl_engines.composing import whole_programs
from txl_engines.recording import record_pass
from txl_runtime import BackendError, Model, UsageError, load
from txl_runtime.bundle.engines.files import find_engines
from txl_runtime.bundle.open_batch import smaller
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import choosing
from txl_runtime.selftest import run_selftest

pytestmark = pytest.mark.device

B, V = 3, 60
updates = pytest.mark.parametrize("update", ["ring", "rolled"])


@pytest.fixture
def several(make_bundle, monkeypatch) -> Callable[..., tuple[Model, Model]]:
    """The model on a stand-in device and on the CPU, and B's of 3 and 1."""

    def open_both(update: str, change: Any = None) -> tuple[Model, Model]:
        path = make_bundle(config={}, batch_size=(1, B), verify=False)
        monkeypatch.setattr(
            choosing, "open_device", lambda name, bundle, rule: open_stand_in(bundle, rule, name, change=change)
        )
        return load(path, "rtx", update=update), load(path, "cpu", threads=1, update=update)

    return open_both


def tokens(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (rows, columns))


def test_whole_programs_are_there_for_every_b(make_bundle):
    manifest = open_bundle(make_bundle(config={}, batch_size=(1, B), verify=False)).manifest
    assert (manifest.batch_size, manifest.batch_sizes) == (B, (1,))
    programs = whole_programs(manifest, "ring")
    large = [program for program in programs if not program.name.endswith("-b1")]
    assert [program.name for program in programs[len(large) :]] == [f"{program.name}-b1" for program in large]
    assert {program.inputs[0].shape[0] for program in large} == {B}
    assert {program.inputs[0].shape[0] for program in programs[len(large) :]} == {1}
    assert smaller(manifest, 1).states_of("ring")[0].shape[0] == 1


@updates
def test_a_stream_runs_the_smallest_b_that_holds_it(several, update):
    device, host = several(update)
    for b, expected in ((1, 1), (2, B), (3, B)):
        ours, theirs = device.stream(b), host.stream(b)
        for seed in range(5):
            ids = tokens(b, 4, seed)
            np.testing.assert_allclose(ours.feed(ids), theirs.feed(ids), rtol=0, atol=1e-4)
        np.testing.assert_allclose(ours.score(tokens(b, 9, 7)), theirs.score(tokens(b, 9, 7)), rtol=0, atol=1e-4)
        for name, rows in ours.memory().items():
            np.testing.assert_allclose(rows, theirs.memory()[name], rtol=0, atol=1e-4)
        prepared = {name for name, item in device.backend.executables.items() if item.prepared}
        assert {name.endswith("-b1") for name in prepared} == {expected == 1}, prepared
        for item in device.backend.executables.values():
            item.prepared = 0


@updates
def test_a_state_goes_from_one_b_to_another(several, update):
    device, _ = several(update)
    large, small = device.stream(B), device.stream(1)
    for seed in range(4):
        large.step(tokens(B, 4, seed))
    small.put(0, large.take(2))
    ids = tokens(B, 3, 9)
    np.testing.assert_allclose(small.step(ids[2:]), large.step(ids)[2:], rtol=0, atol=1e-4)
    snapshot = small.snapshot()
    other = device.stream(1)
    other.restore(snapshot)
    assert other.step(ids[:1]).tobytes() == small.step(ids[:1]).tobytes()
    with pytest.raises(UsageError, match=r"rows name 2 sequences, expected 1 … 1"):
        small.select([0, 0])


def test_engines_without_the_largest_b_are_refused_where_they_are_needed(several):
    device, _ = several("ring")
    backend: Any = device.backend
    del backend._sizes[B]
    assert device.stream(1).step(tokens(1, 2, 0)).shape == (1, 2, V)
    with pytest.raises(BackendError, match=r"has engines for B 1, expected some for 3; build the engines again"):
        device.stream(2)


def test_a_self_test_that_passed_is_noted_for_the_programs_of_every_b(make_bundle, tmp_path, monkeypatch):
    """And runs them all: people stream with B 1."""
    path = Path(shutil.copytree(make_bundle(config={}, batch_size=(1, B), verify=False), tmp_path / "a.txl"))
    build_bundle(path, "cuda")
    backend, ran = opened(path), set[str]()
    for name, item in backend.executables.items():
        monkeypatch.setattr(item, "prepare", lambda *at, name=name, tie=item.prepare: ran.add(name) or tie(*at))
    model = load_with(path, backend, monkeypatch)
    run_selftest(model).require()
    assert set(record_pass(model)) == ran == set(backend.executables)
    engines = find_engines(open_bundle(path), "cuda")
    assert len(engines) == 8, "two lengths, last and score, of two B"
    assert {engine.sidecar.verified_on[-1] for engine in engines} == {"self-test on Fake RTX, SM 86"}
