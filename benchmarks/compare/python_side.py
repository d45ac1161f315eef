"""Run Python's side of `c_against_python.py`, importing only what an application would; `c_side.cpp` is C's side."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import txl_runtime
from txl_runtime.types import Array


def inputs(model: txl_runtime.Model, length: int) -> dict[str, Array]:
    """Return random arrays for a segment of `length` positions, e.g. {"x": [1, 64, 8]}."""
    draws, inputs = np.random.default_rng(0), dict[str, Array]()
    for entry in model.manifest.inputs:
        if entry.role == "tokens":
            inputs[entry.name] = draws.integers(0, model.vocab_size, (model.batch_size, length), np.int32)
        elif entry.role == "feature":
            inputs[entry.name] = draws.random(entry.sizes(model.batch_size, length), np.float32)
    return inputs


def main() -> int:
    """Run one step and print its cost (with "first"), or run the segments that lines of stdin request."""
    bundle, update, *first = sys.argv[1:]
    model = txl_runtime.load(bundle, backend="cpu", threads=1, update=update)
    stream = model.stream(model.batch_size)
    if first:
        stream.run(inputs(model, 1))
        # getrusage would also count the memory of the parent process before exec
        lines = Path("/proc/self/status").read_text().splitlines()
        (peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        print(json.dumps({"seconds": time.process_time(), "peak": peak * 1024}))
        return 0
    for line in sys.stdin:
        request = json.loads(line)
        given = inputs(model, request["positions"])
        stream.run(given)
        began = time.thread_time()
        for _ in range(request["calls"]):
            stream.run(given)
        print(json.dumps({"seconds": time.thread_time() - began}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
