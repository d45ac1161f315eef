"""The loop on a device against the CPU: the same results, whatever is done to a stream.

Without a GPU against a stand-in (`stand_in_engine`); the same tests marked `gpu` on what a machine has.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from random_operations import Case, Play
from stand_ins.engine import open_stand_in
from txl_runtime import BackendError, Model, load
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import choosing
from txl_runtime.selftest import run_selftest

V = 41

pytestmark = pytest.mark.slow

KEPT = {"plain": "ring", "zeros": "zeros", "adaptive": "clusters", "hidden": "hidden"}
SMALL = {"memory_length": 2, "n_layer": 1}
EXPORTED: dict[str, dict[str, Any]] = {
    "window": {"config": {"same_length": True, "clamp_length": 3}},
    "memory shorter than a segment": {"config": SMALL, "segment_length": (5, 2), "verify": False},
    "segments of 1": {"config": SMALL | {"memory_length": 4}, "segment_length": 1, "verify": False},
    "no memory": {"config": {"memory_length": 0}},
}
STAND_INS = ("stand-in", "stand-in, not recorded", "stand-in, log-probabilities alone")
REAL = tuple(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "tensorrt", "rtx"))
PAIRS = [
    (kind, update)
    for kind in (*KEPT, *EXPORTED)
    for update in ("ring", "rolled")
    if update == "rolled" or kind not in ("hidden", "no memory")
]
every = pytest.mark.parametrize(("kind", "update"), PAIRS, ids=lambda value: value)
engines = pytest.mark.parametrize("engine", [*STAND_INS[:1], *REAL])


def tolerance(engine: str) -> float:
    """Relative, or absolute below 1: ONNX Runtime's on the CPU is the same code; a GPU's fp32 is the ladder's rung."""
    return 2e-6 if engine.startswith("stand-in") else 1e-3


@pytest.fixture(scope="module")
def opened(make_bundle, tmp_path_factory) -> Callable[[str, str, str], tuple[Model, Case]]:
    """A bundle on an engine's device, and the case that it is of."""
    made: dict[tuple[str, ...], tuple[Model, Case]] = {}

    def open_it(kind: str, update: str, engine: str) -> tuple[Model, Case]:
        key = (kind, update, engine)
        if not engine.startswith("stand-in") and not choosing.shows_gpu():
            pytest.skip(choosing.NO_GPU)
        if key not in made:
            path = frozen(KEPT[kind]) if kind in KEPT else make_bundle(batch_size=3, **EXPORTED[kind])
            case = Case(kind, update, path, load(path, "cpu", threads=1, update=update), tolerance(engine))
            made[key] = open_engine(path, update, engine, tmp_path_factory), case
        return made[key]

    return open_it


def open_engine(path: Path, update: str, engine: str, tmp_path_factory: Any) -> Model:
    if engine.startswith("stand-in"):
        kinds = ("logprobs",) if engine.endswith("alone") else ("logprobs", "last", "score")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                choosing,
                "open_device",
                lambda name, bundle, rule: open_stand_in(bundle, rule, name, kinds, "not recorded" not in engine),
            )
            return load(path, backend="rtx", update=update)
    from txl_engines import build_bundle

    path = Path(shutil.copytree(path, tmp_path_factory.mktemp(engine) / "built.txl"))
    try:
        build_bundle(path, engine, update=update)
    except BackendError as error:
        pytest.skip(f"{engine}: {error}")
    if reason := choosing.missing(engine, open_bundle(path)):
        pytest.skip(f"{engine}: {reason}")
    return load(path, backend=engine, update=update)


def random_tokens(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (rows, columns)).astype(np.int32)


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


@every
@pytest.mark.parametrize("engine", [*STAND_INS, *REAL])
def test_whatever_is_done_to_a_stream_device_and_cpu_stay_alike(opened, kind, update, engine):
    model, case = opened(kind, update, engine)
    for seed in range(2):
        Play(case, model, seed).go(100)


@every
@engines
def test_the_self_test_passes(opened, kind, update, engine):
    result = run_selftest(opened(kind, update, engine)[0])
    result.require()
    assert result.limits["logprobs"] == 1e-3, "the rung of devices"


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_memory_of_half_precision(tmp_path_factory, update):
    """16 bits on the device, float32 for everybody else; what comes back is bit for bit what was there."""
    path = frozen("half")
    ours = open_engine(path, update, "stand-in", tmp_path_factory).stream()
    theirs = load(path, backend="cpu", threads=1, update=update).stream()
    draws = np.random.default_rng(0)
    for turn in range(40):
        columns = int(draws.integers(1, 12))
        tokens, lengths = draws.integers(0, V, (2, columns)), draws.integers(0, columns + 1, 2)
        np.testing.assert_allclose(ours.feed(tokens, lengths), theirs.feed(tokens, lengths), rtol=0, atol=1e-2)
        if turn % 9 == 4:
            for stream in (ours, theirs):
                stream.select([1, 0])
                stream.reset([turn % 2])
        state = ours.snapshot()
        ours.restore(state)
        for name, rows in ours.memory().items():
            assert same_bits(rows, state.memory[name])
            np.testing.assert_allclose(rows, theirs.memory()[name], rtol=0, atol=1e-2)
            assert same_bits(rows.astype(np.float16).astype(np.float32), rows)
