"""Compare the device loop on this machine's GPU with the CPU, step by step, on the same random work.

    python benchmarks/gpu/gpu_exercise.py [--backend torch|cuda|tensorrt|rtx] [--quick] [--bundle BUNDLE] [--steps 300]
                                      [--threads 4] [--out FOLDER]

The work, on ring and on rolled memory, is: full and partial segments, idle sequences, resets, reordering, snapshots,
segments without commit, and memory that wraps around. After that, streams in several threads do such work at once.
Backend torch interprets the programs with PyTorch, which tests the loop on machines where neither TensorRT nor ONNX
Runtime's CUDA provider runs. For the other backends, the engines are built first. Without a GPU the script says so and
ends with 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import txl_runtime
from gpu_journal import Journal, without_cuda, writing
from numpy.typing import NDArray
from torch_engine import CudaPlace, open_torch
from txl_engines import build_bundle
from txl_runtime.device.choosing import DEVICES, NO_GPU
from txl_runtime.device.cuda import open_cuda
from txl_runtime.device.gpu import gpu_name
from txl_runtime.errors import CheckError
from txl_runtime.ladder import BISECT
from txl_runtime.model import Model
from txl_runtime.streaming.stream import Stream

LIMIT = 1e-3
"""The largest allowed difference in fp32, as the parity ladder has it for engines, relative to max(1, largest value).
In lower precisions the limit is the difference that `verify --bisect` counts as rounding."""
WORK = ("segment", "one", "partial", "idle", "reset", "select", "score", "snapshot", "looked")


@dataclass
class Exercise:
    """The work that was done on a stream, and the largest difference of its results from the CPU's.

    Attributes:
        worst: the largest difference, relative to max(1, largest value).
        done: the number of times that each kind of work was done.
        wrapped: the number of times that a sequence went around the end of its ring.
        recorded: for each program and side, how its steps are run: recorded into a graph, or why not.
    """

    worst: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    wrapped: int = 0
    recorded: dict[str, str] = field(default_factory=dict)

    def compare(self, found: NDArray[Any], expected: NDArray[Any]) -> None:
        """Update `worst` by the difference of two arrays, e.g. [4, 256]; NaN counts as infinite."""
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        difference = float(np.abs(found - expected).max(initial=0)) / scale
        self.worst = max(self.worst, difference if np.isfinite(difference) else np.inf)


def exercise(model: Model, reference: Model, steps: int, seed: int) -> Exercise:
    """Do the same random work on a stream of each model, and compare all results.

    Args:
        model: the model on the device.
        reference: the same model on the CPU.
        steps: pieces of work.
        seed: of the random choices.
    """
    result, draws = Exercise(), np.random.default_rng(seed)
    ours, theirs = model.stream(), reference.stream()
    for index in range(steps):
        work = WORK[index % len(WORK)] if index < len(WORK) else str(draws.choice(WORK))
        heads = ours.loop.heads.copy()
        for mine, other in _do(work, model, ours, theirs, draws):
            result.compare(mine, other)
        result.done[work] += 1
        if work not in ("reset", "select", "snapshot"):
            result.wrapped += int((ours.loop.heads < heads).sum())
        result.compare(ours.fill, theirs.fill)
    for name, rows in theirs.memory().items():
        result.compare(ours.memory()[name], rows)
    result.recorded = dict(getattr(ours.loop, "recorded", {}))
    return result


def _do(
    work: str, model: Model, ours: Stream, theirs: Stream, draws: np.random.Generator
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Do one kind of work of `WORK` on both streams; return pairs of the results to compare."""
    b, longest = model.batch_size, model.segment_lengths[0]
    vocabulary = model.manifest.vocab_size
    tokens = draws.integers(0, vocabulary, (b, longest + 1)).astype(np.int32)
    lengths = draws.integers(0, longest + 1, b).astype(np.int32)
    if work == "idle":
        lengths[:] = 0
        lengths[draws.integers(b)] = draws.integers(1, longest + 1)
    if work == "reset":
        rows = draws.choice(b, draws.integers(1, b + 1), replace=False)
        ours.reset(rows)
        theirs.reset(rows)
        return []
    if work == "select":
        rows = draws.integers(0, b, b)
        ours.select(rows)
        theirs.select(rows)
        return []
    if work == "snapshot":
        kept = ours.snapshot()
        ours.step(tokens[:, :longest])  # this step may not affect later results
        ours.restore(kept)
        return []
    if work == "score":
        return [(ours.score(tokens), theirs.score(tokens))]
    if work == "looked":
        name = next(entry.name for entry in model.manifest.inputs if entry.role == "tokens")
        inputs = {name: tokens[:, :longest]}
        mine, other = (stream.run(inputs, lengths=lengths, commit=False) for stream in (ours, theirs))
        return [(mine[key], other[key]) for key in other]
    if work == "one":
        return [(ours.step(tokens[:, :1]), theirs.step(tokens[:, :1]))]
    if work == "segment":
        return [(ours.step(tokens[:, :longest]), theirs.step(tokens[:, :longest]))]
    return [(ours.step(tokens[:, :longest], lengths), theirs.step(tokens[:, :longest], lengths))]


