"""Time a token by the longest segment of its bundle: a ring has M + 2 L slots, and every step reads all of them.

    python benchmarks/cpu/segment_lengths.py [--only NAME …] [--longest 64 16] [--threads 1]

Each model is exported with the segment lengths L and 1 for each L of --longest, and with only 1, which has M + 1 slots.
The bundles run in turns in one process, with full memory. The first bundle is opened twice, which shows the noise. The
work "token" is one token, and "prompt" is 64 tokens in segments of length L. The times are processor time, and each
ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import txl_runtime
from txl_runtime.model import Model
from txl_runtime.streaming.stream import Stream

from benchmarks.shared.models import TINY, random_bundle, random_tokens, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log

SMALL, LARGE = shape(4, 192, 6, 32, 768, 256), shape(12, 512, 8, 64, 2048, 204)
MODELS: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "small": (SMALL, 128, 1, "fp32"),
    "small-b16": (SMALL, 128, 16, "fp32"),
    "m160": (LARGE, 160, 1, "fp32"),
    "m160-int8": (LARGE, 160, 1, "int8"),
    "m640": (LARGE, 640, 1, "fp32"),
    "m640-int8": (LARGE, 640, 1, "int8"),
}
"""The models by name: shape, M, B and precision."""
PROMPT = 64


def measure(models: dict[str, Model], sequences: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Time one token and a prompt with every bundle, in turns; return the ms of each round by work and bundle.

    For example, {"token": {"L 64": [3.1, 3.2]}}. `sequences` is the number of sequences that run.
    """
    streams: dict[str, Stream] = {name: model.stream(batch_size=sequences) for name, model in models.items()}
    first = next(iter(models.values()))
    prompt = random_tokens(first.manifest.config.vocab_size, (sequences, PROMPT))
    for stream in streams.values():
        for _ in range(first.manifest.memory_length // PROMPT + 1):
            stream.feed(prompt, last=True)
    works = {"token": prompt[:, :1], "prompt": prompt}
    results: dict[str, dict[str, list[float]]] = {work: {name: [] for name in models} for work in works}
    for work, tokens in works.items():
        for turn in range(rounds if work == "token" else max(3, rounds // 8)):
            for name in list(models)[:: 1 if turn % 2 else -1]:
                streams[name].feed(tokens, last=True)  # not timed; it fills the caches with this bundle's weights
                began = time.process_time()
                streams[name].feed(tokens, last=True)
                results[work][name].append((time.process_time() - began) * 1e3)
    return results


def main() -> None:
    """Read the command line, export and time every model, and print the table."""
    option_parser = parser(__doc__, seconds=None, several_threads=False)
    option_parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    option_parser.add_argument("--longest", type=int, nargs="+", default=[64, 16], metavar="L", help="default 64 16")
    option_parser.add_argument("--rounds", type=int, default=60)
    options = option_parser.parse_args()
    rows, every = [], {}
    for name in options.only:
        values, memory, batch, precision = (TINY, 16, 2, "fp32") if options.quick else MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            models: dict[str, Model] = {}
            for longest in (*options.longest, 1):
                path = random_bundle(
                    Path(folder, str(longest)),
                    values,
                    sorted({longest, 1}),
                    memory,
                    batch_size=batch,
                    precision=precision,
                )
                models[f"L {longest}"] = txl_runtime.load(path, threads=options.threads)
                if len(models) == 1:
                    models[f"L {longest} again"] = txl_runtime.load(path, threads=options.threads)
            for sequences in sorted({1, batch}):
                log(f"{name}, {sequences} of {batch} sequences")
                result = measure(models, sequences, 2 if options.quick else options.rounds)
                every[f"{name}, {sequences}"] = result
                for work, times in result.items():
                    base = next(iter(times.values()))
                    ratios = [statistics.median(np.divide(of, base).tolist()) for of in times.values()]
                    shown = [f"{ratio:.2f}" for ratio in ratios[1:]]
                    rows.append((name, str(sequences), work, f"{statistics.median(base):.2f}", *shown))
            columns = ("model", "sequences", "work", f"L {options.longest[0]}, ms", *list(models)[1:])
    finish("segment_lengths", options, [Table(columns, rows)], every)


if __name__ == "__main__":
    main()
