"""Measure tokens per second and processor time per token of sessions, with one thread of the engine and with several.

    python benchmarks/serve/sessions_threads.py model.txl model4.txl model16.txl --threads 1 2

Each bundle runs with as many sessions as it has rows. First all of them decode, then all of them read a prompt. Other
work on the machine makes wall times longer, but hardly processor times; the table has both, and the machine's load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import numpy as np
import txl_runtime
from txl_runtime.sessions import Request, Sampling, Sessions

TOKENS, PROMPT = 200, 1024


def cost(model: txl_runtime.Model, requests: Sequence[Request], tokens: int) -> tuple[float, float]:
    """Run requests, each in a session of its own, to their end; return seconds and processor seconds of a token.

    `tokens` is the number of tokens of all requests together.
    """
    with Sessions(model, rows=len(requests)) as sessions:
        for request in requests:
            sessions.submit(request)
        wall, processor = time.perf_counter(), time.process_time()
        while sessions.round():
            pass
        return (time.perf_counter() - wall) / tokens, (time.process_time() - processor) / tokens


def main() -> None:
    """Read the command line, and print a row for each bundle, number of threads and kind of work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| rows | threads | work | tokens/s | µs per token | µs of processor time per token | load |")
    print("|---|---|---|---|---|---|---|")
    for bundle in options.bundles:
        for threads in options.threads:
            model = txl_runtime.load(bundle, backend="cpu", threads=threads)
            draws, rows = np.random.default_rng(0), model.batch_size
            prompts = [draws.integers(0, model.vocab_size, PROMPT) for _ in range(rows)]
            work = {
                "decode": ([Request(prompt[:1], TOKENS, Sampling(0.0)) for prompt in prompts], rows * TOKENS),
                "prompts": ([Request(prompt) for prompt in prompts], rows * PROMPT),
            }
            for name, (requests, tokens) in work.items():
                cost(model, requests, tokens)
                results = [cost(model, requests, tokens) for _ in range(options.repeats)]
                wall, processor = (statistics.median(times) * 1e6 for times in zip(*results, strict=True))
                load = os.getloadavg()[0]
                print(
                    f"| {rows} | {threads} | {name} | {1e6 / wall:,.0f} | {wall:,.0f} | {processor:,.0f} | {load:.1f} |"
                )


if __name__ == "__main__":
    main()
