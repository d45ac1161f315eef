"""Measure by how much writing a checkpoint of sessions slows the sessions that decode at the same time.

    python benchmarks/serve/checkpoint_pause.py BUNDLE --sessions 64

The script prints the milliseconds to copy one session's state, the milliseconds to write a checkpoint, and the
milliseconds of a round of decoding while a checkpoint is written and while none is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from txl_runtime import load
from txl_runtime.sessions import AsyncSessions, Limits, Request, Sampling, Sessions
from txl_runtime.sessions.asynchronous import save_beside
from txl_runtime.sessions.checkpoint import Checkpoint


def main() -> None:
    """Read the command line, measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    options = parser.parse_args()
    model = load(options.bundle, "cpu", 1)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as place,
        Sessions(model, limits=Limits(waiting=4096)) as sessions,
    ):
        print(
            json.dumps(
                asyncio.run(_measured(sessions, options.sessions, Path(place), model.manifest.model_id)), indent=1
            )
        )


async def _measured(sessions: Sessions, count: int, folder: Path, model_id: str) -> dict[str, Any]:
    draws, positions = np.random.default_rng(0), 2 * (sessions._model.memory_length or 64)
    took: list[float] = []
    run = sessions.round

    def timed() -> bool:
        started = time.perf_counter()
        busy = run()
        took.append(time.perf_counter() - started)
        return busy

    def copied(core: Sessions) -> list[float]:
        results = []
        for name in core.names():
            started = time.perf_counter()
            core.take(name)
            results.append(time.perf_counter() - started)
        return results

    sessions.round = timed  # type: ignore[method-assign]
    vocabulary = sessions._model.vocab_size or 2
    with Checkpoint(folder, model_id) as checkpoint:
        async with AsyncSessions(sessions) as front:

            async def ask(name: str, new: int) -> None:
                tokens = draws.integers(0, vocabulary, positions if not new else 1)
                async for _ in front.run(Request(tokens, new, Sampling(seed=1)), name):
                    pass

            await asyncio.gather(*(ask(f"s{number}", 0) for number in range(count)))
            copies = await front.call(copied)
            nbytes = (await front.call(lambda core: core.info("s0"))).nbytes
            decoding = asyncio.gather(*(ask(f"s{number}", 200) for number in range(count)))
            await asyncio.sleep(1)
            took.clear()
            await asyncio.sleep(3)
            alone, started = sorted(took), time.perf_counter()
            took.clear()
            written, saves = 0, 0
            while time.perf_counter() - started < 3:
                written, saves = written + await save_beside(front, checkpoint), saves + 1
            beside, seconds = sorted(took), time.perf_counter() - started
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)
    return {
        "sessions": count,
        "bytes of a state": nbytes,
        "ms to copy one": _spread([1000 * one for one in sorted(copies)]),
        "checkpoints": saves,
        "states written in each": written / saves,
        "ms for a checkpoint": 1000 * seconds / saves,
        "rounds per second alone": len(alone) / 3,
        "rounds per second beside": len(beside) / seconds,
        "ms of a round alone": _spread([1000 * one for one in alone]),
        "ms of a round beside": _spread([1000 * one for one in beside]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": values[len(values) // 2], "p99": values[int(len(values) * 0.99)], "most": values[-1]}


if __name__ == "__main__":
    main()
