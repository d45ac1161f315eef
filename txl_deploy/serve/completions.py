"""POST /v1/completions: continuations of prompts, with log-probabilities, as one answer or as a stream of pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from txl_runtime.errors import TxlError
from txl_runtime.sessions import Busy, Event, Handle, Sessions
from txl_runtime.streaming.checks import shown

from txl_deploy.serve.bodies import read_json
from txl_deploy.serve.choices import Choice, Columns
from txl_deploy.serve.disconnects import unless_gone
from txl_deploy.serve.errors import ApiError, as_api_error, json_response
from txl_deploy.serve.orders import Order, boundary, read_order
from txl_deploy.serve.service import Noted, Service, noted_of, service_of

REQUEST_SECONDS = 600
"""Maximum seconds from a request's headers to the end of its computation; sending the answer may take longer."""
ENDED = {
    "timeout": (408, f"the request took more than {REQUEST_SECONDS} s, the most; ask for less"),
    "closed": (503, "the session or the server was closed before the end; try again"),
    "cancelled": (503, "the request was cancelled before its end; try again"),
}
"""For each reason that leaves an incomplete answer: the HTTP status and the message."""
AGAIN = 0.5
"""Maximum number of seconds between two attempts to submit a text that found no room in the runtime."""
QUEUED = 4
"""Maximum number of batches of events that wait for a client; if there are more, the request pauses."""


_Arrived: TypeAlias = "asyncio.Queue[tuple[int, list[Event]] | BaseException]"


