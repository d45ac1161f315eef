"""GET /: describe this server, and link to its pages and endpoints."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

from starlette.requests import Request
from starlette.responses import Response

from txl_deploy.extras import version_of
from txl_deploy.serve.errors import json_response
from txl_deploy.serve.playground import pages
from txl_deploy.serve.service import service_of

PATH = "/"
LINKS = {name: f"/v1/{name}" for name in ("models", "completions", "sessions")}
LINKS |= {name: f"/{name}" for name in ("playground", "health", "metrics")}
"""Links in the answer for programs that ask for JSON."""
_PAGE = Template((Path(__file__).parent / "front_page.html").read_text("utf-8"))


async def page(request: Request) -> Response:
    """GET /: a page without scripts, or JSON for a client that accepts JSON but not HTML.

    The page needs no token. If the server has a token, the page does not name the model, and says how to send the
    token.
    """
    settings, headers = service_of(request).settings, pages.HEADERS | {"vary": "accept"}
    model = settings.served_name if settings.token is None else None
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and "text/html" not in accepted:
        about = {"object": "server", "name": "txl-deploy", "version": version_of("txl-deploy"), "model": model}
        return json_response({**about, "links": LINKS}, 200, headers)
    hidden = {"open": "hidden", "closed": ""} if model is None else {"open": "", "closed": "hidden"}
    return Response(_PAGE.substitute(hidden, model=escape(model or "")), 200, headers, "text/html; charset=utf-8")
