"""Serve the playground's page and its files, with headers that prevent a browser from loading anything else."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from txl_deploy.page import HTML, files
from txl_deploy.serve.errors import ApiError

PAGE = "/playground"
"""Path of the page; the paths of its files begin with it."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
"""Content types by a file's suffix; files with other suffixes are not served."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
"""Headers of the page and its files: the page loads only from its server, in no frame, and tells nobody its address."""

_FILES = {path.name: path.read_bytes() for path in files() if path.suffix in TYPES}
OPEN = tuple(f"{PAGE}/{name}" for name in _FILES if name != HTML)
"""Paths of the files that the page loads without a token, because they are the same on every server."""


async def page(request: Request) -> Response:
    """GET /playground: the page. Its address has the token, because a browser that opens an address sends no header."""
    return _answer(HTML)


async def file(request: Request) -> Response:
    """GET /playground/FILE: a script or a style of the page.

    Raises:
        ApiError: there is no such file.
    """
    name = request.path_params["file"]
    if f"{PAGE}/{name}" not in OPEN:
        raise ApiError(404, "the playground has no such file, expected one that its page names", code="path")
    return _answer(name)


def _answer(name: str) -> Response:
    kind = TYPES[name[name.rindex(".") :]]
    return Response(_FILES[name], 200, HEADERS | {"content-type": kind})