async def completions(request: Request) -> Response:
    """POST /v1/completions: answer with continuations of the prompts, at once or as a stream."""
    service, noted = service_of(request), noted_of(request)
    order = read_order(await read_json(request), request.headers, service.model, service.settings)
    answer = _Answer(service, order, noted)
    await answer.submit()
    if order.stream:
        return _Streamed(answer)
    return await unless_gone(request.receive, answer.whole())


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions: refuse the request with advice, because many clients try this address first."""
    advice = "a bundle has no chat template, expected a text that goes on; put the messages into one prompt, and use "
    raise ApiError(404, f"{advice}POST /v1/completions", code="no_chat_template")


class _Answer:
    """The answer to one request while its texts are computed."""

    def __init__(self, service: Service, order: Order, noted: Noted) -> None:
        self._service, self._order, self._noted = service, order, noted
        self._choices: list[Choice] = []
        self._tickets: dict[int, Handle] = {}
        self._created = int(time.time())

    async def submit(self) -> None:
        """Submit the first texts to the runtime, at most one per row, so that other requests are served in between.

        Raises:
            ApiError: a text is refused; the texts before it are cancelled.
        """
        order, service = self._order, self._service
        if order.session is not None and not len(order.prompts[0]):
            self._order = order = await self._begun(order)
        prompts = [prompt for prompt in order.prompts for _ in range(order.many)]
        self._choices = [Choice(order, prompt, service.pieces) for prompt in prompts]
        self._noted.prompt_tokens = sum(len(prompt) for prompt in order.prompts)
        try:
            for index in range(min(len(prompts), service.settings.rows or service.model.batch_size)):
                await self._submit(index)
        except BaseException as error:
            self.cancel()
            if isinstance(error, TxlError):
                raise as_api_error(error) from None
            raise

    async def _submit(self, index: int, patient: bool = False) -> None:
        """Submit one text to the runtime. If `patient`, wait for room until the request's time is over."""
        service, order = self._service, self._order
        while True:
            left = REQUEST_SECONDS - (time.monotonic() - self._noted.began)
            if left <= 0:
                raise _ended("timeout")
            try:
                wanted = order.request(index, service.pieces, left, service.settings.lookup, service.datastore)
                self._tickets[index] = await service.front.submit(wanted, order.session, self._look)
                return
            except Busy as error:
                if not patient:
                    raise
                await asyncio.sleep(min(error.retry_after, AGAIN))

    def _look(self, sessions: Sessions) -> None:
        """Refuse a request if its session has not read the number of positions that the client states.

        A request of a tab that has too many sessions or requests is refused, too.
        """
        order = self._order
        self._service.tabs.check(order.session, sessions, asking=True)
        if order.session is None or order.seen is None:
            return
        info = sessions.info(order.session) if order.session in sessions else None
        seen = 0 if info is None else info.seen
        if seen != order.seen or (info is not None and info.running):
            raise ApiError(
                409,
                f"the session has seen {seen} positions{' and goes on' if info and info.running else ''}, expected "
                f"{shown(order.seen)}; look at GET /v1/sessions/NAME, and begin it anew or go on from there",
                "session_seen",
                "session_elsewhere",
            )

    async def _begun(self, order: Order) -> Order:
        """Replace an empty prompt of a new session by the boundary token; an existing session continues without it."""
        known = await self._service.front.call(lambda sessions: order.session in sessions)
        return order if known else replace(order, prompts=(boundary(self._service.model),))

    def cancel(self) -> None:
        """Cancel the texts that are still running."""
        for ticket in self._tickets.values():
            ticket.cancel()
        self._noted.completion_tokens = sum(choice.drawn for choice in self._choices)

    async def whole(self) -> Response:
        """Return the complete answer as one JSON document."""
        texts = [list[str]() for _ in self._choices]
        columns = [Columns(self._order.ids) for _ in self._choices]
        async with aclosing(self._progress()) as progress:
            async for index in progress:
                texts[index].append(self._choices[index].part(columns[index]))
        documents = [
            self._document(index, "".join(text), columns[index], choice.reason)
            for index, (text, choice) in enumerate(zip(texts, self._choices, strict=True))
        ]
        return json_response({**self._head(), "choices": documents, "usage": self._usage(), **self._standing()})

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events; an error after the first event is sent as the last event.

        Raises:
            TxlError: an error before the first event.
        """
        head, begun = self._head(), False
        usage = {"usage": None} if self._order.usage else {}
        try:
            async with aclosing(self._progress()) as progress:
                async for index in progress:
                    choice, columns = self._choices[index], Columns(self._order.ids)
                    text = choice.part(columns)
                    if text or columns or choice.reason:
                        begun = True
                        document = self._document(index, text, columns, choice.reason or None)
                        standing = self._standing() if choice.reason else {}
                        yield _event({**head, "choices": [document], **usage, **standing})
            if self._order.usage:
                yield _event({**head, "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except TxlError as error:
            if not begun:
                raise
            yield _event(as_api_error(error).document())

    async def _progress(self) -> AsyncGenerator[int, None]:
        """Yield the index of a text whenever the text has new events, until all texts have ended."""
        if len(self._choices) == 1:  # a single text needs no queue
            try:
                async for batch in self._tickets[0].batches():
                    self._take(0, batch)
                    yield 0
                    self._check(0)
            finally:
                self.cancel()
            return
        arrived: _Arrived = asyncio.Queue(QUEUED)
        rest = iter(range(len(self._tickets), len(self._choices)))
        lanes = [asyncio.create_task(self._lane(index, rest, arrived)) for index in self._tickets]
        try:
            running = len(self._choices)
            while running:
                event = await arrived.get()
                if isinstance(event, BaseException):
                    raise event
                index, events = event
                self._take(index, events)
                yield index
                self._check(index)
                running -= bool(self._choices[index].ended)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
            self.cancel()

    async def _lane(self, index: int, rest: Iterator[int], arrived: _Arrived) -> None:
        """Put the events of a text into `arrived`, then submit the next text of `rest`, until no text is left."""
        try:
            while index >= 0:
                async for events in self._tickets[index].batches():
                    await arrived.put((index, events))
                index = next(rest, -1)
                if index >= 0:
                    await self._submit(index, patient=True)
        except Exception as error:  # `_progress`, which reads the queue, raises it
            await arrived.put(error)

    def _take(self, index: int, events: list[Event]) -> None:
        choice = self._choices[index]
        for event in events:
            choice.take(event)
        if self._noted.first_seconds is None and choice.drawn:
            self._noted.first_seconds = time.monotonic() - self._noted.began

    def _check(self, index: int) -> None:
        """Raise the error of a text that ended before it was complete."""
        ended = self._choices[index].ended
        if ended == "error":
            failure = self._tickets[index].ticket.error
            error = as_api_error(failure or TxlError("the session failed; begin it again"))
        elif ended in ENDED:
            error = _ended(ended)
        else:
            return
        error.repeatable = self._order.session is None
        raise error

    def _standing(self) -> dict[str, Any]:
        """Return the field with the session's position, which the client can compare with its own count."""
        name = self._order.session
        return {} if name is None else {"session": {"name": name, "seen": self._choices[0].seen}}

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._noted.id}",
            "object": "text_completion",
            "created": self._created,
            "model": self._service.settings.served_name,
        }

    def _document(self, index: int, text: str, columns: Columns, reason: str | None) -> dict[str, Any]:
        logprobs = None if self._order.logprobs is None else columns.document()
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        read, drawn = sum(len(p) for p in self._order.prompts), sum(choice.drawn for choice in self._choices)
        return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


class _Streamed(Response):
    """An answer as server-sent events, which ends when the client disconnects."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        started = False
        async with aclosing(self._answer.pieces()) as pieces:
            async for piece in pieces:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _ended(reason: str) -> ApiError:
    """Return the error for a request that ended early."""
    status, message = ENDED[reason]
    return ApiError(status, message, code=reason)


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
