"""Run the server from start to end: socket, model, sessions, self-test, requests, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.model import Model
from txl_runtime.native.opening import STEP
from txl_runtime.sessions import AsyncSessions, Sessions
from txl_runtime.sessions.checkpoint import Checkpoint
from txl_runtime.sessions.state import largest_state
from txl_runtime.streaming.datastore import Datastore
from txl_runtime.streaming.inputs import require_tokens
from txl_runtime.streaming.lookup import longest_draft
from txl_runtime.streaming.partial import Parts
from txl_runtime.streaming.texts import TokenTexts

from txl_deploy import stopping
from txl_deploy.loading import load_alone
from txl_deploy.retrieval.store import open_store
from txl_deploy.serve.app import make_app
from txl_deploy.serve.health import Health
from txl_deploy.serve.keeping import Keeping
from txl_deploy.serve.logs import Log
from txl_deploy.serve.metrics import Metrics
from txl_deploy.serve.service import Service
from txl_deploy.serve.settings import ServerSettings
from txl_deploy.serve.supervision import tell_manager

BACKLOG = 2048
"""Maximum number of connections that the system keeps before they are accepted."""
CONNECTIONS = 512
"""Number of open connections at which further requests get status 503."""
KEEP_ALIVE = 30
"""Seconds for which a connection stays open after an answer without a new request."""
HEADER_BYTES = 1 << 15
"""Maximum size in bytes, 32 KiB, of a request line and headers that are not complete yet."""
LAST_WORDS = 2
"""Seconds for sending the last answers after the last request has ended."""
LOOK = 0.02
"""Seconds between two checks whether requests still run, while the server drains."""


def serve(settings: ServerSettings, listens: Callable[[str], None] | None = None) -> None:
    """Serve until a signal arrives.

    Args:
        settings: the server's options.
        listens: a function that is called with the server's address as soon as requests are answered; None to log the
            address.

    Raises:
        UsageError: an option, the port or the token cannot be used.
        TxlError: the bundle, its engine or the checkpoint cannot be used.
        CheckError: the self-test did not pass.
    """
    settings.require_token()
    log = Log(settings.json_logs)
    for name in ("uvicorn", "asyncio"):  # silenced, because this server's own log reports errors
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(_listen(settings.host, settings.port))
        model = load_alone(settings.bundle, backend=settings.backend, threads=settings.threads)
        if settings.local and not model.manifest.can.read_text:
            raise UsageError(
                f"{settings.bundle}: the model reads named arrays, or returns no log-probabilities, expected one that "
                "continues tokens; serve it, and use POST /v1/sessions/NAME/run"
            )
        if settings.lookup:
            require_tokens(model.manifest, "serve --lookup")
        longest_draft(settings.lookup, model.manifest, Parts(model.manifest, model.manifest.states_of(model.update)))
        datastore = open_store(model, settings.mixture)
        sessions = stack.enter_context(Sessions(model, settings.rows, settings.limits))
        checkpoint = None
        if settings.checkpoint_dir is not None:
            checkpoint = stack.enter_context(Checkpoint(settings.checkpoint_dir, model.manifest.model_id))
        keeping = Keeping(log, checkpoint)
        keeping.restore(sessions)
        asyncio.run(_serve(settings, log, listening, model, datastore, sessions, keeping, listens))


async def _serve(
    settings: ServerSettings,
    log: Log,
    listening: socket.socket,
    model: Model,
    datastore: Datastore | None,
    sessions: Sessions,
    keeping: Keeping,
    listens: Callable[[str], None] | None,
) -> None:
    stop = asyncio.Event()
    gc.freeze()  # objects that exist now live as long as the server
    gc.set_threshold(50_000, 20, 20)  # by default the collector scans a large body again and again while it is read
    with _signals(stop, log):
        stopping.require_going()  # a signal may have been dropped before; later signals are not dropped
        async with AsyncSessions(sessions) as front:
            service = _service(settings, model, datastore, front, keeping)
            if problem := await service.health.problem():
                raise CheckError(f"the self-test did not pass: {problem}; it is not served")
            server = _Server(_config(service, log), lambda: _ready(log, settings, service, listening, listens))
            serving = asyncio.create_task(server.serve([listening]))
            upkeep = asyncio.create_task(keeping.go_on(settings, front))
            signalled, failing = asyncio.create_task(stop.wait()), asyncio.create_task(front.ended())
            await asyncio.wait((serving, signalled, failing), return_when=asyncio.FIRST_COMPLETED)
            failed = failing.done()
            await _drain(settings, log, service)
            for task in (upkeep, signalled, failing):
                task.cancel()
            await asyncio.gather(upkeep, signalled, failing, return_exceptions=True)
        # All requests have ended by now, each session after a whole step.
        server.should_exit = True
        await serving
        if failed:  # a state may be half written, but the last checkpoint is whole
            raise CheckError("the thread of the sessions failed, expected it to run; start the server again")
        await keeping.end(sessions)
    log.say("stopped", "stopped")


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which calls `ready` when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers unchanged."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections, and call `ready` afterwards."""
        await super().startup(sockets)
        self._ready()


