"""Time the native step in C beside the bundle in ONNX Runtime: decode and segments of 64, full memory, in turns.

    python benchmarks/cpu/native_steps.py [--memory 640] [--threads 1 2] [--rounds 15] [--only int4 bf16] [--quick]

The script exports a random model of 12 layers, d_model 512, in fp32, int8 and int4. For each bundle it builds the
native step with keys and values in fp32, fp16 and int8, and for the fp32 bundle also with weights in bf16. All run in
one process, and are timed by the clock and by the processor time of all threads. On a machine that others use, read
the processor time of one thread. "floor" is the share of a decode step's clock time that reading the step's bytes
takes at the memory bandwidth that the same rounds measured, as `txl-deploy bench` does.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import txl_runtime
from txl_engines.native import build_native
from txl_runtime.native.opening import Cache, Weights

from benchmarks.shared.models import TINY, random_bundle, shape, weights_of
from txl_deploy.bench.floor import HostBandwidth

MODEL = shape(12, 512, 8, 64, 2048, 204)
STEPS = 20
"""The number of decode steps of a round, beside one longest segment."""
CACHES: tuple[Cache, ...] = ("fp32", "fp16", "int8")
WEIGHTS: tuple[Weights, ...] = ("fp32", "bf16", "int8", "int4")
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a number by precision, without the scales of int8 and int4."""


def bundles(folder: Path, memory: int, quick: bool) -> Iterator[tuple[str, Path, str]]:
    """Export and build what is missing in a folder; yield name, bundle and backend of each way to run the model."""
    values, longest = (TINY, 4) if quick else (MODEL, 64)
    whole = folder / f"m{memory}.txl"
    if not whole.exists():
        random_bundle(whole, values, (longest, 1), memory)
    for precision in WEIGHTS:
        path = whole if precision in ("fp32", "bf16") else folder / f"m{memory}-{precision}.txl"
        if not path.exists():
            state = weights_of(txl_runtime.load(whole))
            random_bundle(path, values, (longest, 1), memory, state=state, precision=precision)
        if precision != "bf16":
            yield f"bundle {precision}", path, "cpu"
        for cache in CACHES:
            copy = folder / f"m{memory}-{precision}-native-{cache}.txl"
            if not copy.exists():
                shutil.copytree(path, copy)
                build_native(copy, cache, bf16=precision == "bf16")
            yield f"native {precision}, K and V {cache}", copy, "native"


def step_bytes(name: str, model: txl_runtime.Model) -> float:
    """Return the bytes that a decode step reads with full memory: matrices, keys, values, position tables, softmax."""
    c, (_, precision, *more) = model.manifest.config, name.replace(",", "").split()
    cache = more[-1] if more else "fp32"
    rows, size = (model.memory_length or 0) + 1, c.n_head * c.d_head
    matrices = c.n_layer * c.d_model * (4 * size + 2 * c.d_inner)
    table = "bf16" if precision == "bf16" and cache != "int8" else cache
    head = c.vocab_size * c.d_model * BYTES["bf16" if precision == "bf16" else "fp32"]
    return matrices * BYTES[precision] + c.n_layer * rows * size * (2 * BYTES[cache] + BYTES[table]) + head


def measure(
    ways: list[tuple[str, Path, str]], threads: int, rounds: int
) -> tuple[dict[tuple[str, int], list[float]], dict[str, float]]:
    """Time all ways in turns; return the seconds of each step, and the seconds of reading a decode step's bytes.

    Seconds of steps have the keys (name of the way, length) by the clock, and (name, -length) for the processor time of
    all threads. Seconds of reading have the name of the way as their key.
    """
    models = {name: txl_runtime.load(path, backend, threads=threads) for name, path, backend in ways}
    streams, rng = {name: model.stream() for name, model in models.items()}, np.random.default_rng(0)
    first = next(iter(models.values()))
    words, longest, memory = first.vocab_size or 1, first.segment_lengths[0], first.memory_length or 0
    for stream in streams.values():
        stream.feed(rng.integers(0, words, (1, memory + longest)))
    results: dict[tuple[str, int], list[float]] = {}
    bandwidth = HostBandwidth(threads)
    for _ in range(rounds):
        bandwidth.measure()
        for name, stream in streams.items():
            for length, times in ((1, STEPS), (longest, 1)):
                for _ in range(times):
                    tokens = rng.integers(0, words, (1, length))
                    began, spent = time.perf_counter(), time.process_time()
                    stream.step(tokens)
                    clock, processor = time.perf_counter() - began, time.process_time() - spent
                    results.setdefault((name, length), []).append(clock)
                    results.setdefault((name, -length), []).append(processor)
    speed = 1e9 * (bandwidth.gb_per_second or 0)
    return results, {name: step_bytes(name, model) / speed for name, model in models.items()}


def table(found: dict[tuple[str, int], list[float]], floors: dict[str, float], threads: int) -> str:
    """Return a table of medians in ms, in brackets the ratio to the fp32 bundle's, and of each way's floor."""
    lengths = sorted({length for _, length in found}, key=lambda length: (abs(length), -length))
    names = list(dict.fromkeys(name for name, _ in found))
    medians = {key: statistics.median(values) * 1e3 for key, values in found.items()}
    heads = [f"L {abs(length)}, {'clock' if length > 0 else 'processor'}" for length in lengths]
    heads.append("floor")
    lines = [f"| {threads} thread{'s' * (threads > 1)} | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for name in names:
        cells = [f"{medians[name, n]:.2f} ({medians[name, n] / medians[names[0], n]:.2f})" for n in lengths]
        cells.append(f"{floors[name] * 1e3 / medians[name, 1]:.0%}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Read the command line, build all ways, and print a table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=int, default=640)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder that keeps the bundles")
    parser.add_argument("--only", nargs="+", default=[], help="ways whose names hold one of these, besides the first")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: measures nothing")
    options = parser.parse_args()
    memory, rounds = (6, 2) if options.quick else (options.memory, options.rounds)
    with tempfile.TemporaryDirectory() as place:
        folder = options.out or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        first, *others = bundles(folder, memory, options.quick)
        wanted = options.only or [""]
        ways = [first, *(way for way in others if any(part in way[0] for part in wanted))]
        for threads in options.threads:
            print(table(*measure(ways, threads, rounds), threads) + "\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
