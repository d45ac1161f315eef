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
from stand_ins.engine import open_stand_in
from txl_runtime import BackendError, Model, Stream, StreamState, load
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.tables import ring_slots
from txl_runtime.device import choosing

B, V = 3, 60

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"config": {}},
    "zeros": {"config": {"pre_lnorm": True, "attention_bias": True, "memory_start": "zeros"}},
    "window": {"config": {"same_length": True, "clamp_length": 3}},
    "adaptive": {"config": {"cutoffs": (20, 40), "div_val": 2}},
    "hidden": {"config": {}, "memory": "hidden"},
    "memory shorter than a segment": {
        "config": {"memory_length": 2, "n_layer": 1},
        "segment_length": (5, 2),
        "verify": False,
    },
    "segments of 1": {"config": {"memory_length": 4, "n_layer": 1}, "segment_length": 1, "verify": False},
    "no memory": {"config": {"memory_length": 0}},
}
STAND_INS = ("stand-in", "stand-in, not recorded", "stand-in, log-probabilities alone")
REAL = tuple(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "tensorrt", "rtx"))
Pair = tuple[Model, Model]
PAIRS = [
    (kind, update)
    for kind in KINDS
    for update in ("ring", "rolled")
    if update == "rolled" or kind not in ("hidden", "no memory")
]
every = pytest.mark.parametrize(("kind", "update"), PAIRS, ids=lambda value: value)
engines = pytest.mark.parametrize("engine", [*STAND_INS[:1], *REAL])


def tolerance(engine: str) -> float:
    """Relative, or absolute below 1: ONNX Runtime's on the CPU is the same code; a GPU's fp32 is the ladder's rung."""
    return 2e-6 if engine.startswith("stand-in") else 1e-3


@pytest.fixture(scope="module")
def models(make_bundle, tmp_path_factory) -> Callable[..., Pair]:
    """A bundle on an engine's device, and on the CPU."""
    opened: dict[tuple[str, ...], Pair] = {}

    def open_pair(kind: str, update: str, engine: str = "stand-in") -> Pair:
        key = (kind, update, engine)
        if not engine.startswith("stand-in") and not choosing.shows_gpu():
            pytest.skip(choosing.NO_GPU)
        if key not in opened:
            path = make_bundle(**{"batch_size": B, **KINDS[kind]})
            on_cpu = load(path, backend="cpu", threads=1, update=update)
            opened[key] = open_engine(path, update, engine, tmp_path_factory), on_cpu
        return opened[key]

    return open_pair


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


def assert_close(found: np.ndarray, expected: np.ndarray, within: float) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=within * scale)


def assert_alike(ours: Stream, theirs: Stream, within: float) -> None:
    assert ours.batch_size == theirs.batch_size
    assert ours.fill.tolist() == theirs.fill.tolist()
    assert heads(ours) == heads(theirs)
    found, expected = ours.memory(), theirs.memory()
    assert list(found) == list(expected)
    for name, rows in expected.items():
        assert_close(found[name], rows, within)


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


def heads(stream: Stream) -> list[int]:
    return stream.snapshot().head.tolist()


# --- the same function --------------------------------------------------------------------------------------------

CALLS = ("step", "step", "step", "feed", "score", "generate", "reset", "select", "snapshot", "restore", "swap")


def do(call: str, streams: tuple[Stream, Stream], kept: list[list[StreamState]], draws: Any, within: float) -> None:
    """One thing that can be done to a stream, done to both; results are compared."""
    ours, _ = streams
    b, longest = ours.batch_size, ours._manifest.segment_lengths[0]
    if call in ("step", "feed"):
        columns = int(draws.integers(1, longest + 1 if call == "step" else 3 * longest))
        lengths = draws.integers(0, columns + 1, b) if draws.random() < 0.7 else None
        tokens = draws.integers(0, V, (b, columns))
        assert_close(*(getattr(stream, call)(tokens, lengths) for stream in streams), within)
    elif call == "score":
        tokens = draws.integers(0, V, (b, int(draws.integers(2, 10))))
        assert_close(*(stream.score(tokens) for stream in streams), within)
    elif call == "generate":
        tokens = draws.integers(0, V, (b, int(draws.integers(1, 9))))
        lengths = draws.integers(1, tokens.shape[1] + 1, b)
        drawn = [list(stream.generate(tokens, 3, temperature=0, lengths=lengths)) for stream in streams]
        assert np.array_equal(*drawn)
    elif call == "reset":
        rows = draws.random(b) < 0.4
        for stream in streams:
            stream.reset(rows)
    elif call == "select":
        rows = draws.integers(0, b, int(draws.integers(1, B + 1)))
        for stream in streams:
            stream.select(rows)
    elif call == "snapshot":
        kept.append([stream.snapshot() for stream in streams])
    else:
        fitting = [states for states in kept if states[0].batch_size == b]
        if fitting:
            states = fitting[int(draws.integers(len(fitting)))]
            for stream, state in zip(streams, states[::-1] if call == "swap" else states, strict=True):
                stream.restore(state)


@every
@pytest.mark.parametrize("engine", [*STAND_INS, *REAL])
def test_whatever_is_done_to_a_stream_device_and_cpu_stay_alike(models, kind, update, engine):
    within = tolerance(engine)
    ours, theirs = models(kind, update, engine)
    for seed in range(2):
        draws, kept = np.random.default_rng(seed), []
        streams = ours.stream(), theirs.stream()
        for call in draws.choice(CALLS, 60):
            do(str(call), streams, kept, draws, within)
            assert_alike(*streams, within)


