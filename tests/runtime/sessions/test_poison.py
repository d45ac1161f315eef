"""Nothing of one session reaches another: memory that shows what was fed, memory that is marked, memory of NaN.

TXL_SESSIONS_OPERATIONS says how many operations the random ones do.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from random_sessions import bits
from step_models import VOCABULARY, counting
from txl_runtime import BackendError, load
from txl_runtime.sessions import Limits, Prompt, Request, Sampling, Sessions, Ticket
from txl_runtime.sessions.checkpoint import Checkpoint
from txl_runtime.sessions.state import SessionState, largest_state
from txl_runtime.streaming.state import RowState

OPERATIONS = int(os.environ.get("TXL_SESSIONS_OPERATIONS", "400"))
ROWS, NAMES = 3, 60


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    """A model whose memory is how often it has seen each token."""
    return load(counting().write(tmp_path_factory.mktemp("counting") / "bundle"), "cpu", 1)


@pytest.fixture(scope="module")
def models(transformer):
    return {update: load(transformer, "cpu", 1, update=update) for update in ("ring", "rolled")}


updates = pytest.mark.parametrize("update", ["ring", "rolled"])


def open_sessions(model, folder, rows=ROWS, **limits) -> Sessions:
    """Most of its sessions have to go to the disk."""
    nbytes = largest_state(model.manifest, model.manifest.states_of(model.update))
    kept = {"host_bytes": 10 * nbytes, "disk_bytes": 10**9, "idle_seconds": 1e9, **limits}
    return Sessions(model, rows, Limits(**kept), folder)


def counts(state: SessionState) -> Counter[int]:
    """How often a session's memory has seen each token; whatever else stands there is nobody's count."""
    seen = state.state.states["seen"][0].astype(np.float64) - np.linspace(0, 1, VOCABULARY, dtype=np.float32)
    whole = np.round(seen).astype(int)
    np.testing.assert_allclose(seen, whole, atol=1e-4)
    assert (whole >= 0).all()
    return Counter({token: count for token, count in enumerate(whole.tolist()) if count})


@dataclass
class Fed:
    """What a session was fed, and the token that it feeds next."""

    memory: Counter[int] = field(default_factory=Counter)
    pending: int | None = None

    def hear(self, ticket: Ticket, tokens: list[int]) -> None:
        """A request has ended."""
        *events, end = ticket.events()
        given = [*([] if self.pending is None else [self.pending]), *tokens, *(event.id for event in events)]
        self.memory.update(given[: end.fed])
        if end.fed:
            self.pending = given[end.fed] if events else None


@pytest.mark.slow
def test_a_memory_of_counts_holds_what_its_session_was_fed_and_nothing_else(counter, tmp_path):
    """Prompts, draws, cancels, parking, the disk, states out and in, closing, restarts; each is compared at once."""
    draws, fed, running, looked = np.random.default_rng(0), dict[str, Fed](), list[Any](), 0
    sessions, checkpoint = open_sessions(counter, tmp_path / "parked"), Checkpoint(tmp_path, counter.manifest.model_id)

    def listen() -> list[Any]:
        left = []
        for name, ticket, tokens in running:
            if not ticket.done or name in {other for other, *_ in left} - {None}:
                left.append((name, ticket, tokens))
            elif name is not None:
                fed[name].hear(ticket, tokens)
        return left

    for _ in range(OPERATIONS * 2):
        chance, name = draws.random(), f"session {draws.integers(NAMES)}"
        busy = {asked for asked, *_ in running}
        if chance < 0.4:
            tokens, who = draws.integers(0, VOCABULARY, draws.integers(1, 15)).tolist(), name
            if draws.random() < 0.1:
                who = None
            request = Request(tokens, int(draws.integers(0, 6)), Sampling(seed=int(draws.integers(100))))
            running.append((who, sessions.submit(request, who), tokens))
            fed.setdefault(name, Fed())
        elif chance < 0.85:
            for _ in range(int(draws.integers(1, 20))):
                sessions.round()
        elif chance < 0.88 and running:
            running[int(draws.integers(len(running)))][1].cancel()
        elif chance < 0.91 and name in sessions and name not in busy:
            sessions.close(name)
            del fed[name]
        elif chance < 0.94 and name in sessions and name not in busy:
            other = f"session {draws.integers(NAMES)}"
            if other not in busy:
                sessions.put(other, SessionState.from_bytes(sessions.take(name).to_bytes()))
                fed[other] = Fed(fed[name].memory.copy(), fed[name].pending)
        elif chance < 0.95:
            while sessions.round():
                pass
            running = listen()
            checkpoint.save(sessions)
            sessions.shut()
            sessions = open_sessions(counter, tmp_path / "parked")
            assert checkpoint.restore(sessions) == {}
        running = listen()
        idle = sorted(set(sessions.names()) - {asked for asked, *_ in running})
        for one in draws.choice(idle, min(3, len(idle)), replace=False).tolist() if idle else ():
            state = sessions.take(one)
            assert counts(state) == fed[one].memory, one
            assert state.pending == fed[one].pending
            looked += 1
    assert looked > OPERATIONS // 2
    print(f"{looked} memories looked at, {sessions.counters}")
    sessions.shut()
    checkpoint.close()


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
    """Through rows, host memory, the disk and a checkpoint."""
    model, count = models[update], 30
    states = {f"s{number}": marked(model, number + 1000, number % 7) for number in range(count)}
    sessions = open_sessions(model, tmp_path / "parked")
    for name, state in states.items():
        sessions.put(name, state)
    assert sessions.disk_bytes
    assert sessions.host_bytes
    for name in states:  # each comes to a row and is taken from it; what was fed is forgotten again
        sessions.submit(Request([1]), name)
        sessions.round()
        sessions.put(name, states[name])
    sessions.save(tmp_path / "saved")
    again = open_sessions(model, tmp_path / "again")
    assert again.restore(tmp_path / "saved") == {}
    for name, state in states.items():
        assert bits(sessions.take(name)) == bits(again.take(name)) == bits(state)
    for opened in (sessions, again):
        opened.shut()


@updates
def test_rows_of_sessions_that_end_are_cleared(models, tmp_path, update):
    """A session that is closed, or that ends with its request, leaves nothing in the stream's memory."""
    model = models[update]
    sessions = open_sessions(model, tmp_path / "parked")
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
def test_memory_of_nan_ends_its_own_session_and_no_other(models, tmp_path, update):
    model, draws = models[update], np.random.default_rng(0)
    requests = [
        Request(draws.integers(0, 41, draws.integers(1, 12)), 5, Sampling(seed=number), top_logprobs=2, score=True)
        for number in range(24)
    ]

    def outcome(poisoned: bool) -> list[Any]:
        sessions, found = open_sessions(model, tmp_path / f"parked {poisoned}"), []
        for turn in range(3):
            tickets = []
            for number, request in enumerate(requests[turn * 8 : turn * 8 + 8]):
                tickets.append(sessions.submit(request, f"s{number}"))
                if poisoned:
                    sessions.put(f"poison {number}", marked(model, np.nan))
                    poison = sessions.submit(replace(request, seconds=None), f"poison {number}")
                    tickets.append(poison)
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
