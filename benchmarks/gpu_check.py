"""Everything the GPU of this machine can run of a bundle: built, verified and timed against PyTorch on the same GPU.

    python benchmarks/gpu_check.py [--quick] [--bundle BUNDLE] [--batch 1 8 32] [--seconds 2] [--out FOLDER]

Competitors are PyTorch eager and torch.compile in mode reduce-overhead (CUDA graphs), both with K/V memory and with
everything folded that does not depend on the input. Engines are built where their library is installed. Where there is
no GPU it says so, writes a page that says so, and ends with 0.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import txl_runtime
from common import TINY, Table, finish, log, parser, random_bundle, shape
from gpu_competitors import TorchOnGpu
from txl_engines import build_bundle
from txl_engines.recording import record_pass
from txl_export.verifying import verify
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.choosing import DEVICES, NO_GPU, missing
from txl_runtime.device.gpu import gpu_name
from txl_runtime.errors import TxlError
from txl_runtime.model import Model
from txl_runtime.selftest import run_selftest

MODEL = shape(12, 512, 8, 64, 2048, 204)
MEMORY, LENGTH, BATCHES = 640, 64, [1, 8, 32]
COMPETITORS = {False: "torch eager", True: "torch.compile, CUDA graphs"}
COLUMNS = ("B", "engine", "self-test", "verify", "decode ms p50", "p90", "tokens/s", "score ms p50", "p90", "tokens/s")


@dataclass
class Result:
    """One engine at one batch size. Times in milliseconds: a decode step of one token, a scored segment.

    Attributes:
        selftest, verified: "passed", "FAILED", or why there is none.
        decode, score: median and 90th percentile; None where it did not run.
        recorded: which programs are CUDA graphs, or why not.
    """

    batch_size: int
    engine: str
    description: str = ""
    selftest: str = "–"
    verified: str = "–"
    decode: tuple[float, float] | None = None
    score: tuple[float, float] | None = None
    recorded: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def timed(work: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Median and 90th percentile of a call, in milliseconds, after five calls to warm up; its result is on the host."""
    for _ in range(5):
        work()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 10:
        started = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - started))
    return median(found), sorted(found)[int(0.9 * len(found))]


def time_model(model: Model, result: Result, seconds: float) -> None:
    """Decode and scoring with full memory."""
    stream, draws = model.stream(), np.random.default_rng(0)
    length, batch = model.segment_lengths[0], model.batch_size
    tokens = draws.integers(0, model.manifest.vocab_size, (batch, length + 1)).astype(np.int32)
    while int(stream.fill.min()) < model.manifest.memory_length:
        stream.feed(tokens[:, :length])
    one = tokens[:, :1]
    result.decode = timed(lambda: stream.step(one), seconds)
    result.score = timed(lambda: stream.score(tokens), seconds)
    result.recorded = dict(getattr(stream.loop, "recorded", {}))


def run_engine(path: Path, name: str, segments: int, seconds: float) -> Result:
    """Build, self-test, verify, time."""
    batch = open_bundle(path, verify_files=False).manifest.batch_size
    result = Result(batch, name)
    try:
        log(f"B {batch}: building {name} engines")
        build_bundle(path, name)
        model = txl_runtime.load(path, backend=name)
        result.description = model.backend.description
        log(f"B {batch}: {result.description}")
        tested = run_selftest(model)
        result.selftest = "passed" if tested.passed else "FAILED"
        if tested.passed:
            record_pass(model)
        parity = verify(path, segments=segments, backend=name)
        result.verified = "passed" if parity.passed else "FAILED"
        time_model(model, result, seconds)
    except TxlError as error:
        result.problem = str(error)
        log(f"B {batch}: {name}: {error}")
    return result


def run_torch(path: Path, compiled: bool, seconds: float, device: str = "cuda") -> Result:
    """PyTorch on the GPU with the bundle's weights."""
    model = txl_runtime.load(path, backend="cpu", lean=True)
    batch, length = model.batch_size, model.segment_lengths[0]
    result = Result(batch, COMPETITORS[compiled], f"PyTorch {torch.__version__}")
    log(f"B {batch}: {result.engine}")
    try:
        competitor = TorchOnGpu(model, compiled, device)
        tokens = np.random.default_rng(0).integers(0, model.manifest.vocab_size, (batch, length + 1)).astype(np.int32)
        competitor.fill(tokens)
        result.decode = timed(lambda: competitor.logprobs(tokens[:, :1]), seconds)
        result.score = timed(lambda: competitor.score(tokens), seconds)
    except (RuntimeError, TxlError) as error:  # of PyTorch, its compiler or CUDA
        result.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        log(f"B {batch}: {result.engine}: {result.problem}")
    return result


def rows(results: list[Result], length: int) -> Table:
    """The page."""
    table = Table(COLUMNS)
    for item in results:
        times: list[object] = []
        for found, tokens in ((item.decode, item.batch_size), (item.score, item.batch_size * length)):
            times += [None] * 3 if found is None else [*found, tokens / found[0] * 1e3]
        table.add(item.batch_size, item.engine, item.selftest, item.verified, *times)
    return table


def main() -> int:
    """Run it."""
    options = parser(__doc__, seconds=2.0)
    options.add_argument("--bundle", type=Path, help="take this bundle, with its own B, instead of random models")
    options.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="of the random models (default 1 8 32)")
    options.add_argument("--segments", type=int, default=60, help="of the verification's longest chain (default 60)")
    given = options.parse_args()
    gpu, results, notes = gpu_name(), [], Table(("what is left out, and why",))
    if gpu is None:
        notes.add(NO_GPU)
    else:
        with tempfile.TemporaryDirectory(prefix="txl-gpu-") as folder:
            for path in bundles(given, Path(folder)):
                results += run_all(path, given.segments, given.seconds, notes)
    for item in results:
        if item.problem:
            notes.add(f"{item.engine}, B {item.batch_size}: {item.problem}")
    ran = sum(item.decode is not None for item in results)
    table = rows(results, 4 if given.quick else LENGTH)
    table.title = f"{gpu or 'no GPU'}: {ran} run"
    document = {"gpu": gpu, "run": ran, "engines": results, "left_out": [row[0] for row in notes.rows]}
    finish("gpu_check", given, [table, notes] if notes.rows else [table], document)
    return int(any("FAILED" in (item.selftest, item.verified) for item in results))


def bundles(given: Any, folder: Path) -> list[Path]:
    """The bundles to check: one per batch size, of fp32, so that all are held to the same rung of the ladder."""
    if given.bundle is not None:
        return [Path(given.bundle)]
    values, length, memory = (TINY, 4, 12) if given.quick else (MODEL, LENGTH, MEMORY)
    return [
        random_bundle(folder / f"b{batch}.txl", values, (length, 1), memory, batch_size=batch)
        for batch in ([2] if given.quick else given.batch)
    ]


def run_all(path: Path, segments: int, seconds: float, notes: Table) -> list[Result]:
    """All that runs of one bundle, and PyTorch."""
    found = []
    for name in reversed(DEVICES):
        reason = missing(name, open_bundle(path, verify_files=False), built=True)
        if reason:
            notes.add(f"{name}: {reason}")
            continue
        found.append(run_engine(path, name, segments, seconds))
    if torch.cuda.is_available():
        found += [run_torch(path, compiled, seconds) for compiled in (False, True)]
    else:
        notes.add("PyTorch was built without CUDA: nothing to compare with")
    return found


if __name__ == "__main__":
    sys.exit(main())
