"""What a client is told when something is wrong: a status, and one object that existing clients can read.

{"error": {"message": "…", "type": "invalid_request_error", "param": "temperature", "code": null}}
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.sessions import Busy, ClosedError

TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
"""The kind of an error by its status; others below 500 are invalid requests, from 500 on it is the server's."""
PARAMS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "seed", "session", "max_tokens", "memory_length")},
    "tokens": "prompt",
    "stop_tokens": "stop_token_ids",
}
"""Fields of requests by what the runtime calls them."""


class ApiError(TxlError):
    """An answer that is an error.

    Attributes:
        status: the status of HTTP.
        param: the field of the request that is wrong, where it is one.
        code: a word for programs, where there is one.
        retry_after: seconds after which it is worth trying again; None where it is not.
        repeatable: whether the same request may be sent again: not where a session has fed some of it by now.
    """

    repeatable = True

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer; the connection ends with it where a body may still be on its way."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if not self.repeatable:
            headers["x-should-retry"] = "false"  # clients of OpenAI try again by themselves otherwise
        if self.status in (408, 413):
            headers["connection"] = "close"
        return json_response(self.document(), self.status, headers)


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer whose body is JSON."""
    return Response(msgspec.json.encode(document), status, headers, "application/json")


def as_api_error(error: TxlError) -> ApiError:
    """An error of the runtime as an answer; a field whose name begins the message is the one that is wrong."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="busy", retry_after=error.retry_after)
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="closed")
    if isinstance(error, UsageError):
        return ApiError(400, str(error), PARAMS.get(str(error).partition(" ")[0]))
    return ApiError(500, str(error))
