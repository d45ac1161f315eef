"""Sessions on a device's stream give what each gives alone on the CPU, whenever the device does its work."""

from __future__ import annotations

import numpy as np
import pytest
from random_operations import open_case
from sessions_alone import alone, assert_same, given, run
from stand_ins.driver import FakeDriver
from txl_runtime.sessions import Request, Sampling, Sessions

SETTINGS = (Sampling(0.0), Sampling(0.7, 40), Sampling(0.7, None, 0.5), Sampling(1.0), Sampling(1.3, 5, 0.9))


def some(words: int, seed: int) -> Request:
    draws = np.random.default_rng(seed)
    sampling = SETTINGS[seed % len(SETTINGS)]
    return Request(
        draws.integers(0, words, int(draws.integers(1, 14))),
        int(draws.integers(0, 5)),
        Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed),
        top_logprobs=[None, 0, 3][seed % 3],
        score=seed % 4 == 0,
    )


@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("counting", "replace"),
        pytest.param("plain", "ring", marks=pytest.mark.slow),
        pytest.param("short", "rolled", marks=pytest.mark.slow),  # it has programs "next"
    ],
)
def test_sessions_on_a_device(make_bundle, tmp_path, name, update):
    case = open_case(name, update, make_bundle, tmp_path)
    words = case.theirs.vocab_size
    for seed in range(3):
        model = case.open(FakeDriver(seed=seed))
        queues = [[some(words, 100 * seed + 10 * number + index) for index in range(2)] for number in range(6)]
        with Sessions(model, rows=2) as sessions:
            tickets = [[sessions.submit(request, f"s{i}") for request in queue] for i, queue in enumerate(queues)]
            run(sessions)
            for queue, done in zip(queues, tickets, strict=True):
                for expected, ticket in zip(alone(case.theirs, queue), done, strict=True):
                    assert ticket.error is None
                    assert_same(given(ticket.events()), expected)
            assert sessions.counters.parked > 0
