"""Hold what every endpoint needs: the model, its sessions, the limits, and the counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request
from txl_runtime.model import Model
from txl_runtime.sessions import AsyncSessions
from txl_runtime.streaming.texts import TokenTexts

from txl_deploy.serve.health import Health
from txl_deploy.serve.keeping import Keeping
from txl_deploy.serve.metrics import Metrics
from txl_deploy.serve.playground.tabs import Tabs
from txl_deploy.serve.settings import ServerSettings


@dataclass
class Service:
    """One server.

    Attributes:
        settings: its options.
        model: the bundle that it serves.
        front: its sessions.
        health: the periodic self-test of the model.
        metrics: its counters.
        keeping: its sessions' checkpoint.
        pieces: the texts of its tokens.
        created: time of its start, in seconds since 1970.
        largest_state: bytes of a full session's state.
        draining: True once it is stopping and only finishes running requests.
        running: number of requests that are being answered.
        tabs: the open tabs of the playground.
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
    draining: bool = False
    running: int = 0
    tabs: Tabs = field(init=False)

    def __post_init__(self) -> None:
        self.tabs = Tabs(self.front, self.settings.tabs)


@dataclass
class Noted:
    """Facts of one request, besides its path and status: metrics get all of them, the log its id and time.

    Attributes:
        id: the request's id, which is in the answer's header.
        began: time of its arrival, as `time.monotonic` counts.
        prompt_tokens, completion_tokens: number of tokens read and generated.
        first_seconds: seconds from the request to the first token drawn; None before it.
    """

    id: str
    began: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_seconds: float | None = None


def service_of(request: Request) -> Service:
    """Return the server that a request came to."""
    service = request.scope["txl.service"]
    assert isinstance(service, Service)
    return service


def noted_of(request: Request) -> Noted:
    """Return the noted facts of a request."""
    noted = request.scope["txl.noted"]
    assert isinstance(noted, Noted)
    return noted
