"""Random operations on sessions, and each session alone on one stream beside them: what one says, the other has to.

A session alone is fed what the sessions say that they fed, and the tokens that they drew. So a draw that rounding
decided changes nothing that comes after it, and everything is compared to the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from plain_draws import by_the_whole
from txl_runtime import Model, UsageError
from txl_runtime.ladder import limit_of
from txl_runtime.sessions import Busy, Finished, Limits, Prompt, Request, Sampling, Sessions, Ticket, Token
from txl_runtime.sessions.checkpoint import Checkpoint
from txl_runtime.sessions.state import SessionState

CLOSE = 1e-4
GREEDY = Sampling(temperature=0.0)


@dataclass
class Alone:
    """One session on a stream of its own.

    Attributes:
        pending: the token that is fed next.
        seen: positions that were fed.
    """

    model: Model
    pending: int | None = None
    seen: int = 0

    def __post_init__(self) -> None:
        self.stream = self.model.stream(1)

    def feed(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities [T, V] after each token."""
        self.seen += len(tokens)
        return self.stream.feed(np.array([tokens], np.int32))[0] if tokens else np.zeros((0, self.model.vocab_size))

    def copy(self) -> Alone:
        """Another session in the same state."""
        other = Alone(self.model, self.pending, self.seen)
        other.stream.restore(self.stream.snapshot())
        return other


@dataclass
class Asked:
    """A request that was submitted, and what came of it so far."""

    name: str | None
    request: Request
    ticket: Ticket
    drawn: list[Token] = field(default_factory=list)
    prompt: list[Prompt] = field(default_factory=list)
    end: Finished | None = None


@dataclass
class Report:
    """The counts of what was done, and the ties."""

    operations: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    ties: int = 0
    compared: int = 0
    furthest: float = 0.0
    parked: int = 0
    restarts: int = 0
    expired: int = 0

    def near(self, found: Any, wanted: Any, what: str) -> None:
        """Compare numbers."""
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        assert found.shape == wanted.shape, f"{what}: {found.shape}, expected {wanted.shape}"
        assert np.isfinite(found).all(), what
        error = float(np.abs(found - wanted).max(initial=0) / max(1.0, float(np.abs(wanted).max(initial=0))))
        self.furthest = max(self.furthest, error)
        self.compared += found.size
        assert error <= CLOSE, f"{what}: off by {error}"


