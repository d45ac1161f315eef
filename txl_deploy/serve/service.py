"""Define the object that every endpoint needs: it holds the server's model, sessions, limits and counters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request
from txl_runtime.model import Model
from txl_runtime.sessions import AsyncSessions
from txl_runtime.streaming.datastore import Datastore
from txl_runtime.streaming.texts import TokenTexts

from txl_deploy.serve.health import Health
from txl_deploy.serve.keeping import Keeping
from txl_deploy.serve.metrics import Metrics
from txl_deploy.serve.playground.tabs import Tabs
from txl_deploy.serve.settings import ServerSettings


@dataclass
class Service:
    """The model, sessions, limits and counters of one server.

    Attributes:
        settings: the server's options.
        model: the served model.
        front: the server's sessions.
        health: the periodic self-test of the model.
        metrics: the server's counters.
        keeping: the checkpoint of the sessions.
        pieces: the texts of the model's tokens.
        created: time of the server's start, in seconds since 1970.
        largest_state: size of a full session's state in bytes.
        datastore: the store that every draw searches; None if there is no store.
        draining: True while the server is stopping and only finishes running requests.
        running: number of requests that are being answered.
        tabs: the open tabs of the playground.
        looking: a lock that is held while neighbours are looked for.
    """

    settings: ServerSettings
    model: Model
    front: AsyncSessions
    health: Health
    metrics: Metrics
    keeping: Keeping
    pieces: TokenTexts
    created: int
    largest_state: int
    datastore: Datastore | None = None
    draining: bool = False
    running: int = 0
    tabs: Tabs = field(init=False)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.tabs = Tabs(self.front, self.settings.tabs)


@dataclass
class Noted:
    """Facts about one request for metrics and the log, besides its path and status.

    Attributes:
        id: the request's id, which is also in the answer's header.
        began: time of the request's arrival, from `time.monotonic`.
        prompt_tokens, completion_tokens: number of tokens read and generated.
        first_seconds: seconds from the request's arrival to the first drawn token; None before that token.
    """

    id: str
    began: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_seconds: float | None = None


def service_of(request: Request) -> Service:
    """Return the server that received a request."""
    service = request.scope["txl.service"]
    assert isinstance(service, Service)
    return service


def noted_of(request: Request) -> Noted:
    """Return the facts that are collected about a request."""
    noted = request.scope["txl.noted"]
    assert isinstance(noted, Noted)
    return noted
