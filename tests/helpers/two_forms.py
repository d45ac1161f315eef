"""Random operations on two streams of one bundle, of its fast and of its plain form: they agree to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from txl_runtime import BackendError, Model, Stream, load
from txl_runtime.types import Ids


def both_forms(path: Path) -> tuple[Model, Model]:
    """A bundle as it runs fastest, and as it lies there."""
    fast, plain = (load(path, "cpu", threads=1, forms=forms) for forms in ("fast", "plain"))
    return fast, plain


def kept(model: Model) -> dict[str, list[str]]:
    """Of every program, the outputs whose idle sequences the loop keeps."""
    backend: Any = model.backend
    return {program.name: sorted(backend.engine.kept(program)) for program in backend.programs}


def same(found: Mapping[str, Any], expected: Mapping[str, Any], said: str) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), f"{name} after {said}"
        assert found[name].tobytes() == array.tobytes(), f"{name} after {said}"


def given(model: Model, draws: np.random.Generator, b: int, length: int) -> dict[str, Any]:
    """Inputs of any size, now and then NaN."""
    found: dict[str, Any] = {}
    for entry in model.manifest.given:
        sizes = entry.sizes(b, length)
        if entry.dtype.startswith("float"):
            found[entry.name] = (draws.normal(size=sizes) * 2).astype(entry.dtype)
            if draws.random() < 0.1:
                found[entry.name][...] = np.nan
        else:
            found[entry.name] = draws.integers(0, entry.vocab or 2, sizes).astype(entry.dtype)
    return found


def counts(model: Model, draws: np.random.Generator, b: int, length: int) -> Ids:
    """Which sequences run, and how many of their positions count."""
    live = draws.random(b) < draws.choice([0.3, 0.6, 1.0])
    if not model.manifest.can.run_apart:
        live = np.full(b, bool(live.any()))
    exact = model.manifest.lengths == "exact"
    positions = np.full(b, length) if exact else draws.integers(1, length + 1, b)
    return np.where(live, positions, 0).astype(np.int32)


def written(stream: Stream) -> dict[str, Any]:
    """What the last segment would make of the states."""
    return {state.name: array.copy() for state, array in stream.loop.written()}


def ran(stream: Stream, inputs: dict[str, Any], live: Ids, commit: bool) -> Mapping[str, Any]:
    """What a segment returns; whether it failed, where a graph cannot run so many sequences."""
    try:
        return stream.run(inputs, live, commit=commit)
    except BackendError:
        return {"failed": np.ones(1)}


def play(fast: Model, plain: Model, seed: int, turns: int) -> None:
    """Random segments and random changes of states; everything is compared after each."""
    draws = np.random.default_rng(seed)
    b = fast.batch_size if not fast.manifest.can.run_fewer else int(draws.integers(1, fast.batch_size + 1))
    pair, snapshots, rows, said = [model.stream(b) for model in (fast, plain)], list[Any](), list[Any](), ""
    for _ in range(turns):
        b = pair[0].batch_size
        length, commit = int(draws.choice(fast.segment_lengths)), bool(draws.random() < 0.7)
        inputs, live = given(fast, draws, b, length), counts(fast, draws, b, length)
        said = f"{said[-60:]} run {live.tolist()}{'' if commit else ' uncommitted'}"
        same(*(ran(stream, inputs, live, commit) for stream in pair), said)
        same(*(written(stream) for stream in pair), said)
        if not commit and draws.random() < 0.5:
            said += " commit"
            for stream in pair:
                stream.loop.commit()
        same(*(stream.state() for stream in pair), said)
        choice, apart = draws.choice(["reset", "select", "snapshot", "restore", "take", "put", ""]), True
        said, apart = f"{said} {choice}", fast.manifest.can.run_apart
        if choice == "reset":
            which = draws.random(b) < 0.4 if apart else None
            for stream in pair:
                stream.reset(which)
        elif choice == "select" and apart:
            order = draws.integers(0, b, int(draws.integers(1, fast.batch_size + 1)))
            for stream in pair:
                stream.select(order)
        elif choice == "snapshot":
            snapshots.append([stream.snapshot() for stream in pair])
        elif choice == "restore" and snapshots and snapshots[-1][0].batch_size == b:
            for stream, state in zip(pair, snapshots[-1], strict=True):
                stream.restore(state)
        elif choice == "take" and apart:
            row = int(draws.integers(0, b))
            rows.append([stream.take(row) for stream in pair])
        elif choice == "put" and rows and apart:
            row = int(draws.integers(0, b))
            for stream, state in zip(pair, rows[-1], strict=True):
                stream.put(row, state)
        same(*(stream.state() for stream in pair), said)
