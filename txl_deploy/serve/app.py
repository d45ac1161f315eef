"""Define the endpoints of the server, as an ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from txl_deploy.serve import front_page, models, named, neighbours
from txl_deploy.serve.completions import chat, completions
from txl_deploy.serve.guard import Guard
from txl_deploy.serve.logs import Log
from txl_deploy.serve.playground import pages, tab_connection
from txl_deploy.serve.service import Service

Endpoint = Callable[[Request], Awaitable[Response]]
"""A function that answers a request."""
ENDPOINTS: dict[str, dict[str, Endpoint]] = {
    front_page.PATH: {"GET": front_page.page},
    "/v1/completions": {"POST": completions},
    "/v1/chat/completions": {"POST": chat},
    "/v1/models": {"GET": models.models},
    "/v1/models/{name}": {"GET": models.model},
    "/v1/sessions": {"GET": named.sessions},
    "/v1/sessions/{name}": {"GET": named.session, "DELETE": named.end_session},
    "/v1/sessions/{name}/state": {"GET": named.state, "PUT": named.set_state},
    "/v1/sessions/{name}/cancel": {"POST": named.cancel},
    "/v1/sessions/{name}/copy": {"POST": named.copy},
    "/v1/sessions/{name}/run": {"POST": named.run},
    "/v1/neighbours": {"POST": neighbours.neighbours},
    "/tokenize": {"POST": models.tokenize},
    "/detokenize": {"POST": models.detokenize},
    "/tokenizer_info": {"GET": models.tokenizer_info},
    "/playground": {"GET": pages.page},
    "/playground/tab": {"GET": tab_connection.tab},
    "/playground/{file}": {"GET": pages.file},
    "/health": {"GET": models.health},
    "/metrics": {"GET": models.metrics},
}
"""Every path, with the endpoint of each method that it accepts."""


def make_app(service: Service, log: Log) -> Guard:
    """Return the application of one server."""
    routes = [Route(path, _of(path, methods), methods=list(methods)) for path, methods in ENDPOINTS.items()]
    return Guard(Router(routes, redirect_slashes=False), service, log)


def _of(path: str, methods: dict[str, Endpoint]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        request.scope["txl.route"] = path
        return await methods["GET" if request.method == "HEAD" else request.method](request)

    return endpoint
