"""Runs requests of one session alone on one stream, for the results that it must give beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from plain_draws import by_the_whole
from txl_runtime import Model
from txl_runtime.sessions import Event, Finished, Prompt, Request, Sessions, Ticket, Token

CLOSE = 1e-4


@dataclass
class Given:
    """The results of a request.

    Attributes:
        drawn: tokens.
        logprobs: of each of them, where that was asked for.
        tops: the best tokens beside each of them, and their log-probabilities.
        first, scored: which of the prompt's tokens the first score is of, and the scores.
        top_ids, top_logprobs: the best tokens in the prompt's places.
        reason, fed: of the end.
    """

    drawn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    first: int | None = None
    scored: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    top_ids: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    top_logprobs: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    reason: str = ""
    fed: int = 0


def given(events: Sequence[Event]) -> Given:
    """The events of a request that has ended, put together."""
    found, (*others, last) = Given(), events
    assert isinstance(last, Finished)
    found.reason, found.fed = last.reason, last.fed
    prompts = [event for event in others if isinstance(event, Prompt)]
    if prompts:
        assert not isinstance(others[0], Token), "a prompt is scored before anything is drawn"
        found.first = prompts[0].first
        ends = np.cumsum([found.first, *(len(event.logprobs) for event in prompts)])
        assert [event.first for event in prompts] == ends[:-1].tolist()
        found.scored, found.top_ids, found.top_logprobs = (
            np.concatenate([getattr(event, name) for event in prompts])
            for name in ("logprobs", "top_ids", "top_logprobs")
        )
    for event in others:
        if isinstance(event, Token):
            found.drawn.append(event.id)
            found.tops.append(event.top)
            if event.logprob is not None:
                found.logprobs.append(event.logprob)
    return found


def run(sessions: Sessions) -> int:
    """Rounds until there is nothing to do."""
    for number in range(10_000):
        if not sessions.round():
            return number
    raise AssertionError("rounds never end")


def drawn(ticket: Ticket) -> list[int]:
    """The tokens among the events that were not read yet."""
    return [event.id for event in ticket.events() if isinstance(event, Token)]


def alone(model: Model, requests: Sequence[Request]) -> list[Given]:
    """Every request on one stream, whose sequences are the only ones; drawn from whole distributions."""
    stream, pending, results = model.stream(1), list[int](), list[Given]()
    for request in requests:
        tokens = np.concatenate([pending, np.asarray(request.tokens, int)]).astype(int)
        if model.memory_length is not None:
            rows = model.memory_length if request.memory_length is None else request.memory_length
            stream.loop.limit(np.zeros(1, int), rows)
        found, before = Given(fed=len(tokens)), len(pending)
        rows = stream.feed(tokens[None])[0]
        k = request.top_logprobs
        if request.score and len(tokens) > 1:
            found.first = 1 - before
            found.scored = rows[np.arange(len(tokens) - 1), tokens[1:]]
            found.top_ids = np.argsort(-rows[:-1], axis=1, kind="stable")[:, : k or 0].astype(np.int32)
            found.top_logprobs = np.take_along_axis(rows[:-1], found.top_ids, axis=1)
        row, pending, sampling = rows[-1], [], request.sampling
        draws = np.random.default_rng(np.random.SeedSequence(sampling.seed, spawn_key=(sampling.sequence,)))
        found.reason = "length"
        while len(found.drawn) < request.max_new_tokens:
            if pending:
                row = stream.feed([pending])[0, 0]
                found.fed += 1
            uniform = draws.random() if sampling.temperature else 0.0
            token = by_the_whole(row, uniform, sampling.temperature, sampling.top_k, sampling.top_p)
            pending = [token]
            found.drawn.append(token)
            if k is not None:
                found.logprobs.append(float(row[token]))
            best = np.argsort(-row, kind="stable")[: k or 0]
            found.tops.append(tuple((int(word), float(row[word])) for word in best))
            if token in request.stop_tokens or (request.until is not None and request.until(token)):
                found.reason = "stop"
                break
        results.append(found)
    return results


def assert_same(found: Given, expected: Given) -> None:
    """The same tokens, and log-probabilities that are close."""
    assert (found.drawn, found.reason, found.fed) == (expected.drawn, expected.reason, expected.fed)
    assert (found.first, len(found.scored)) == (expected.first, len(expected.scored))
    np.testing.assert_allclose(found.scored, expected.scored, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=CLOSE)
    if found.top_ids.size or expected.top_ids.size:
        np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=0, atol=CLOSE)
        assert found.top_ids.shape == expected.top_ids.shape
    for ours, theirs in zip(found.tops, expected.tops, strict=True):
        assert [word for word, _ in ours] == [word for word, _ in theirs]
        np.testing.assert_allclose([p for _, p in ours], [p for _, p in theirs], rtol=0, atol=CLOSE)