def _service(
    settings: ServerSettings, model: Model, datastore: Datastore | None, front: AsyncSessions, keeping: Keeping
) -> Service:
    table = model.manifest.states_of(model.update)
    return Service(
        settings=settings,
        model=model,
        front=front,
        health=Health(model),
        metrics=Metrics(model),
        keeping=keeping,
        pieces=TokenTexts(model.vocabulary),
        created=int(time.time()),
        largest_state=largest_state(model.manifest, table),
        datastore=datastore,
    )


def _config(service: Service, log: Log) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(service, log),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=LAST_WORDS,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; clients that connect before the model is loaded have to wait.

    Raises:
        UsageError: the port is in use, or the host is not this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # on Windows this option would let two servers share the port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise UsageError(
            f"cannot listen on {host} port {port} ({error.strerror or error}), expected a free port of this machine; "
            "choose another --port, or 0 for any"
        ) from None
    return listening


def _ready(
    log: Log,
    settings: ServerSettings,
    service: Service,
    listening: socket.socket,
    listens: Callable[[str], None] | None,
) -> None:
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    tell_manager("READY=1")
    if listens is not None:
        listens(url)
        return
    manifest, model = service.model.manifest, service.model
    rows = settings.rows or model.batch_size
    who = "for this machine alone" if settings.loopback else "for other machines too"
    without = model.backend_notes.get("native", "") if STEP in manifest.files else ""
    engine = model.backend.description + (f" (not its step in C: {without})" if without else "")
    store = None if settings.mixture is None or service.datastore is None else settings.mixture.folder
    mixed = "" if store is None else f"neighbours of {store} mixed in, "
    asked = "with a token" if settings.token is not None else "without a token"
    log.ready(
        f"serving {settings.served_name} at {url}: model {manifest.model_id[:12]}, {manifest.precision}, "
        f"{rows} {'row' if rows == 1 else 'rows'}, {engine}, {mixed}self-test passed; "
        f"{service.keeping.standing}{who}, {asked}",
        url=url,
        model=settings.served_name,
        model_id=manifest.model_id,
        precision=manifest.precision,
        rows=rows,
        backend=model.backend.description,
        datastore=None if store is None else str(store),
        loopback=settings.loopback,
        token=settings.token is not None,
        sessions_restored=service.keeping.restored,
        sessions_lost=service.keeping.lost,
        process=os.getpid(),
    )


@contextlib.contextmanager
def _signals(stop: asyncio.Event, log: Log) -> Iterator[None]:
    """Stop the server in order on SIGTERM, SIGINT or a closed terminal; a second SIGINT ends the process at once."""
    loop, interrupted = asyncio.get_running_loop(), False

    def told(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if number == signal.SIGINT:
            if interrupted:
                os._exit(130)  # safe, because files are whole at every moment
            interrupted = True
        loop.call_soon_threadsafe(stop.set)

    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows does not have this signal
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:  # `nohup` ignores it
        numbers.append(hangup)
    before = {number: signal.signal(number, told) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _drain(settings: ServerSettings, log: Log, service: Service) -> None:
    """Refuse new requests, and wait at most `drain_seconds` until the running requests have ended."""
    tell_manager("STOPPING=1")
    service.draining = True
    service.tabs.close()
    running, until = service.running, time.monotonic() + settings.drain_seconds
    log.say(
        "draining",
        f"stopping: {running} requests are given {settings.drain_seconds:g} s",
        running=running,
        seconds=settings.drain_seconds,
    )
    while service.running and time.monotonic() < until:
        await asyncio.sleep(LOOK)
