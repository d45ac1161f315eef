"""A model may be shared by threads, each with a stream of its own: the same bits as one after the other."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from txl_runtime import Model, load

B, V, ROUNDS = 3, 41, 40


def work(model: Model, worker: int, start: threading.Barrier | None = None) -> list[bytes]:
    """Do one thread's work, of every kind; returns all results and the state at the end, as bytes."""
    draws = np.random.default_rng(worker)
    stream = model.stream(1 + worker % model.batch_size)
    rows = stream.batch_size
    if start is not None:
        start.wait(timeout=60)
    found = []
    for round_ in range(ROUNDS):
        tokens = draws.integers(0, V, (rows, int(draws.integers(1, 12))))
        found.append(stream.feed(tokens).tobytes())
        found.append(stream.score(tokens).tobytes())
        if round_ % 8 == worker:
            found.extend(token.tobytes() for token in stream.generate(tokens, 6, seed=worker))
        if round_ % 10 == worker:
            stream.reset(rows=[0])
    state = stream.snapshot()
    return [*found, state.fill.tobytes(), *(part.tobytes() for part in state.memory.values())]


@pytest.mark.parametrize(("name", "workers"), [("ring", 4), ("hidden", 2)])
def test_streams_in_threads_compute_what_they_compute_alone(name, workers):
    path = frozen(name)
    alone = load(path)
    expected = [work(alone, worker) for worker in range(workers)]
    assert len({tuple(results) for results in expected}) == workers, "the threads should do different things"
    shared, start = load(path), threading.Barrier(workers)  # nothing is open yet: the first use is shared too
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work, shared, worker, start) for worker in range(workers)]
        found = [future.result(timeout=120) for future in running]
    assert found == expected


def test_a_stream_may_be_handed_from_thread_to_thread():
    model = load(frozen("ring"))
    tokens = np.random.default_rng(0).integers(0, V, (6, B, 5))
    here = model.stream()
    expected = [here.feed(part).tobytes() for part in tokens]
    handed = model.stream()
    found = []
    for part in tokens:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(handed.feed, part).result(timeout=60).tobytes())
    assert found == expected


def test_a_stream_that_is_dropped_while_its_call_runs_elsewhere_finishes_it_and_goes():
    model = load(frozen("ring"))
    tokens = np.random.default_rng(0).integers(0, V, (B, 4000))
    expected, other = model.stream().feed(tokens).tobytes(), model.stream()
    for _ in range(2):
        stream = model.stream()
        inside, run = threading.Event(), stream.loop.run

        def running(*arguments: Any, inside: threading.Event = inside, run: Any = run, **options: Any) -> Any:
            inside.set()
            return run(*arguments, **options)

        stream.loop.run = running  # type: ignore[method-assign]
        there = weakref.ref(stream)
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(stream.feed, tokens)
            assert inside.wait(60)
            del stream, running, run
            gc.collect()
            other.feed(tokens[:, :4])  # the model is nobody's alone
            assert going.result(timeout=60).tobytes() == expected
        del going
        gc.collect()
        assert there() is None