def in_threads(model: Model, reference: Model, threads: int, steps: int) -> list[Exercise]:
    """Run `exercise` in several threads at once, each with streams of its own; return all results.

    Raises:
        CheckError: a thread ended early.
    """
    results: list[Exercise] = []
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            results.append(exercise(model, reference, steps, 100 + seed))
        except Exception as error:  # the waiting thread raises it again
            errors.append(error)

    running = [threading.Thread(target=run, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise CheckError(f"{len(errors)} of {threads} threads ended early: {errors[0]!r}") from errors[0]
    return results


def open_device(path: Path, backend: str, update: str) -> Model:
    """Open a bundle on the GPU; for all backends but "torch", build its engines first."""
    if backend == "torch":
        model = txl_runtime.load(path, backend="cpu")
        model.backend = open_torch(model.bundle, open_cuda(), CudaPlace(), update)
        return model
    build_bundle(path, backend, update=update)
    return txl_runtime.load(path, backend=backend, update=update)


def check(path: Path, backend: str, update: str, steps: int, threads: int) -> dict[str, object]:
    """Exercise one backend with one update rule, in one thread and in several; return the figures.

    Raises:
        CheckError: results differ from the CPU's by more than the limit.
    """
    model, reference = open_device(path, backend, update), txl_runtime.load(path, backend="cpu")
    alone = exercise(model, reference, steps, 0)
    together = in_threads(model, reference, threads, max(steps // 4, 10))
    worst = max(item.worst for item in (alone, *together))
    recorded = sorted(set(alone.recorded.values()))
    figures = {"worst": worst, "steps": steps, "threads": threads, "wrapped": alone.wrapped, "recorded": recorded}
    limit = LIMIT if model.manifest.precision == "fp32" else BISECT[model.manifest.precision]
    if not worst <= limit:
        raise CheckError(f"results differ from the CPU's by {worst:.3g}, expected at most {limit:g}; {figures}")
    return figures


def random_model(path: Path, quick: bool) -> Path:
    """Export a random model to a path; only this function needs the packages of an export."""
    from benchmarks.shared.models import TINY, random_bundle, shape

    values = TINY if quick else shape(4, 256, 4, 64, 1024, 20000, cutoffs=(4000, 10000))
    length, memory = (4, 12) if quick else (32, 128)
    return random_bundle(path, values, (length, 1), memory, batch_size=4)


def main() -> int:
    """Read the command line, exercise every update rule, and return 1 if a check failed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    options.add_argument("--quick", action="store_true", help="a tiny model: proves that it runs")
    options.add_argument("--backend", choices=("torch", *DEVICES), default="torch", help="what runs the programs")
    options.add_argument("--bundle", type=Path, help="take this bundle instead of a random model, which is exported")
    options.add_argument("--steps", type=int, default=300, help="of work on one stream (default 300)")
    options.add_argument("--threads", type=int, default=4, help="with a stream each, afterwards (default 4)")
    options.add_argument("--out", type=Path, metavar="FOLDER", help="write the results here")
    given = options.parse_args()
    with writing("gpu_exercise"):
        journal = Journal("gpu_exercise", given.out)
    without = NO_GPU if gpu_name() is None else ""
    if given.backend == "torch" and not without and not torch.cuda.is_available():
        without = without_cuda(torch)
    if without:
        journal.skip("device loop", without)
        return journal.finish()
    with tempfile.TemporaryDirectory(prefix="txl-torch-") as folder:
        path = given.bundle or random_model(Path(folder) / "m.txl", given.quick)
        for update in txl_runtime.load(path, backend="cpu").manifest.updates:
            if update != "none":
                work = partial(check, path, given.backend, update, given.steps, given.threads)
                journal.run(f"{given.backend}, {update} memory", work)
    return journal.finish()


if __name__ == "__main__":
    sys.exit(main())
