"""The end of memory: a call happens or is refused, and the stream is what it was or says it is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from opcodes import bits
from txl_runtime import Stream, StreamState, TxlError, load

B = 3
MAKERS = "zeros empty array full zeros_like ones ascontiguousarray stack where arange clip"
SIZES = int(os.environ.get("TXL_MEMORY_SIZES", "4"))
"""Limits of the address space that are tried; 20 in the sweep by hand."""


@pytest.fixture(scope="module")
def stream() -> Stream:
    stream = load(frozen("ring"), "cpu", threads=1, update="rolled").stream()
    stream.feed(np.arange(3 * 5).reshape(B, 5))
    return stream


def failing_at(patch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Let the n-th array that is made find no memory; counts what is left."""
    left = [number]

    def around(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise MemoryError("no memory")
            return make(*arguments, **options)

        return made

    for name in MAKERS.split():
        patch.setattr(np, name, around(getattr(np, name)))
    return left


TOKENS = np.arange(3 * 9).reshape(B, 9)
CALLS: dict[str, Callable[[Stream, Any], Any]] = {
    "step": lambda s, path: s.step(TOKENS[:, :4], [4, 2, 0]),
    "feed": lambda s, path: s.feed(TOKENS),
    "run": lambda s, path: s.run({"tokens": TOKENS[:, :4]}, [4, 2, 0]),
    "score": lambda s, path: s.score(TOKENS),
    "generate": lambda s, path: list(s.generate(TOKENS[:, :2], 3, top_k=5, seed=0)),
    "snapshot": lambda s, path: s.snapshot(),
    "save": lambda s, path: s.snapshot().save(path.with_suffix(".new")),
    "load and restore": lambda s, path: s.restore(StreamState.load(path)),
    "select": lambda s, path: s.select([2, 0, 1]),
    "reset": lambda s, path: s.reset([1]),
    "put": lambda s, path: s.put(0, s.take(1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_array_that_finds_no_memory_leaves_whole_segments_or_a_stream_that_says_so(stream, tmp_path, name):
    start, path, call = stream.snapshot(), tmp_path / "a.state", CALLS[name]
    start.save(path)
    allowed, run = {bits(stream)}, stream.loop.run

    def recorded(*arguments: Any, **options: Any) -> Any:
        result = run(*arguments, **options)
        allowed.add(bits(stream))
        return result

    stream.loop.run = recorded
    call(stream, path)
    allowed.add(bits(stream))
    stream.loop.run = run
    for number in range(1, 2000):
        stream.restore(start)
        with pytest.MonkeyPatch.context() as patch:
            left = failing_at(patch, number)
            try:
                call(stream, path)
            except (MemoryError, TxlError):
                failed = True
            else:
                failed = False
        if stream.half_changed:
            assert failed
            with pytest.raises(TxlError, match="half replaced"):
                stream.step(TOKENS[:, :1])
        else:
            assert bits(stream) in allowed, f"array {number}"
        if left[0] > 0:
            break
    stream.restore(start)
    assert bits(stream) in allowed
    assert number > 1


CHILD = """
import json, os, resource, sys
import numpy as np, onnxruntime, safetensors.numpy
import txl_runtime
from txl_runtime import selftest
from txl_runtime.streaming import sampling, snapshot, state_files, states
from txl_runtime.bundle import writing
bundle, place, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
said, stream = [], None
def attempt(name, call):
    global stream
    try:
        found = call()
        said.append([name, "done"])
        return found
    except (MemoryError, txl_runtime.TxlError) as error:
        said.append([name, type(error).__name__])
    except BaseException as error:
        said.append([name, "UNKNOWN " + repr(error)[:300]])
model = attempt("load", lambda: txl_runtime.load(bundle, "cpu", threads=1))
stream = model and attempt("stream", model.stream)
if stream is not None:
    tokens = np.arange(3 * 8000).reshape(3, 8000) % 41
    for again in range(3):
        state = attempt("snapshot", stream.snapshot)
        attempt("step", lambda: stream.step(tokens[:, :4]))
        attempt("feed", lambda: stream.feed(tokens))
        attempt("score", lambda: stream.score(tokens))
        attempt("generate", lambda: list(stream.generate(tokens[:, :4], 5, seed=1)))
        if state is not None:
            attempt("save", lambda: state.save(place))
            attempt("restore", lambda: stream.restore(txl_runtime.StreamState.load(place)))
        attempt("select", lambda: stream.select([2, 0, 1]))
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the address space is limited on Linux")
def test_a_small_address_space_ends_in_errors_that_can_be_caught(tmp_path):
    bundle, ends = frozen("ring"), []
    for room in np.geomspace(12 * 2**20, 2**28, SIZES).astype(int).tolist():
        command = [sys.executable, "-c", CHILD, str(bundle), str(tmp_path / "a.state"), str(room)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        ends.append((room, done.returncode, done.stdout[-2000:], done.stderr[-500:]))
        if done.returncode == 0:
            assert "UNKNOWN" not in done.stdout, ends[-1]
    print(*ends, sep="\n")
    assert ends[-1][1] == 0
    assert {said for _, said in json.loads(ends[-1][2])} == {"done"}
