"""Serve a model that generates: one request with a prompt, and a response for each drawn token.

Requests of many clients share the rows of one stream (`txl_runtime.sessions`), whose rounds run in a separate thread;
the server's thread only receives requests. A request with a correlation id continues with the memory that the id's
earlier requests left, unless this memory was unused for too long. START empties the memory first, END frees it
afterwards, even if the request itself is refused. A request whose client cannot be reached is cancelled; all other
requests go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import txl_runtime
from txl_runtime.errors import TxlError, one_line
from txl_runtime.sessions import Busy, Finished, Limits, Request, Sampling, Sessions, Ticket, Token

from txl_deploy.triton.inside.conversations import Conversations, flag_of, id_of

logger = logging.getLogger(__name__)
LOOK = 0.5
"""Seconds between two checks whether a request's client still waits; each check is a message to the server."""
SEEDS = 1 << 63
"""Seeds are reduced modulo 2**63, so that any integer is valid."""


def open_model(bundle: Path, parameters: Mapping[str, str], server: Any) -> Generating:
    """Load a bundle and serve it.

    Raises:
        TxlError: the bundle cannot be loaded on this machine.
    """
    model = txl_runtime.load(bundle, backend=parameters["backend"], threads=int(parameters["threads"]))
    limits = Limits(sessions=int(parameters["sessions"]), idle_seconds=float(parameters["idle_seconds"]))
    return Generating(Sessions(model, limits=limits), server, model.manifest.boundary_token)


@dataclass(eq=False)
class ServerRequest:
    """A request received from the server.

    Attributes:
        request: the request in the form of `txl_runtime.sessions`.
        name: the correlation id as text; None if the request has none, and its session ends with the request.
        start, end: the request's flags START and END.
        sender: the server's object that sends responses.
        wanted: names of the outputs that the client wants.
        session: name of the session in which the request runs, set when submitted; "" if the session has no name.
        ticket: the sessions' ticket, set when submitted.
        looked: time of the last check whether the client still waits.
    """

    request: Request
    name: str | None
    start: bool
    end: bool
    sender: Any
    wanted: frozenset[str]
    session: str = ""
    ticket: Ticket | None = None
    looked: float = 0.0


