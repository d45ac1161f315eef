"""Commits of a part of a segment in C++ beside Python's: results, states and refusals are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import txl_runtime
from conforming import Inside
from frozen import frozen
from step_models import counting
from txl_runtime import Stream, UsageError

from conformance.driver import packed
from conformance.talking import Talk

pytestmark = [pytest.mark.slow(keep=9), pytest.mark.timeout(1200)]  # whoever comes first builds
ROUNDS = 60
CASES = {
    "ring": "ring",
    "ring, rolled": "rolled",
    "zeros": "ring",
    "clusters": "ring",
    "counting": None,
    "policy-16": None,
    "axes": None,
    "lockstep": None,
    "lookahead": None,
    "stages": None,
}


def told(driver: Inside | Talk, request: dict[str, Any]) -> Any:
    """Return a driver's answer to a request that it does not refuse."""
    reply = driver.ask(request)
    assert "ok" in reply, reply
    return reply["ok"]


def carried(stream: Stream) -> dict[str, Any]:
    """The state of Python's stream, as a driver tells it."""
    return {"states": {name: packed(array) for name, array in stream.state().items()}, "fill": stream.fill.tolist()}


def segment(stream: Stream, model: Any, draws: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs by name, and how many of their positions count."""
    manifest, b = model.manifest, stream.batch_size
    known = manifest.segment_lengths
    length = int(draws.integers(1, known[0] + 1) if manifest.lengths == "valid" else draws.choice(known))
    some = range(length + 1) if manifest.lengths == "valid" else (0, *[length] * 4)
    ran = draws.choice(some, b)
    inputs = {}
    for entry in manifest.given:
        shape, dtype = entry.sizes(b, length), np.dtype(entry.dtype)
        inputs[entry.name] = (
            draws.normal(size=shape).astype(dtype)
            if dtype.kind == "f"
            else draws.integers(0, entry.vocab or 2, shape).astype(dtype)
        )
    return inputs, ran if manifest.can.run_apart else np.full(b, length)


@pytest.mark.parametrize("name", CASES)
def test_parts_of_segments_are_committed_and_refused_as_in_python(
    built: Path, engine: Path, tmp_path: Path, name: str
) -> None:
    path = counting().write(tmp_path / "b.txl") if name == "counting" else frozen(name.split(",")[0])
    model, draws = txl_runtime.load(path, "cpu", threads=1, update=CASES[name]), np.random.default_rng(3)
    stream, parts, refused = model.stream(min(model.batch_size, 4)), 0, 0
    with Talk([str(built / "txl-driver")], 60.0) as c:
        told(c, {"do": "load", "path": str(path), "update": CASES[name]})
        told(c, {"do": "open", "b": stream.batch_size, "memory_length": None})
        for _ in range(ROUNDS):
            inputs, ran = segment(stream, model, draws)
            expected = stream.run(inputs, ran, commit=False)
            given = {entry: packed(array) for entry, array in inputs.items()}
            found = told(c, {"do": "run", "inputs": given, "counts": ran.tolist(), "commit": False})["outputs"]
            assert found == {entry: packed(array) for entry, array in expected.items()}
            assert told(c, {"do": "state"}) == carried(stream)
            for _ in range(3):
                counts = draws.integers(0, ran + 1 + (draws.random() < 0.1)).clip(0, model.segment_lengths[0])
                if draws.random() < 0.5:
                    counts = np.where(ran > 0, draws.integers(0, ran.max() + 1), 0)
                reply = c.ask({"do": "commit", "counts": counts.tolist()})
                said = ""
                try:
                    stream.commit(counts)
                except UsageError as error:
                    said = str(error)
                assert reply.get("refused", "") == said
                refused += bool(said)
                if not said:
                    parts += bool(((counts > 0) & (counts < ran)).any())
                    break
            assert told(c, {"do": "state"}) == carried(stream)
    assert refused > 3
    assert parts > 3 or name in ("ring, rolled", "stages"), "which keep no part"


def test_a_segment_is_committed_once_and_not_after_the_state_has_changed(built: Path, engine: Path) -> None:
    tokens = packed(np.array([[5, 3, 8, 1], [2, 7, 7, 4]], np.int32))
    tried = {"do": "run", "inputs": {"tokens": tokens}, "counts": [4, 3], "commit": False}
    with Talk([str(built / "txl-driver")], 60.0) as c:
        told(c, {"do": "load", "path": str(frozen("ring")), "update": "ring"})
        told(c, {"do": "open", "b": 2, "memory_length": None})
        saved = told(c, {"do": "save"})
        for change in ({"do": "reset", "rows": [1]}, {"do": "select", "rows": [1, 0]}, {"do": "restore", **saved}):
            told(c, tried)
            told(c, change)
            told(c, {"do": "commit", "counts": [2, 2]})
            assert told(c, {"do": "state"})["fill"] == [0, 0], change["do"]
        told(c, tried)
        for counts in ([2, 1], [4, 3], [1, 1]):
            told(c, {"do": "commit", "counts": counts})
            assert told(c, {"do": "state"})["fill"] == [2, 1]
        assert c.ask({"do": "commit", "counts": [5, 0]})["refused"] == (
            "the count of sequence 0 is 5, expected 0 ... 4; 0 leaves a sequence idle"
        )
        assert c.ask({"do": "commit", "counts": [1]})["refused"] == (
            "1 counts were given, expected one for each of 2 sequences; give so many"
        )