class Game:
    """Random operations.

    Args:
        model: of tokens.
        rows: of the sessions' stream.
        folder: for checkpoints.
        seed: of all draws.
        names: how many sessions there are at a time, most of them named.
    """

    OPERATIONS: ClassVar = {
        "submit": 30,
        "burst": 4,
        "anonymous": 6,
        "rounds": 40,
        "cancel": 6,
        "look": 6,
        "move": 4,
        "close": 2,
        "expire": 1,
        "checkpoint": 1,
        "restart": 1,
    }

    def __init__(self, model: Model, rows: int, folder: Path, seed: int, names: int = 200) -> None:
        self.model, self.rows, self.folder, self.count = model, rows, folder, names
        self.draws, self.now, self.report = np.random.default_rng(seed), 0.0, Report()
        self.alone: dict[str, Alone] = {}
        self.asked: list[Asked] = []
        self.limits = Limits(sessions=2 * names, idle_seconds=1000.0)
        self.sessions = self.open()
        self.checkpoint = Checkpoint(folder / "saved", model.manifest.model_id)

    def open(self) -> Sessions:
        return Sessions(self.model, self.rows, self.limits, clock=lambda: self.now)

    def go(self, operations: int) -> Report:
        """Do `operations` things, then finish everything."""
        names, weights = list(self.OPERATIONS), np.array(list(self.OPERATIONS.values()))
        for number in range(operations):
            name = "expire" if number == operations // 2 else str(self.draws.choice(names, p=weights / weights.sum()))
            self.report.operations[name] = self.report.operations.get(name, 0) + 1
            getattr(self, f"do_{name}")()
            self.now += 1.0
        self.finish()
        for name in list(self.alone):
            self.compare_state(name)
        self.checkpoint.close()
        return self.report

    def number(self, first: int, last: int) -> int:
        """A draw from first … last."""
        return int(self.draws.integers(first, last + 1))

    def one(self, values: Any) -> Any:
        """One of them."""
        values = list(values)
        return values[self.number(0, len(values) - 1)]

    # --- requests -------------------------------------------------------------------------------------------------

    def request(self) -> Request:
        draws, vocabulary = self.draws, self.model.vocab_size
        length = int(self.one([0, 1, 1, 2, 3, self.number(4, 30)]))
        new = int(self.one([0, 1, 3, self.number(4, 12)]))
        sampling = GREEDY
        if draws.random() < 0.4:
            sampling = Sampling(
                temperature=float(self.one([0.5, 1.0, 1.7])),
                top_k=self.one([None, 5]),
                top_p=self.one([None, 0.9]),
                seed=self.number(0, 10**6),
            )
        return Request(
            tokens=draws.integers(0, vocabulary, length),
            max_new_tokens=new,
            sampling=sampling,
            stop_tokens=[self.number(0, vocabulary - 1)] if draws.random() < 0.2 else (),
            top_logprobs=self.one([None, 0, 3]),
            score=bool(draws.random() < 0.3),
            seconds=self.one([None, None, None, 2.5, 20.0]),
            memory_length=self.one([None, None, None, self.number(0, self.model.memory_length or 0)])
            if self.model.memory_length is not None
            else None,
        )

    def submit(self, name: str | None) -> None:
        request = self.request()
        try:
            ticket = self.sessions.submit(request, name)
        except Busy:
            self.report.requests["busy"] = self.report.requests.get("busy", 0) + 1
            return
        except UsageError:
            if len(request.tokens):  # else there is nothing to feed
                raise
            return
        self.asked.append(Asked(name, request, ticket))

    def do_submit(self) -> None:
        self.submit(f"session {self.number(0, self.count - 1)}")

    def do_burst(self) -> None:
        for _ in range(15):
            self.do_submit()

    def do_anonymous(self) -> None:
        self.submit(None)

    def do_rounds(self) -> None:
        for _ in range(self.number(1, 40)):
            self.sessions.round()
        self.listen()

    def do_cancel(self) -> None:
        running = [asked for asked in self.asked if asked.end is None]
        if running:
            self.one(running).ticket.cancel()
            self.listen()

    def finish(self) -> None:
        while self.sessions.round():
            pass
        self.listen()
        assert not self.asked

    def listen(self) -> None:
        """Hear what came, and compare what is finished, in the order in which sessions were asked."""
        for name in set(self.alone) - set(self.sessions.names()):  # every round looks for those that nobody used
            assert name not in {asked.name for asked in self.asked}
            del self.alone[name]
            self.report.expired += 1
        for asked in self.asked:
            self.hear(asked)
        left, waiting = [], set()
        for asked in self.asked:
            if asked.end is None or asked.name in waiting:
                left.append(asked)
                waiting |= {asked.name} - {None}
            else:
                self.judge(asked)
        self.asked = left

    @staticmethod
    def hear(asked: Asked) -> None:
        for event in asked.ticket.events():
            assert asked.end is None
            if isinstance(event, Token):
                asked.drawn.append(event)
            elif isinstance(event, Prompt):
                asked.prompt.append(event)
            else:
                assert isinstance(event, Finished), event
                asked.end = event

    def judge(self, asked: Asked) -> None:
        """Do the same with the session alone."""
        assert asked.end is not None
        reasons = self.report.requests
        reasons[asked.end.reason] = reasons.get(asked.end.reason, 0) + 1
        alone = Alone(self.model) if asked.name is None else self.alone.setdefault(asked.name, Alone(self.model))
        if asked.end.reason == "error":  # it waited for a token to begin with, and the request before it left none
            assert isinstance(asked.ticket.error, UsageError), asked.ticket.error
            assert "no tokens and its session none" in str(asked.ticket.error)
            assert not len(asked.request.tokens)
            assert alone.pending is None
            assert asked.end.fed == 0
        else:
            assert asked.ticket.error is None
        self.replay(asked, alone, asked.end.fed)
        request, drawn = asked.request, [token.id for token in asked.drawn]
        if asked.end.reason == "length":
            assert len(drawn) == request.max_new_tokens
        if asked.end.reason == "stop":
            assert drawn[-1] in request.stop_tokens
        assert not set(drawn[:-1]) & set(request.stop_tokens)

    def replay(self, asked: Asked, alone: Alone, fed: int) -> None:
        """Feed a session alone what the request fed, and compare everything that was said."""
        request, drawn = asked.request, asked.drawn
        before = [] if alone.pending is None else [alone.pending]
        given = [*before, *map(int, request.tokens)]
        if fed and self.model.memory_length is not None:
            most = self.model.memory_length if request.memory_length is None else request.memory_length
            alone.stream.loop.limit(np.zeros(1, int), most)
        rows = alone.feed(given[:fed])
        if fed:
            alone.pending = None
        self.compare_prompt(asked, rows, given, len(before))
        if fed < len(given):
            assert not drawn
            return
        assert bool(drawn) <= (request.max_new_tokens > 0)
        assert fed == len(given) + max(0, len(drawn) - 1)
        sampling = request.sampling
        chance = np.random.default_rng(np.random.SeedSequence(sampling.seed, spawn_key=(0,)))
        for index, token in enumerate(drawn):
            last = alone.feed([drawn[index - 1].id])[-1] if index else rows[-1]
            self.compare_token(token, last, request, chance)
        if drawn:
            alone.pending = drawn[-1].id

    def compare_token(self, token: Token, row: np.ndarray, request: Request, chance: np.random.Generator) -> None:
        self.report.tokens += 1
        sampling, row = request.sampling, row.astype(np.float64)
        if sampling.temperature == 0:
            best = float(row.max())
            if token.id != int(row.argmax()):
                below = best - row[token.id]
                assert below < limit_of("near tie"), f"{token.id} is {below} nats below the best"
                self.report.ties += 1
        else:
            uniform = chance.random()
            if token.id != by_the_whole(row, uniform, sampling.temperature, sampling.top_k, sampling.top_p):
                assert token.id in near_draws(uniform, row, sampling)
                self.report.ties += 1
        if request.top_logprobs is None:
            assert token.logprob is None
            assert token.top == ()
            return
        self.report.near(token.logprob, row[token.id], "a token's log-probability")
        self.compare_top(token.top, row, request.top_logprobs)

    def compare_top(self, top: Any, row: np.ndarray, k: int) -> None:
        assert len(top) == k
        if k:
            ids, values = zip(*top, strict=True)
            assert len(set(ids)) == k
            self.report.near(values, row[list(ids)], "the best log-probabilities")
            self.report.near(values, np.sort(row)[::-1][:k], "the best log-probabilities")

    def compare_prompt(self, asked: Asked, rows: np.ndarray, given: list[int], before: int) -> None:
        """Log-probabilities of the request's own tokens, in any number of events."""
        if not asked.request.score:
            assert not asked.prompt
            return
        fed = len(rows)
        # The log-probability of given[i] comes with given[i - 1]: of all that follow a token that was fed.
        first, last = 1, min(len(given), fed + 1)
        found: dict[int, float] = {}
        for event in asked.prompt:
            for place, value in enumerate(event.logprobs.tolist(), event.first + before):
                assert place not in found
                found[place] = value
            if k := asked.request.top_logprobs:
                for place in range(len(event.logprobs)):
                    row = rows[event.first + before + place - 1]
                    top = list(zip(event.top_ids[place].tolist(), event.top_logprobs[place].tolist(), strict=True))
                    self.compare_top(top, row, k)
        assert sorted(found) == list(range(first, last)) if fed else not found
        self.report.near(
            [found[place] for place in sorted(found)],
            [rows[place - 1][given[place]] for place in sorted(found)],
            "a prompt's log-probabilities",
        )

    # --- sessions -------------------------------------------------------------------------------------------------

    def idle(self) -> list[str]:
        """Named sessions without a request."""
        busy = {asked.name for asked in self.asked}
        return [name for name in self.sessions.names() if name not in busy]

    def compare_state(self, name: str) -> SessionState:
        """A session's whole state, with what it is alone."""
        alone, state = self.alone[name], self.sessions.take(name)
        assert (state.pending, state.seen) == (alone.pending, alone.seen), name
        wanted = alone.stream.snapshot()
        assert state.state.fill.tolist() == wanted.fill.tolist()
        found = state.state.memory if wanted.states is None else state.state.states
        expected: Mapping[str, Any] = wanted.memory if wanted.states is None else wanted.states
        assert sorted(found or {}) == sorted(expected)
        for key, array in expected.items():
            self.report.near((found or {})[key], array, f"{key} of {name}")
        return state

    def do_look(self) -> None:
        """Take a state out: of a session that has no request, all of it is known."""
        names = [name for name in self.idle() if name in self.alone]
        if names:
            self.compare_state(self.one(names))

    def do_move(self) -> None:
        """A state goes out as bytes and comes in under another name."""
        names = [name for name in self.idle() if name in self.alone]
        if not names:
            return
        name, other = self.one(names), f"session {self.number(0, self.count - 1)}"
        state = SessionState.from_bytes(self.compare_state(name).to_bytes())
        if other in {asked.name for asked in self.asked}:
            return
        if other in self.sessions.names():
            self.sessions.close(other)
        self.sessions.put(other, state)
        self.alone[other] = self.alone[name].copy()
        self.compare_state(other)

    def do_close(self) -> None:
        """A session ends, whether or not it has requests; its name can be used again."""
        names = self.sessions.names()
        if names:
            name = self.one(names)
            self.sessions.close(name)
            assert name not in self.sessions.names()
            for asked in self.asked:
                self.hear(asked)
                if asked.name == name:
                    assert asked.end is not None
            self.asked = [asked for asked in self.asked if asked.name != name]
            self.alone.pop(name, None)

    def do_expire(self) -> None:
        """Time passes: those without a request that nobody used are closed."""
        before, idle = set(self.sessions.names()), set(self.idle())
        self.now += float(self.one([10.0, 600.0, 900.0] if self.report.expired else [900.0]))
        self.sessions.expire()
        self.sessions.round()
        self.listen()
        assert before - set(self.sessions.names()) <= idle

    def do_checkpoint(self) -> None:
        self.checkpoint.save(self.sessions)

    def do_restart(self) -> None:
        """The server ends, with requests running, and a new one begins with what was saved."""
        self.report.restarts += 1
        self.listen()
        self.report.parked += self.sessions.counters.parked
        self.checkpoint.save(self.sessions)
        # Requests that were running: their sessions' states say how far they came.
        states = {name: self.sessions.take(name) for name in self.sessions.names()}
        for asked in self.asked:
            if asked.name is None:
                continue
            alone = self.alone.setdefault(asked.name, Alone(self.model))
            fed = states[asked.name].seen - alone.seen
            if fed:
                self.replay(asked, alone, fed)
        self.asked = []
        self.sessions.shut()
        self.checkpoint.close()
        self.checkpoint = Checkpoint(self.folder / "saved", self.model.manifest.model_id)
        self.sessions = self.open()
        assert self.checkpoint.restore(self.sessions) == {}
        assert set(self.sessions.names()) == set(states)
        for name in sorted(states)[:10]:  # what was saved is what comes back, bit for bit
            again = self.sessions.take(name)
            assert bits(again) == bits(states[name])
            self.alone.setdefault(name, Alone(self.model))
            self.compare_state(name)


def bits(state: SessionState) -> tuple[Any, ...]:
    """All of a session's state."""
    held = {**state.state.memory, **(state.state.states or {})}
    head = None if state.state.head is None else state.state.head.tobytes()
    arrays = [(name, str(array.dtype), array.shape, array.tobytes()) for name, array in sorted(held.items())]
    return state.pending, state.seen, state.model_id, state.state.fill.tobytes(), head, arrays


def near_draws(uniform: float, row: np.ndarray, sampling: Sampling) -> set[int]:
    """Return the tokens that may be drawn if rounding decides."""
    share = sampling.top_p
    shares = (None,) if share is None else (share - CLOSE, share + CLOSE)
    near = [min(max(uniform + off, 0.0), 1 - 1e-9) for off in (-CLOSE, CLOSE)]
    return {by_the_whole(row, one, sampling.temperature, sampling.top_k, other) for one in near for other in shares}
