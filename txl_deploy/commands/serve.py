"""`txl-deploy serve`: serve many sessions of a bundle through an HTTP interface that OpenAI's clients know."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from txl_runtime.errors import UsageError

from txl_deploy.commands.options import Backend, Bundle, takes_datastore
from txl_deploy.extras import require
from txl_deploy.retrieval import Mixture

NEEDED = ("starlette", "uvicorn", "prometheus_client")
"""Packages that the server needs besides the packages of the runtime."""
TOKEN = "TXL_DEPLOY_TOKEN"  # noqa: S105 - the variable's name
"""Environment variable that holds the token, if no option gives it."""
LONGEST_TOKEN = 4096
"""Maximum size of a token's file in bytes."""


@takes_datastore
def run(
    bundle: Bundle,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any that is free.")] = 8000,
    token: Annotated[
        str | None, typer.Option(help=f"What requests have to show. Other users see it here: better {TOKEN} or a file.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model. (default the bundle's name)")] = None,
    backend: Backend = "auto",
    threads: Annotated[int, typer.Option(help="Of the engine; one is mostly best, 0 for one per core.")] = 1,
    rows: Annotated[int | None, typer.Option(help="Sequences computed together. (default the bundle's B)")] = None,
    lookup: Annotated[int, typer.Option(help="Most tokens of a draft from a session's text; 0 is off.")] = 0,
    mixture: Mixture | None = None,
    max_sessions: Annotated[int, typer.Option(help="Sessions that exist at once.")] = 1024,
    max_waiting: Annotated[int, typer.Option(help="Requests that wait for a row; more are told to come later.")] = 256,
    session_bytes: Annotated[int, typer.Option(help="Memory for sessions that rest.")] = 1 << 30,
    idle_seconds: Annotated[float, typer.Option(help="After which an unused session ends.")] = 3600.0,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Keep all sessions here over a restart.")] = None,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between two checkpoints.")] = 60.0,
    drain_seconds: Annotated[float, typer.Option(help="For running requests when told to stop.")] = 30.0,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Every line is JSON, one per request too.")] = False,
) -> None:
    """Serve a bundle over HTTP as OpenAI's clients expect it: many sessions, each with its own memory."""
    require("serve", "serve", *NEEDED)
    from txl_deploy.serve.settings import ServerSettings

    settings = ServerSettings(
        bundle=bundle,
        host=host,
        port=port,
        token=_token(token, token_file),
        name=name,
        backend=backend,
        threads=threads or None,
        rows=rows,
        lookup=lookup,
        mixture=mixture,
        sessions=max_sessions,
        waiting=max_waiting,
        session_bytes=session_bytes,
        idle_seconds=idle_seconds,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        drain_seconds=drain_seconds,
        json_logs=json_logs,
    )
    from txl_deploy.serve.server import serve

    serve(settings)


def _token(option: str | None, file: Path | None) -> str | None:
    """Return the token from the option, the file or the environment; None if there is none.

    Raises:
        UsageError: the option and the file are both given, or the file cannot be read.
    """
    if option is not None and file is not None:
        raise UsageError("--token and --token-file are both given, expected one; the file is seen by fewer people")
    if file is None:
        return os.environ.get(TOKEN) if option is None else option
    try:
        with file.open("rb") as opened:
            data = opened.read(LONGEST_TOKEN + 1)
        if len(data) > LONGEST_TOKEN:
            raise UsageError(f"{file}: more than {LONGEST_TOKEN} bytes, expected one token; write a shorter one")
        return data.decode("ascii").strip()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}, expected a file with the token; check it") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not ASCII, expected one token; choose letters and digits") from None
