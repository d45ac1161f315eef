"""Run the server from start to end: socket, model, sessions, self-test, then requests, then draining."""

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
from txl_runtime.sessions import AsyncSessions, Sessions
from txl_runtime.sessions.checkpoint import Checkpoint
from txl_runtime.sessions.state import largest_state
from txl_runtime.streaming.texts import TokenTexts

from txl_deploy import stopping
from txl_deploy.loading import load_alone
from txl_deploy.serve.app import make_app
from txl_deploy.serve.health import Health
from txl_deploy.serve.keeping import Keeping
from txl_deploy.serve.logs import Log
from txl_deploy.serve.metrics import Metrics
from txl_deploy.serve.service import Service
from txl_deploy.serve.settings import ServerSettings
from txl_deploy.serve.supervision import tell_manager

BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""
CONNECTIONS = 512
"""Open connections from which on requests get 503."""
KEEP_ALIVE = 30
"""Seconds for which a connection stays open without a request after an answer."""
HEADER_BYTES = 1 << 15
"""Most bytes of an incomplete request line and headers."""
LAST_WORDS = 2
"""Seconds in which the last answers go out, once no request runs any more."""
LOOK = 0.02
"""Seconds between two checks for running requests while draining."""


def serve(settings: ServerSettings, listens: Callable[[str], None] | None = None) -> None:
    """Serve until a signal arrives.

    Args:
        listens: called with the address once requests are answered; without it the log reports it.

    Raises:
        UsageError: an option, the port or the token is not usable.
        TxlError: the bundle, its engine or the checkpoint is not.
        CheckError: the self-test did not pass.
    """
    settings.require_token()
    log = Log(settings.json_logs)
    for name in ("uvicorn", "asyncio"):  # errors are reported by this server's own log
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
        sessions = stack.enter_context(Sessions(model, settings.rows, settings.limits))
        checkpoint = None
        if settings.checkpoint_dir is not None:
            checkpoint = stack.enter_context(Checkpoint(settings.checkpoint_dir, model.manifest.model_id))
        keeping = Keeping(log, checkpoint)
        keeping.restore(sessions)
        asyncio.run(_serve(settings, log, listening, model, sessions, keeping, listens))


async def _serve(
    settings: ServerSettings,
    log: Log,
    listening: socket.socket,
    model: Model,
    sessions: Sessions,
    keeping: Keeping,
    listens: Callable[[str], None] | None,
) -> None:
    stop = asyncio.Event()
    gc.freeze()  # the objects that exist now stay
    gc.set_threshold(50_000, 20, 20)  # else the collector scans a large body repeatedly while it is read
    with _signals(stop, log):
        stopping.require_going()  # a signal so far may have been dropped; from now on none is
        async with AsyncSessions(sessions) as front:
            service = _service(settings, model, front, keeping)
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
        # Requests that still ran have ended, each session after a whole step.
        server.should_exit = True
        await serving
        if failed:  # its state may be half-written, but the last checkpoint is whole
            raise CheckError("the thread of the sessions failed, expected it to run; start the server again")
        await keeping.end(sessions)
    log.say("stopped", "stopped")


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers, and with a call when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers unchanged."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and report that."""
        await super().startup(sockets)
        self._ready()


def _service(settings: ServerSettings, model: Model, front: AsyncSessions, keeping: Keeping) -> Service:
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
    """Return a listening socket; clients that connect before the model is loaded wait for it.

    Raises:
        UsageError: the port is taken, or the host is not this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share the port
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
    asked = "with a token" if settings.token is not None else "without a token"
    log.ready(
        f"serving {settings.served_name} at {url}: model {manifest.model_id[:12]}, {manifest.precision}, "
        f"{rows} {'row' if rows == 1 else 'rows'}, {model.backend.description}, self-test passed; "
        f"{service.keeping.standing}{who}, {asked}",
        url=url,
        model=settings.served_name,
        model_id=manifest.model_id,
        precision=manifest.precision,
        rows=rows,
        backend=model.backend.description,
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
                os._exit(130)  # files are whole at every moment
            interrupted = True
        loop.call_soon_threadsafe(stop.set)

    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:  # `nohup` ignores it
        numbers.append(hangup)
    before = {number: signal.signal(number, told) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _drain(settings: ServerSettings, log: Log, service: Service) -> None:
    """Accept no more requests, and wait for the running ones."""
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
