"""Check each request before an endpoint runs; count and log it afterwards."""

from __future__ import annotations

import hmac
import secrets
import time
import traceback
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from txl_runtime.errors import TxlError

from txl_deploy.serve import front_page
from txl_deploy.serve.disconnects import ClientGoneError
from txl_deploy.serve.errors import ApiError, as_api_error
from txl_deploy.serve.logs import Log
from txl_deploy.serve.playground import pages
from txl_deploy.serve.service import Noted, Service

OPEN = ("/health", *pages.OPEN)
"""Paths that need no token: health checks cannot send one, and the page's own files hold no secret."""
LINKED = (front_page.PATH, "/health", "/metrics", pages.PAGE)
"""Paths to which pages of other servers may link, because these paths only show something."""
LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine in a Host header. A foreign page whose name was rebound to this address sends that name."""
CLIENT_GONE = 499
"""Status in logs and metrics of a request whose client disconnected before the answer."""


class Guard:
    """An ASGI application that checks requests, calls the endpoints, answers errors, and logs and counts requests."""

    def __init__(self, app: ASGIApp, service: Service, log: Log) -> None:
        self._app, self._service, self._log = app, service, log
        token = service.settings.token
        self._token = None if token is None else _digest(token.encode())
        # A foreign page does not know the token. If there is no token, its requests are known by their Host header.
        alone = service.settings.local or (service.settings.loopback and token is None)
        self._hosts = (*LOCAL, service.settings.host.lower()) if alone else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        noted = Noted(secrets.token_hex(12), time.monotonic())
        scope["txl.noted"], scope["txl.service"] = noted, self._service
        scope["app"] = self  # makes the router raise an error for an unknown path
        status = 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *self._headers(noted, scope)]}
            await send(message)

        service = self._service
        service.running += 1
        service.metrics.running.inc()
        try:
            self._admit(scope)
            await self._app(scope, receive, told)
        except ClientGoneError:
            status = CLIENT_GONE
        except Exception as error:
            answer = self._explained(error, noted)
            if status:
                raise  # a part of the answer was sent: close the connection
            await answer.response()(scope, receive, told)
        finally:
            service.running -= 1
            service.metrics.running.dec()
            self._tell(scope, noted, status)

    def _admit(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            raise ApiError(
                400, "the Host header is not this machine's, expected localhost or 127.0.0.1; call it that", code="host"
            )
        if self._hosts is not None or path == pages.PAGE or path.startswith(f"{pages.PAGE}/"):
            _check_origin(headers, path)
        # the front page needs no token, because it names no model if the server has a token
        if self._token is not None and path not in (*OPEN, front_page.PATH):
            kind, _, shown = headers.get("authorization", "").partition(" ")
            token = shown.strip() if kind.lower() == "bearer" else ""
            if path == pages.PAGE and not token:  # a browser that opens an address sends no such header
                token = QueryParams(scope["query_string"]).get("token", "")
            if not hmac.compare_digest(_digest(token.encode(errors="replace")), self._token):
                raise ApiError(
                    401,
                    "no token or a wrong one, expected the server's; send Authorization: Bearer TOKEN, or open "
                    "/playground?token=TOKEN",
                    code="token",
                )
        if self._service.draining and path not in OPEN:
            raise ApiError(
                503, "the server is stopping, it takes no more; try another one", code="draining", retry_after=5
            )

    def _headers(self, noted: Noted, scope: Scope) -> list[tuple[bytes, bytes]]:
        # Content-Length and Transfer-Encoding together are ambiguous: RFC 9112, 6.1
        unclear = {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}
        closing = [(b"connection", b"close")] if self._service.draining or unclear else []
        return [(b"x-request-id", noted.id.encode()), (b"x-content-type-options", b"nosniff"), *closing]

    def _explained(self, error: Exception, noted: Noted) -> ApiError:
        if isinstance(error, TxlError):
            return as_api_error(error)
        if isinstance(error, HTTPException):
            return _of_router(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        self._log.say(
            "defect",
            f"error: {place}, request {noted.id}: a defect of txl-deploy; report it, please",
            id=noted.id,
            place=place,
        )
        return ApiError(500, f"the server failed ({place}); report it with the request's id, please", code="defect")

    def _tell(self, scope: Scope, noted: Noted, status: int) -> None:
        seconds, path = time.monotonic() - noted.began, route_of(scope)
        read, drawn, first = noted.prompt_tokens, noted.completion_tokens, noted.first_seconds
        self._service.metrics.answered(path, status, seconds, read, drawn, first)
        self._log.detail("request", id=noted.id, path=path, status=status, milliseconds=round(seconds * 1000, 2))


def _of_router(error: HTTPException) -> ApiError:
    if error.status_code == 405:
        return ApiError(
            405, f"this path takes {(error.headers or {}).get('Allow', 'other methods')}; use that", code="method"
        )
    return ApiError(
        error.status_code, "there is no such path, expected one of the API; open / to see which there are", code="path"
    )


def route_of(scope: Scope) -> str:
    """Return the route of a request, with {name} in place of names; "other" if no route matched."""
    return str(scope.get("txl.route", "other"))


def _digest(token: bytes) -> bytes:
    """Return a hash of a token, so that compared values always have the same length."""
    return sha256(token).digest()


def _check_origin(headers: Headers, path: str) -> None:
    """Refuse requests that a page of a different server makes in a browser, except a link that opens a page here.

    Raises:
        ApiError: the browser's headers name a page of a different server.
    """
    own = headers.get("host", "").lower()
    site, *how = (headers.get(f"sec-fetch-{name}", "none") for name in ("site", "mode", "dest"))
    foreign = site not in ("none", "same-origin") and (path not in LINKED or how != ["navigate", "document"])
    if foreign or any(each.lower() not in (f"http://{own}", f"https://{own}") for each in headers.getlist("origin")):
        raise ApiError(
            403, "a page of another server asks this, expected this server's own; open /playground here", code="origin"
        )


def _name(host: str) -> str:
    """Return the name in a Host header, without the port and in lower case."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()
