"""The messages of sessions: requests, the events that answer requests, limits and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from txl_runtime.bundle.tables import Output
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.types import Array, Floats, Ids

if TYPE_CHECKING:
    from txl_runtime.streaming.adjusting import Adjust, Allow
    from txl_runtime.streaming.datastore import Datastore


class Busy(TxlError):  # noqa: N818 - it names a condition, not a mistake
    """A limit of sessions, requests or bytes is reached; nothing was accepted.

    Attributes:
        retry_after: estimated seconds after which a retry may succeed.
    """

    def __init__(self, said: str, retry_after: float) -> None:
        super().__init__(said)
        self.retry_after = retry_after


class ClosedError(UsageError):
    """Sessions are not open: they were closed, or their thread has failed. The call had no effect."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server's sessions. The defaults suit a small machine.

    Attributes:
        sessions: maximum number of named sessions at a time.
        waiting: maximum number of unfinished requests beyond the number of rows.
        host_bytes: maximum number of bytes of parked states in host memory. One state per row may be added, and the
            states of unnamed sessions with unread events, whose number `waiting` limits.
        input_bytes: maximum number of bytes of the inputs of all unfinished requests together.
        idle_seconds: seconds without use after which a named session is closed.
        positions: maximum number of positions of one request, fed and drawn together.
    """

    sessions: int = 1024
    waiting: int = 256
    host_bytes: int = 1 << 30
    input_bytes: int = 1 << 28
    idle_seconds: float = 3600.0
    positions: int = 1 << 20


@dataclass(frozen=True)
class Sampling:
    """The options of drawing tokens.

    Attributes:
        temperature: divisor of the log-probabilities; 0 takes the most probable token.
        top_k: keep the k most probable tokens; None for all.
        top_p: keep the smallest set of most probable tokens whose probability reaches p; None for all.
        seed: seed of the random numbers; None for a random seed. A stream of one sequence with this seed draws the same
            tokens.
        sequence: index among several requests with the same seed; sequence 3 draws what sequence 3 of a stream draws.
        adjust, logit_bias, allow, forbid: as in `Stream.generate`. The thread that runs the rounds calls the functions;
            the tokens so far are the session's pending token, the prompt and the drawn tokens of this request.
        lookup: maximum number of tokens of a draft, 0 … 4, as in `Stream.generate`. Drafts are looked up in the latest
            tokens that the session was fed by requests with `lookup`. A round runs drafts only if each of its sessions
            has a draft; each session keeps as many positions as its own draft predicted.
        datastore: as in `Stream.generate`; sessions of a round that name the same datastore are searched for together.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    sequence: int = 0
    adjust: Adjust | None = None
    logit_bias: Mapping[int, float] | None = None
    allow: Allow | None = None
    forbid: Iterable[int] = ()
    lookup: int = 0
    datastore: Datastore | None = None


@dataclass(frozen=True, eq=False)
class Request:
    """A task for a session: feed tokens or arrays, then draw tokens.

    The session's pending token (the last drawn token, if it was not fed yet) is fed before the tokens. Both together
    are cut into segments as `Stream.feed` does.

    Attributes:
        tokens: int [T]; T may be 0 if the session has a pending token.
        max_new_tokens: maximum number of tokens to draw. The last drawn token becomes the pending token.
        sampling: options of drawing.
        stop_tokens: ids that end the request; they are drawn and become the pending token.
        until: a function that is called with every drawn token, by the thread that runs the rounds; True ends the
            request, as a stop token does.
        top_logprobs: k for the log-probabilities of every drawn token and of the k best tokens; None for none.
        score: whether to return log-probabilities of the prompt's tokens as well, with the k best of `top_logprobs`.
            The first prompt token has a log-probability only if a pending token comes before it.
        inputs: instead of tokens, for any model: arrays by name with one sequence, as for `Stream.feed`.
        last: for inputs, whether to return only the last position. As in `Stream.feed`, the results then have no axis
            of positions, and come in one event.
        seconds: seconds after `submit` at which the request ends with reason "timeout"; None for no limit.
        memory_length: maximum number of memory rows that the session keeps while this request runs, 0 … M; None for the
            bundle's memory length M. The request's first segment drops the older rows for good.
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
    """A drawn token.

    Attributes:
        id: the token's id.
        logprob: the token's natural log-probability before `adjust`, `logit_bias` and temperature; None without
            `top_logprobs`.
        top: ids and log-probabilities of the k best tokens, the best first; if two are equal, the smaller id first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Prompt:
    """Log-probabilities of the prompt's tokens in one segment.

    Attributes:
        first: index of the segment's first scored token among the request's tokens.
        logprobs: natural log-probabilities of the segment's t scored tokens, float32 [t].
        top_ids, top_logprobs: the k best tokens at each of these places, best first, int32 [t, k] and float32 [t, k].
    """

    first: int
    logprobs: Floats
    top_ids: Ids
    top_logprobs: Floats


