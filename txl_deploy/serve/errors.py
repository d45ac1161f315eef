"""Answer an error with an HTTP status and a JSON object that existing clients understand.

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
"""Type of an error by its status; any other status below 500 is an invalid request, from 500 on a server error."""
PARAMS = {
    **{
        name: name
        for name in ("temperature", "top_p", "top_k", "seed", "logit_bias", "session", "max_tokens", "memory_length")
    },
    "tokens": "prompt",
    "stop_tokens": "stop_token_ids",
}
"""Name of a field in requests, by the runtime's name for this field."""


class ApiError(TxlError):
    """An error that becomes the answer to a request.

    Attributes:
        status: the HTTP status.
        param: name of the wrong field of the request; None if no single field is wrong.
        code: a word by which programs recognise the error; None if there is none.
        retry_after: seconds after which a retry makes sense; None if a retry makes no sense.
        repeatable: False if the same request must not be sent again, because a session has read part of it.
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
        """Return the body of the answer, as plain data for JSON."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the complete answer; it closes the connection if the request's body may still be arriving."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if not self.repeatable:
            headers["x-should-retry"] = "false"  # OpenAI's clients would otherwise retry by themselves
        if self.status in (408, 413):
            headers["connection"] = "close"
        return json_response(self.document(), self.status, headers)


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer whose body is JSON."""
    return Response(msgspec.json.encode(document), status, headers, "application/json")


def as_api_error(error: TxlError) -> ApiError:
    """Turn an error of the runtime into an answer. If its message begins with a field's name, that field is wrong."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="busy", retry_after=error.retry_after)
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="closed")
    if isinstance(error, UsageError):
        return ApiError(400, str(error), PARAMS.get(str(error).partition(" ")[0]))
    return ApiError(500, str(error))
