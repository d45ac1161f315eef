"""Read the whole body of a request, within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from txl_deploy.serve.disconnects import ClientGoneError
from txl_deploy.serve.errors import ApiError

JSON = "application/json"
BODY_BYTES = 1 << 20
"""Maximum size of a body in bytes, 1 MiB; a body with a session's state may be as large as a full state."""
BODY_SECONDS = 20
"""Seconds within which a body must arrive."""
DROPPED = 64 << 20
"""Bytes beyond the limit that are read and dropped, 64 MiB: a client that is still sending would miss the refusal."""


async def read_json(request: Request) -> bytes:
    """Read the body of a request whose content type is JSON.

    A page of a different server cannot send such a request before its browser has asked this server.

    Raises:
        ApiError: the content type is not JSON, or `read_body` refuses the body.
    """
    kind = content_type(request)
    if kind != JSON:
        raise ApiError(415, f"the content type is {kind[:60]!r}, expected {JSON}; send the header Content-Type: {JSON}")
    return await read_body(request)


async def read_body(request: Request, most: int = BODY_BYTES) -> bytes:
    """Read the body of a request, of at most `most` bytes.

    Raises:
        ApiError: the body has more bytes, or takes too long.
        ClientGoneError: the client disconnected before the whole body had arrived.
    """
    declared = request.headers.get("content-length", "")
    hopeless = declared.isdecimal() and (len(declared) > 18 or int(declared) > most + DROPPED)
    if hopeless or (declared.isdecimal() and int(declared) > most and "expect" in request.headers):
        raise _too_large(most)
    try:
        return await asyncio.wait_for(_read(request, most), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body took more than {BODY_SECONDS} s, expected it at once; try again") from None
    except ClientDisconnect:
        raise ClientGoneError from None


async def _read(request: Request, most: int) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > most + DROPPED:
            break
        if size > most:
            parts.clear()
        else:
            parts.append(part)
    if size > most:
        raise _too_large(most)
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes, expected at most those; send it in parts")


def content_type(request: Request) -> str:
    """Return the content type of a body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