@dataclass(frozen=True, eq=False)
class Outputs:
    """The model's outputs for a segment of `Request.inputs`.

    Attributes:
        first: index of the segment's first position in the request.
        arrays: outputs by name for one sequence, in the declared order of axes, e.g. [1, t, F].
    """

    first: int
    arrays: Mapping[str, Array]


def joined(segments: Sequence[Outputs], table: Sequence[Output]) -> dict[str, Array]:
    """Return the outputs of a whole request: segments of [1, 8, F] and [1, 4, F] give [1, 12, F].

    Args:
        segments: the request's events in order; at least one.
        table: the bundle's outputs. An output without an axis of positions is taken from the last segment.
    """
    results = dict(segments[-1].arrays)
    for output in table if len(segments) > 1 else ():
        axes, ending = output.axes, results[output.name]
        if axes.positions:
            whole = np.zeros(axes.sizes(1, segments[-1].first + axes.length(ending)), ending.dtype)
            for segment in segments:
                values = segment.arrays[output.name]
                whole[axes.window(segment.first, segment.first + axes.length(values))] = values
            results[output.name] = whole
    return results


Reason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "closed", "error"]
"""Reasons why a request ended; see `Finished`."""


@dataclass(frozen=True)
class Finished:
    """The end of a request; always the last event.

    Attributes:
        reason: "stop": a stop token was drawn, or `until` returned True. "length": all tokens were fed and drawn.
            "cancelled", "timeout", "closed": the request was ended early by the caller, its deadline or the end of its
            session. "error": the error is in `Ticket.error`.
        fed: number of positions that this request fed, including the session's pending token.
        seen: number of positions that the session had been fed when the request ended.
    """

    reason: Reason
    fed: int
    seen: int = field(default=0, compare=False)


Event: TypeAlias = Token | Prompt | Outputs | Finished
"""An event that answers a request."""


@dataclass(frozen=True)
class SessionInfo:
    """The place, sizes and counts of a session.

    Attributes:
        name: name of the session.
        place: "row" if the session is on a row of the stream, "host" if its state is parked in host memory, "new"
            before its first position.
        seen: number of positions fed so far.
        fill: number of memory rows, 0 … M; None if the model counts none.
        pending: the last drawn token, if the next request will feed it; else None.
        running: whether the session has a request.
        waiting: number of requests behind the first request.
        nbytes: maximum number of bytes of the session's state; 0 before the first position.
        idle_seconds: seconds since the session was used; 0 while it has a request.
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
    """Counts since the `Sessions` were made.

    Attributes:
        rounds: number of segments that ran, each for one or more sessions.
        positions: number of positions fed.
        tokens: number of tokens drawn.
        drafted: number of tokens in drafts (`Sampling.lookup`).
        kept: number of drafted tokens that were drawn as predicted.
        requests: number of requests accepted.
        busy: number of requests and sessions refused with `Busy`.
        parked, resumed: number of states moved from a row to host memory, and back to a row.
        expired: number of sessions closed because they were idle.
        broken: number of named sessions that ended because they computed NaN.
        finished: number of ended requests, by reason.
    """

    rounds: int = 0
    positions: int = 0
    tokens: int = 0
    drafted: int = 0
    kept: int = 0
    requests: int = 0
    busy: int = 0
    parked: int = 0
    resumed: int = 0
    expired: int = 0
    broken: int = 0
    finished: dict[Reason, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "timeout", "closed", "error"), 0)
    )
