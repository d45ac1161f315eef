"""`txl-deploy playground`: serve the playground's page to one person on this machine, with a new token."""

from __future__ import annotations

import html
import secrets
import tempfile
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_deploy.commands.options import Backend, Bundle, takes_datastore
from txl_deploy.commands.serve import NEEDED
from txl_deploy.extras import require
from txl_deploy.retrieval import Mixture

if TYPE_CHECKING:
    from txl_deploy.serve.logs import Log

TOKEN_BYTES = 24
"""Number of random bytes of the token in the address."""
DRAIN = 2.0
"""Seconds that running requests get after a stop; short, because their only reader stopped the server."""
REDIRECT = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Playground</title><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={0}"><p><a href="{0}">Playground</a></p></html>
"""
"""Text of a private file that sends the browser to the address: other users can see arguments, but not this file."""
DAY = 86_400.0
"""Seconds after which an unused session ends, one day: a page's sessions end with the page anyway."""


@takes_datastore
def run(
    bundle: Bundle,
    port: Annotated[int, typer.Option(help="0 for any that is free.")] = 0,
    tabs: Annotated[int, typer.Option(help="Pages that may be open at once; each has its own sessions.")] = 1,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    mixture: Mixture | None = None,
    backend: Backend = "auto",
    rows: Annotated[int | None, typer.Option(help="Sequences computed together. (default the bundle's B)")] = None,
) -> None:
    """Try a bundle on a page in the browser, on this machine alone: generate, see probabilities, go back."""
    require("playground", "serve", *NEEDED)
    from txl_deploy.serve.logs import Log
    from txl_deploy.serve.playground.tabs import REQUESTS, SESSIONS
    from txl_deploy.serve.settings import ServerSettings

    token = secrets.token_urlsafe(TOKEN_BYTES)
    settings = ServerSettings(
        bundle=bundle,
        port=port,
        token=token,
        backend=backend,
        rows=rows,
        mixture=mixture,
        tabs=tabs,
        local=True,
        sessions=SESSIONS * max(tabs, 1),
        waiting=REQUESTS * max(tabs, 1),
        idle_seconds=DAY,
        drain_seconds=DRAIN,
    )
    from txl_deploy.serve.server import serve

    with tempfile.TemporaryDirectory(prefix="txl-playground-", ignore_cleanup_errors=True) as private:

        def listens(url: str) -> None:
            address = f"{url}/playground?token={token}"
            log = Log(as_json=False)
            log.ready(f"{settings.served_name} is at {address} (for this machine alone; Ctrl-C ends it)")
            if open_page:
                page = Path(private) / "open.html"
                page.write_text(REDIRECT.format(html.escape(address)), "utf-8")
                threading.Thread(target=_open, args=(page.as_uri(), log), name="txl-browser", daemon=True).start()

        serve(settings, listens)


def _open(address: str, log: Log) -> None:
    """Open the address in a browser; a browser in the terminal blocks this thread until the user leaves it."""
    try:
        opened = webbrowser.open(address)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        log.say("no_browser", "note: no browser was found here; open the address in one")