@every
@engines
def test_a_long_run_stays_alike_many_times_around(models, kind, update, engine):
    ours, theirs = (model.stream() for model in models(kind, update, engine))
    draws, longest = np.random.default_rng(0), ours._manifest.segment_lengths[0]
    for _ in range(200):
        columns = int(draws.integers(1, longest + 1))
        tokens, lengths = draws.integers(0, V, (B, columns)), draws.integers(0, columns + 1, B)
        assert_close(ours.step(tokens, lengths), theirs.step(tokens, lengths), tolerance(engine))
    assert_alike(ours, theirs, tolerance(engine))


# --- states -------------------------------------------------------------------------------------------------------


@every
@engines
def test_restore_is_bit_for_bit_wherever_the_head_and_the_side_stand(models, kind, update, engine, tmp_path):
    model, _ = models(kind, update, engine)
    ring, _ = ring_slots(model.memory_length, model.segment_lengths[0])
    stream = model.stream()
    for seed in range(ring + 3):
        stream.step(random_tokens(B, 1, seed), [1, seed % 2, 1])
        state = stream.snapshot()
        state.save(tmp_path / "a.state")
        other = model.stream()
        other.feed(random_tokens(B, 3 + seed, 100))
        other.restore(StreamState.load(tmp_path / "a.state"))
        tokens = random_tokens(B, 9, 200 + seed)
        expected = stream.feed(tokens)
        assert same_bits(other.feed(tokens), expected)
        assert heads(other) == heads(stream)
        for name, rows in stream.memory().items():
            assert same_bits(other.memory()[name], rows)
        stream.restore(state)


@every
@engines
def test_a_reset_sequence_is_as_new_and_the_others_do_not_notice(models, kind, update, engine):
    model, _ = models(kind, update, engine)
    one, other, new = (model.stream() for _ in range(3))
    for stream in (one, other):
        stream.feed(random_tokens(B, 11))
    one.reset([1])
    tokens = random_tokens(B, 4, 1)
    found, expected, fresh = (stream.feed(tokens[:, :3]) for stream in (one, other, new))
    assert same_bits(found[[0, 2]], expected[[0, 2]])
    assert same_bits(found[1], fresh[1])


@every
@engines
def test_select_reorders_drops_and_duplicates(models, kind, update, engine):
    ours, theirs = (model.stream() for model in models(kind, update, engine))
    for rows in ([2, 0, 1], [1, 1, 0], [2, 2], [1, 0], [0, 0, 1], [0], [0, 0, 0]):
        columns = len(rows) + 2
        for stream in (ours, theirs):
            tokens = random_tokens(stream.batch_size, columns, columns)
            stream.feed(tokens, np.arange(stream.batch_size) % 2 + 1)
            stream.select(rows)
        assert_alike(ours, theirs, tolerance(engine))
    tokens = random_tokens(3, 6, 9)
    assert_close(ours.feed(tokens), theirs.feed(tokens), tolerance(engine))


@every
@engines
def test_idle_sequences_keep_every_bit(models, kind, update, engine):
    stream = models(kind, update, engine)[0].stream()
    stream.feed(random_tokens(B, 9))
    before = stream.snapshot()
    for seed in range(5):
        stream.step(random_tokens(B, 1, seed), [1, 0, 1])
    after = stream.snapshot()
    assert after.fill[1] == before.fill[1]
    for name, rows in after.memory.items():
        count = int(before.fill[1])
        assert same_bits(
            rows[1, rows.shape[1] - count :], before.memory[name][1, before.memory[name].shape[1] - count :]
        )


@every
@engines
def test_fewer_live_sequences_than_the_bundle_has(models, kind, update, engine):
    ours, theirs = (model.stream(2) for model in models(kind, update, engine))
    for seed in range(6):
        tokens = random_tokens(2, 5, seed)
        assert_close(ours.feed(tokens), theirs.feed(tokens), tolerance(engine))
    assert_alike(ours, theirs, tolerance(engine))


@every
@engines
def test_the_self_test_passes(models, kind, update, engine):
    from txl_runtime.selftest import run_selftest

    result = run_selftest(models(kind, update, engine)[0])
    result.require()
    assert result.limits["logprobs"] == 1e-3, "the rung of devices"


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_memory_of_half_precision(make_bundle, tmp_path_factory, update):
    """16 bits on the device, float32 for everybody else; what comes back is bit for bit what was there."""
    path = make_bundle(batch_size=B, config={}, precision="fp16", verify=False)
    ours = open_engine(path, update, "stand-in", tmp_path_factory).stream()
    theirs = load(path, backend="cpu", threads=1, update=update).stream()
    draws = np.random.default_rng(0)
    for turn in range(40):
        columns = int(draws.integers(1, 12))
        tokens, lengths = draws.integers(0, V, (B, columns)), draws.integers(0, columns + 1, B)
        assert_close(ours.feed(tokens, lengths), theirs.feed(tokens, lengths), 1e-2)
        if turn % 9 == 4:
            for stream in (ours, theirs):
                stream.select([2, 1, 0])
                stream.reset([turn % B])
        state = ours.snapshot()
        ours.restore(state)
        for name, rows in ours.memory().items():
            assert same_bits(rows, state.memory[name])
            assert_close(rows, theirs.memory()[name], 1e-2)
            assert same_bits(rows.astype(np.float16).astype(np.float32), rows)
