"""What is asked of sessions, and what comes back: requests, events, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from txl_runtime.bundle.tables import Output
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.types import Array, Floats, Ids


class Busy(TxlError):  # noqa: N818 - what it says is a state and no mistake
    """There are too many sessions, requests or bytes already; nothing was taken in.

    Attributes:
        retry_after: seconds after which it may be worth asking again; an estimate.
    """

    def __init__(self, said: str, retry_after: float) -> None:
        super().__init__(said)
        self.retry_after = retry_after


class ClosedError(UsageError):
    """Sessions are not open: they were closed, or their thread has failed. Nothing was done of what was asked."""


@dataclass(frozen=True)
class Limits:
    """How much sessions may take. The defaults suit a small machine.

    Attributes:
        sessions: named sessions at a time.
        waiting: unfinished requests beyond the number of rows.
        host_bytes: bytes of parked states in host memory. As many states as there are rows may come on top, and those
            of requests in sessions without names whose events are unread, which `waiting` bounds.
        input_bytes: bytes of the inputs of unfinished requests, in all.
        idle_seconds: a named session that nobody used for so long is closed.
        positions: of one request: what it feeds and what it draws.
    """

    sessions: int = 1024
    waiting: int = 256
    host_bytes: int = 1 << 30
    input_bytes: int = 1 << 28
    idle_seconds: float = 3600.0
    positions: int = 1 << 20


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the log-probabilities; 0 takes the most probable token.
        top_k: keep the k most probable tokens; None for all.
        top_p: keep the smallest set of most probable tokens whose probability reaches p; None for all.
        seed: of the random draws; None for a fresh one. A request draws what a stream of one sequence draws.
        sequence: which of several requests with the seed in common: draws what that sequence of a stream draws.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    sequence: int = 0


@dataclass(frozen=True, eq=False)
class Request:
    """What a session is to do: feed tokens or arrays, then draw tokens.

    Before the tokens the session's pending token is fed: the one that was drawn last and not fed yet. Both together are
    cut as `Stream.feed` cuts them.

    Attributes:
        tokens: int [T]. There may be none where the session has a pending token.
        max_new_tokens: how many to draw at most. The last one that is drawn becomes the pending token.
        sampling: how.
        stop_tokens: ids that end the request; they are drawn and become the pending token.
        until: is called with every token that is drawn, by the thread that runs the rounds; True ends the request there
            as a stop token does.
        top_logprobs: None for no log-probabilities; k for that of every drawn token and for those of the k best.
        score: whether the tokens of the prompt are scored as well, with the k best where `top_logprobs` says so. The
            first one has a log-probability only where a pending token stands before it.
        inputs: in place of tokens, for any model: arrays by name with one sequence, as `Stream.feed` takes them.
        last: of inputs, whether the results of the last position alone are wanted: as with `Stream.feed` they then have
            no axis of positions, and come in one event.
        seconds: after so many since it was submitted the request ends with reason "timeout"; None for no limit.
        memory_length: memory rows that the session keeps and sees at most while this request runs, 0 … M; None for M.
            Rows beyond are gone when its first segment has run, whatever the next request allows.
    """

    tokens: ArrayLike = ()
    max_new_tokens: int = 0
    sampling: Sampling = Sampling()
    stop_tokens: Sequence[int] = ()
    until: Callable[[int], bool] | None = None
    top_logprobs: int | None = None
    score: bool = False
    inputs: Mapping[str, ArrayLike] | None = None
    last: bool = False
    seconds: float | None = None
    memory_length: int | None = None


@dataclass(frozen=True)
class Token:
    """A token that was drawn.

    Attributes:
        id: of the token.
        logprob: its natural log-probability, before temperature, top-k and top-p; None where it was not asked for.
        top: ids and log-probabilities of the k best tokens, the best first; of those that tie the smaller id.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Prompt:
    """Log-probabilities of some of the request's tokens; a long prompt gives one event per segment.

    Attributes:
        first: which of the request's tokens the first entry is of.
        logprobs: natural log-probabilities of these tokens, float32 [t].
        top_ids, top_logprobs: the k best tokens at their places, the best first, int32 [t, k] and float32 [t, k].
    """

    first: int
    logprobs: Floats
    top_ids: Ids
    top_logprobs: Floats


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the model returned for a segment of `Request.inputs`.

    Attributes:
        first: the segment's first position.
        arrays: by name, in the output table's order of axes, with one sequence.
    """

    first: int
    arrays: Mapping[str, Array]


def joined(segments: Sequence[Outputs], table: Sequence[Output]) -> dict[str, Array]:
    """What the model returned for a whole request: its segments' outputs, put together along the positions.

    Args:
        segments: in their order; at least one.
        table: the outputs of the bundle. Those without positions are those of the last segment.
    """
    results = dict(segments[-1].arrays)
    for output in table if len(segments) > 1 else ():
        axes, ending = output.axes, results[output.name]
        if axes.positions:
            whole = np.zeros(axes.sizes(1, segments[-1].first + axes.length(ending)), ending.dtype)
            for segment in segments:
                found = segment.arrays[output.name]
                whole[axes.window(segment.first, segment.first + axes.length(found))] = found
            results[output.name] = whole
    return results


Reason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "closed", "error"]


@dataclass(frozen=True)
class Finished:
    """The end of a request; always the last event.

    Attributes:
        reason: "stop": a stop token was drawn, or `until` said so. "length": everything that was asked for is done.
            "cancelled", "timeout", "closed": it was ended early, by the caller, its time or the end of its session.
            "error": `Ticket.error` says what went wrong.
        fed: positions that this request fed, the token that was pending before it among them.
        seen: positions that the session was fed in all, up to then.
    """

    reason: Reason
    fed: int
    seen: int = field(default=0, compare=False)


Event: TypeAlias = Token | Prompt | Outputs | Finished


@dataclass(frozen=True)
class SessionInfo:
    """How a session stands.

    Attributes:
        name: of the session.
        place: where its state is: on a row of the stream, or parked in host memory; "new" before anything was fed.
        seen: positions that it was fed in all.
        fill: memory rows that exist, 0 … M; None where the model counts none.
        pending: the token that was drawn last and is fed with the next request; None where there is none.
        running: whether it has a request.
        waiting: requests behind that one.
        nbytes: bytes of its state at most.
        idle_seconds: since it was used last; 0 while it has a request.
    """

    name: str
    place: Literal["row", "host", "new"]
    seen: int
    fill: int | None
    pending: int | None
    running: bool
    waiting: int
    nbytes: int
    idle_seconds: float


@dataclass
class Counters:
    """What was done so far.

    Attributes:
        rounds: segments that ran, for some sessions each.
        positions: that were fed.
        tokens: that were drawn.
        requests: that were taken in.
        busy: requests and sessions that were refused for want of room.
        parked, resumed: states that were moved from a row, and onto one.
        expired: sessions that were closed because nobody used them.
        broken: named sessions that ended because what they computed is no number.
        finished: requests that ended, by their reason.
    """

    rounds: int = 0
    positions: int = 0
    tokens: int = 0
    requests: int = 0
    busy: int = 0
    parked: int = 0
    resumed: int = 0
    expired: int = 0
    broken: int = 0
    finished: dict[Reason, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "timeout", "closed", "error"), 0)
    )