class Generating:
    """The requests of one model, which all run at the same time.

    Args:
        boundary: the token that replaces an empty prompt of a new session; None if there is none.
    """

    def __init__(self, sessions: Sessions, server: Any, boundary: int | None = None) -> None:
        self._sessions, self._server, self._boundary = sessions, server, boundary
        self._conversations = Conversations(sessions)
        self._arrived: SimpleQueue[ServerRequest | None] = SimpleQueue()
        self._running: list[ServerRequest] = []
        self._failed = ""
        self._thread = Thread(target=self._serve, name="rounds", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Receive requests; a separate thread answers them later."""
        for request in requests:
            sender = request.get_response_sender()
            if self._failed:
                self._refuse(sender, f"{self._failed}; expected rounds to go on, load the model again", "INTERNAL")
                continue
            try:
                self._arrived.put(self._read(request, sender))
            except TxlError as error:
                self._refuse(sender, str(error), "INVALID_ARG")
        if self._failed:  # the thread failed during this call
            self._refuse_arrived()

    def close(self) -> None:
        """End all requests, and then the thread."""
        self._arrived.put(None)
        self._thread.join()

    def _read(self, request: Any, sender: Any) -> ServerRequest:
        """Translate a request into the sessions' form; the sessions check its values.

        Values that other servers treat as "not given", such as top_k 0, are treated so here, too.
        """
        settings = {
            name: tensor.as_numpy().copy()
            for name in ("tokens", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop_tokens")
            if (tensor := self._server.get_input_tensor_by_name(request, name)) is not None
        }
        single = {name: array.ravel()[0].item() for name, array in settings.items() if array.size}
        options = {name: single[name] for name in ("temperature", "top_k", "top_p", "seed") if name in single}
        if options.get("top_k") in (-1, 0):
            del options["top_k"]
        if options.get("top_p") == 1:
            del options["top_p"]
        if "seed" in options:
            options["seed"] %= SEEDS
        wanted = frozenset(request.requested_output_names())
        asked = Request(
            tokens=settings["tokens"].ravel(),
            max_new_tokens=single.get("max_new_tokens", 0),
            sampling=Sampling(**options),
            stop_tokens=settings["stop_tokens"].ravel().tolist() if "stop_tokens" in settings else (),
            top_logprobs=0 if "logprobs" in wanted else None,
        )
        start, end = flag_of(request, "START", self._server), flag_of(request, "END", self._server)
        return ServerRequest(asked, id_of(request) or None, start, end, sender, wanted)

    def _serve(self) -> None:
        """Run rounds while there are requests; this is the thread's main function."""
        try:
            while self._take_in():
                self._sessions.round()
                self._answer()
            self._sessions.shut()
            self._answer()
        except Exception as error:  # a defect must not leave clients waiting for answers
            self._failed = f"rounds ended with {type(error).__name__}: {error}"
            for asked in self._running:
                self._refuse(asked.sender, self._failed, "INTERNAL")
            self._refuse_arrived()
            raise

    def _refuse_arrived(self) -> None:
        """Refuse requests that arrived after the thread failed."""
        with contextlib.suppress(Empty):
            while True:
                asked = self._arrived.get_nowait()
                if asked is not None:
                    self._refuse(asked.sender, self._failed, "INTERNAL")

    def _take_in(self) -> bool:
        """Submit the requests that have arrived, waiting if none runs; return False if the model is to be closed."""
        wait = not self._running
        while True:
            try:
                asked = self._arrived.get(wait, self._sessions.due() if wait else None)
            except Empty:
                return True
            if asked is None:
                return False
            wait = False
            try:
                self._submit(asked)
            except Busy as error:
                self._refuse(asked.sender, f"{error}; ask again in {error.retry_after:.1f} s", "UNAVAILABLE")
            except TxlError as error:
                self._refuse(asked.sender, str(error), "INVALID_ARG")
            # the request is answered here: whoever ends the running requests does not know it yet
            except Exception as error:
                self._refuse(asked.sender, f"rounds ended with {type(error).__name__}: {error}", "INTERNAL")
                raise
            if asked.end and asked.name is not None:
                self._conversations.end(asked.name)

    def _submit(self, asked: ServerRequest) -> None:
        request = asked.request
        if asked.name is not None:
            asked.session = self._conversations.session_of(asked.name, asked.start)
        if self._boundary is not None and not np.size(request.tokens) and asked.session not in self._sessions:
            request = dataclasses.replace(request, tokens=[self._boundary])
        asked.ticket = self._sessions.submit(request, asked.session or None)
        self._running.append(asked)

    def _answer(self) -> None:
        """Send new events to clients, and forget finished requests."""
        now = time.monotonic()
        for asked in self._running:
            assert asked.ticket is not None
            try:
                if now - asked.looked > LOOK:
                    asked.looked = now
                    if asked.sender.is_cancelled():
                        asked.ticket.cancel()
                events = asked.ticket.events()
                if events:
                    self._send(asked, [event for event in events if isinstance(event, Token)], events[-1])
            except Exception as error:  # the server cannot reach this client; the other requests go on
                asked.ticket.cancel()
                self._refuse(asked.sender, _unsent(error), "INTERNAL")
        self._running = [asked for asked in self._running if asked.ticket is not None and not asked.ticket.done]
        self._conversations.close_ended([asked.session for asked in self._running])

    def _send(self, asked: ServerRequest, tokens: Sequence[Token], last: object) -> None:
        """Send a response with some tokens and, if the request has ended, the reason of its end."""
        error = None if asked.ticket is None else asked.ticket.error
        if error is not None:
            self._refuse(asked.sender, str(error), "INTERNAL")
            return
        reason = last.reason if isinstance(last, Finished) else ""
        arrays = {
            "tokens": np.array([token.id for token in tokens], np.int32),
            "logprobs": np.array([token.logprob for token in tokens if token.logprob is not None], np.float32),
            "finish_reason": np.array([reason.encode()], np.object_),
        }
        outputs = [self._server.Tensor(name, array) for name, array in arrays.items() if name in asked.wanted]
        response = self._server.InferenceResponse(output_tensors=outputs)
        asked.sender.send(response, self._server.TRITONSERVER_RESPONSE_COMPLETE_FINAL if reason else 0)

    def _refuse(self, sender: Any, message: str, code: str) -> None:
        """Send an error as the last response; if the client cannot be reached, only log this."""
        try:
            error = self._server.TritonError(message, getattr(self._server.TritonError, code))
            response = self._server.InferenceResponse(output_tensors=[], error=error)
            sender.send(response, self._server.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            logger.warning("%s", _unsent(error))


def _unsent(error: Exception) -> str:
    message = f"{type(error).__name__}: {one_line(error)}"
    return f"a response could not be sent ({message}), expected the server to take it; the request was ended, ask again"
