"""What the runtime does, done once with old bundles: load, feed, step, score, generate, memory, snapshot, self-test.

    python exercise.py BUNDLE RECORDED.npz BUNDLE RECORDED.npz …

A program of its own, without pytest and PyTorch: it runs where only the runtime is installed, in the versions that are
there. What the bundles gave when they were written is what they must give, to rounding.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import txl_runtime
from txl_runtime.selftest import run_selftest

PACKAGES = ("numpy", "msgspec", "safetensors", "onnxruntime")
ROUNDING = 2e-5


def exercise(bundle: Path, recorded: dict[str, np.ndarray]) -> str:
    """Raise AssertionError where a bundle does not give what it gave; the update rule that ran."""
    model = txl_runtime.load(bundle, "cpu", threads=1)
    rule, tokens = model.update, recorded["tokens"]
    half = model.manifest.precision != "fp32"
    replayed = run_selftest(model)
    replayed.require()
    rounding = replayed.limits["logprobs"] if half else ROUNDING  # versions round half precision at other places
    stream = model.stream()

    def same(found: np.ndarray, name: str) -> None:
        assert np.allclose(found, recorded[f"{rule}/{name}"], rtol=0, atol=rounding), (bundle.name, rule, name)

    same(stream.feed(tokens), "feed")
    for state, rows in stream.memory().items():
        same(rows, f"memory/{state}")
    same(stream.step(tokens[:, :3], np.array([3, 0][: model.batch_size])), "step")
    same(stream.score(tokens[:, :9]), "score")
    drawn = np.stack(list(stream.generate(tokens[:, :2], 6, seed=1)))
    assert half or np.array_equal(drawn, recorded[f"{rule}/drawn"]), (bundle.name, rule, "drawn")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "memory.safetensors"
        stream.snapshot().save(place)
        after = stream.step(tokens[:, :1])
        stream.restore(txl_runtime.StreamState.load(place))
    assert np.array_equal(stream.step(tokens[:, :1]), after), (bundle.name, rule, "snapshot")
    return f"{bundle.name} {rule}"


def main() -> None:
    """Every bundle that the arguments name."""
    pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    done = [exercise(Path(bundle), dict(np.load(recorded))) for bundle, recorded in pairs]
    print(f"Python {sys.version.split()[0]}", *(f"{name} {version(name)}" for name in PACKAGES), sep=", ")
    print(*done, sep=", ")


if __name__ == "__main__":
    main()
