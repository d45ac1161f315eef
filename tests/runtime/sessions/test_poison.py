"""Nothing of one session reaches another: memory that is marked, memory of NaN; `test_property.py` has random ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_sessions import bits
from txl_runtime import BackendError, load
from txl_runtime.sessions import Limits, Prompt, Request, Sampling, Sessions
from txl_runtime.sessions.state import SessionState
from txl_runtime.streaming.state import RowState

ROWS = 3


@pytest.fixture(scope="module")
def models(transformer):
    return {update: load(transformer, "cpu", 1, update=update) for update in ("ring", "rolled")}


updates = pytest.mark.parametrize("update", ["ring", "rolled"])


def open_sessions(model) -> Sessions:
    return Sessions(model, ROWS, Limits(idle_seconds=1e9))


def marked(model, number: float, fill: int = 6) -> SessionState:
    """A state whose memory is one number, wherever one looks."""
    table, manifest = model.manifest.states_of(model.update), model.manifest
    rows = {state.name: np.full((fill, *state.row_shape), number, np.float32) for state in table}
    return SessionState.of(RowState(fill, 3, rows), manifest, table, None, fill)


def whole_memory(sessions: Sessions) -> np.ndarray:
    """Every number that the stream's memory holds."""
    (memory,) = sessions._rows._stream.loop.placements
    arrays = [memory.all] if hasattr(memory, "all") else [array for side in memory.sides for array in side.values()]
    return np.concatenate([array.ravel() for array in arrays])


@updates
def test_marked_memory_comes_back_as_it_was(models, tmp_path, update):
    """Through rows, host memory and a checkpoint."""
    model, count = models[update], 30
    states = {f"s{number}": marked(model, number + 1000, number % 7) for number in range(count)}
    sessions = open_sessions(model)
    for name, state in states.items():
        sessions.put(name, state)
    assert sessions.host_bytes
    for name in states:  # each comes to a row and is taken from it; what was fed is forgotten again
        sessions.submit(Request([1]), name)
        sessions.round()
        sessions.put(name, states[name])
    sessions.save(tmp_path / "saved")
    again = open_sessions(model)
    assert again.restore(tmp_path / "saved") == {}
    for name, state in states.items():
        assert bits(sessions.take(name)) == bits(again.take(name)) == bits(state)
    for opened in (sessions, again):
        opened.shut()


@updates
def test_rows_of_sessions_that_end_are_cleared(models, update):
    """A session that is closed, or that ends with its request, leaves nothing in the stream's memory."""
    model = models[update]
    sessions = open_sessions(model)
    for number in range(ROWS):
        sessions.put(f"s{number}", marked(model, 4242.0))
        sessions.submit(Request([1, 2]), f"s{number}")
    while sessions.round():
        pass
    assert (whole_memory(sessions) == 4242.0).any()
    for number in range(ROWS):
        sessions.close(f"s{number}")
    assert not whole_memory(sessions).any()
    ticket = sessions.submit(Request([1, 2, 3], 2))
    while sessions.round():
        pass
    assert ticket.done
    assert not whole_memory(sessions).any()
    sessions.shut()


@updates
def test_memory_of_nan_ends_its_own_session_and_no_other(models, update):
    model, draws = models[update], np.random.default_rng(0)
    requests = [
        Request(draws.integers(0, 41, draws.integers(1, 12)), 5, Sampling(seed=number), top_logprobs=2, score=True)
        for number in range(24)
    ]

    def outcome(poisoned: bool) -> list[Any]:
        sessions, found = open_sessions(model), []
        for turn in range(3):
            tickets = []
            for number, request in enumerate(requests[turn * 8 : turn * 8 + 8]):
                tickets.append(sessions.submit(request, f"s{number}"))
                if poisoned:
                    sessions.put(f"poison {number}", marked(model, np.nan))
                    tickets.append(sessions.submit(request, f"poison {number}"))
            while sessions.round():
                pass
            for ticket in tickets:
                if ticket.session.startswith("poison"):
                    assert isinstance(ticket.error, BackendError)
                    assert "produced NaN" in str(ticket.error)
                    assert ticket.session in str(ticket.error)
                    assert ticket.session not in sessions
                else:
                    assert ticket.error is None
                    found.append([shown(event) for event in ticket.events()])
        assert np.isfinite(whole_memory(sessions)).all()
        found.append([bits(sessions.take(f"s{number}")) for number in range(8)])
        sessions.shut()
        return found

    with np.errstate(invalid="ignore"):
        assert outcome(poisoned=True) == outcome(poisoned=False)


def shown(event: Any) -> Any:
    """An event, so that it can be compared."""
    if isinstance(event, Prompt):
        return event.first, event.logprobs.tolist(), event.top_ids.tolist(), event.top_logprobs.tolist()
    return event
