"""Runs the runtime once with old bundles: load, feed, step, score, generate, memory, snapshot, self-test.

    python exercise.py BUNDLE RECORDED.npz BUNDLE RECORDED.npz …

A program of its own, without pytest and PyTorch: it runs where only the runtime is installed, in the versions that are
there. What the bundles gave when they were written is what they must give, to rounding.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import txl_runtime
from txl_runtime import Model
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.selftest import run_selftest
from txl_runtime.streaming.stream import Stream
from txl_runtime.update_rules import usable_updates

PACKAGES = ("numpy", "msgspec", "safetensors", "onnxruntime")
ROUNDING = 2e-5
GIVEN = "given/"


def exercise(bundle: Path, recorded: Mapping[str, np.ndarray]) -> list[str]:
    """Raise AssertionError where a bundle does not give what it gave; the update rules that ran."""
    rules = usable_updates(open_bundle(bundle).manifest.updates)
    for rule in rules:
        _exercise(txl_runtime.load(bundle, "cpu", threads=1, update=rule), bundle, recorded)
    return [f"{bundle.name} {rule}" for rule in rules]


def _exercise(model: Model, bundle: Path, recorded: Mapping[str, np.ndarray]) -> None:
    rule = model.update
    assert any(name.startswith(f"{rule}/") for name in recorded), (bundle.name, rule, "is not recorded")
    replayed = run_selftest(model)
    replayed.require()
    half = model.manifest.precision != "fp32"  # versions round these at other places
    rounding = replayed.limits["logprobs"] if half else ROUNDING
    stream = model.stream()
    found = results(stream, recorded)
    for name in recorded:
        part, _, what = name.partition("/")
        if part != rule or what.startswith("after") or (half and what == "drawn"):
            continue
        limit = 0 if what == "drawn" else rounding
        assert np.allclose(found[what], recorded[name], rtol=0, atol=limit, equal_nan=True), (bundle.name, name)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "memory.safetensors"
        stream.snapshot().save(place)
        after = following(stream, recorded)
        stream.restore(txl_runtime.StreamState.load(place))
    again = following(stream, recorded)
    assert all(np.array_equal(again[name], after[name]) for name in after), (bundle.name, rule, "snapshot")
    stream = model.stream()
    stream.restore(txl_runtime.StreamState.load(bundle.with_name(f"{bundle.name}.{rule}.state")))
    restored = following(stream, recorded)
    for name, array in restored.items():
        expected = recorded[f"{rule}/{name}"]
        assert np.allclose(array, expected, rtol=0, atol=rounding), (bundle.name, rule, "old snapshot", name)


def results(stream: Stream, given: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return a fresh stream's results for recorded tokens, or for the recorded inputs of a model of one's own."""
    if "tokens" not in given:
        fed = stream.feed(_inputs(given))
        states = {f"state/{name}": tensor for name, tensor in stream.state().items()}
        return {f"feed/{name}": array for name, array in fed.items()} | states
    tokens = given["tokens"]
    found: dict[str, Any] = {"feed": stream.feed(tokens)}
    found |= {f"memory/{state}": rows for state, rows in stream.memory().items()}
    found["step"] = stream.step(tokens[:, :3], np.array([3, 0, 2][: stream.batch_size]))
    found["score"] = stream.score(tokens[:, :9])
    found["drawn"] = np.stack(list(stream.generate(tokens[:, :2], 6, seed=1)))
    return found


def following(stream: Stream, given: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return its results after that, or after the snapshot that was taken there."""
    if "tokens" in given:
        return {"after": stream.step(given["tokens"][:, :1])}
    return {f"after/{name}": array for name, array in stream.feed(_inputs(given)).items()}


def _inputs(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(GIVEN): array for name, array in given.items() if name.startswith(GIVEN)}


def main() -> None:
    """Every bundle that the arguments name."""
    pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    done = [rule for bundle, recorded in pairs for rule in exercise(Path(bundle), dict(np.load(recorded)))]
    print(f"Python {sys.version.split()[0]}", *(f"{name} {version(name)}" for name in PACKAGES), sep=", ")
    print(*done, sep=", ")


if __name__ == "__main__":
    main()
