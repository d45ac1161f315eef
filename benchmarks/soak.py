"""200,000 decode steps on a small model: resident memory over the second half, and the error at the end.

    python benchmarks/soak.py [--steps 200000] [--out FOLDER]

The error at the end is against the reference in float64, which need not run all steps: what a step computes depends on
layers × M tokens before it and on nothing older, so the reference starts that far back, from empty memory.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import txl_runtime
from common import TINY, Table, finish, log, parser, random_bundle, shape
from numpy.typing import NDArray
from txl_export.families.transformer_xl.reference import Reference
from txl_runtime.model import Model

from txl_deploy.bench.competitors import weights_of
from txl_deploy.bench.processes import resident_bytes

MODEL = shape(4, 128, 4, 32, 512, 256)
MEMORY = 64
COMPARED = 100
SAMPLES = 200


def errors_at_the_end(model: Model, tokens: NDArray[np.int32], found: list[NDArray[np.float32]]) -> list[float]:
    """Largest differences of the last steps' log-probabilities from the reference, one per step.

    Args:
        model: the bundle.
        tokens: the last ones that were fed, int [n], enough of them to fill every layer's memory.
        found: log-probabilities [V] of the last steps.
    """
    m = model.manifest
    reference = Reference(m.config, m.dialect, m.memory_length, weights_of(model), torch.float64)
    memory, errors = reference.initial_memory(1), []
    for index, token in enumerate(tokens):
        expected, memory = reference(torch.tensor([[int(token)]]), memory)
        late = index - (len(tokens) - len(found))
        if late >= 0:
            errors.append(float(np.abs(found[late] - expected[0, 0].numpy()).max()))
    return errors


def main() -> int:
    """Run the benchmark."""
    options = parser(__doc__, seconds=None)
    options.add_argument("--steps", type=int, default=200_000)
    arguments = options.parse_args()
    values, memory_length = (TINY, 7) if arguments.quick else (MODEL, MEMORY)
    steps = 2_000 if arguments.quick else arguments.steps
    history = values["n_layer"] * (memory_length + 1) + COMPARED
    if steps < 2 * history:
        options.error(f"--steps is {steps}, expected at least {2 * history}")
    with tempfile.TemporaryDirectory() as folder:
        path = random_bundle(Path(folder) / "soak.txl", values, (8, 1), memory_length)
        model = txl_runtime.load(path, threads=arguments.threads)
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, steps, dtype=np.int32)
        stream, last, resident = model.stream(1), [], []
        gc.collect()
        started = time.monotonic()
        for index in range(steps):
            found = stream.step(tokens[None, index : index + 1])
            if index >= steps - COMPARED:
                last.append(found[0, 0])
            if index % (steps // SAMPLES) == 0:
                looked = time.monotonic()
                now = resident_bytes()
                resident.append((index, None if now is None else now[0]))
                started += time.monotonic() - looked  # looking is not stepping
            if index % (steps // 10) == 0:
                log(f"step {index:,}")
        took = time.monotonic() - started
        errors = errors_at_the_end(model, tokens[-history:], last)
    late = [size for index, size in resident if index >= steps // 2 and size is not None]
    quarter = max(len(late) // 4, 1)
    growth = float(np.median(late[-quarter:]) - np.median(late[:quarter])) if late else None
    table = Table(("steps", "µs per step", "resident, MB", "growth over the last half, kB", "error at the end"))
    shown = late[-1] / 1e6 if late else "not measured on this system"
    table.add(f"{steps:,}", took / steps * 1e6, shown, None if growth is None else growth / 1e3, f"{max(errors):.2e}")
    document = {"resident": resident, "growth_bytes": growth, "errors": errors, "seconds": took}
    finish("soak", arguments, [table], document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
