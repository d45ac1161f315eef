"""Endpoints of named sessions: information, reading and setting states, and running arrays for models without text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct
from safetensors.numpy import save
from starlette.requests import Request
from starlette.responses import Response
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Output
from txl_runtime.errors import one_line, todo_about
from txl_runtime.sessions import Finished, Handle, Outputs, Sessions, SessionState, joined
from txl_runtime.sessions import Request as SessionRequest
from txl_runtime.streaming.checks import shown
from txl_runtime.streaming.state_files import tensors_of
from txl_runtime.types import Array

from txl_deploy.serve.bodies import BODY_BYTES, content_type, read_body, read_json
from txl_deploy.serve.completions import ENDED, REQUEST_SECONDS
from txl_deploy.serve.disconnects import unless_gone
from txl_deploy.serve.errors import ApiError, as_api_error, json_response
from txl_deploy.serve.orders import decode
from txl_deploy.serve.service import noted_of, service_of
from txl_deploy.serve.session_header import session_of
from txl_deploy.serve.settings import check_session_name

BYTES = "application/octet-stream"
"""Content type of a session's state."""
SAFETENSORS = "application/vnd.safetensors"
"""Content type of inputs and outputs as a safetensors file."""
VALUES = 1 << 21
"""Maximum number of values in one answer; as JSON, a value takes about twenty bytes."""
LEAVES: dict[str, tuple[type, type]] = {
    "float32": (float, np.float32),
    "int32": (int, np.int64),
    "bool": (bool, np.bool_),
}
"""For each type of an input: (type of the numbers in nested lists, type of the array made from them)."""
STATE_SPARE = 1 << 16
"""Number of bytes that a state's file may have besides its arrays, for names, shapes and the model id."""


class RunBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/sessions/NAME/run as JSON: for each input, nested lists of one sequence (B = 1)."""

    inputs: dict[str, Raw]


class CopyBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/sessions/NAME/copy: `to` is the session that gets the memory."""

    to: str


async def sessions(request: Request) -> Response:
    """GET /v1/sessions: all named sessions, each with the fields of `SessionInfo`.

    `pending` is the id of the last drawn token, which the next request reads first. `waiting` is the number of the
    session's requests that wait.
    """
    infos = await service_of(request).front.call(lambda kept: [kept.info(name) for name in kept.names()])
    return json_response({"object": "list", "data": [{"object": "session", **asdict(info)} for info in infos]})


async def session(request: Request) -> Response:
    """GET /v1/sessions/NAME: one session, with the fields of `SessionInfo`."""
    name, service = _name(request), service_of(request)
    info = await service.front.call(lambda kept: kept.info(name) if name in kept else None)
    if info is None:
        raise _unknown(name)
    return json_response({"object": "session", **asdict(info)})


async def end_session(request: Request) -> Response:
    """DELETE /v1/sessions/NAME: end the session and its requests, and free its memory."""
    name, service = _name(request), service_of(request)

    def close(kept: Sessions) -> bool:
        there = name in kept
        if there:
            kept.close(name)
        return there

    if not await service.front.call(close):
        raise _unknown(name)
    return json_response({"object": "session", "name": name, "deleted": True})


async def cancel(request: Request) -> Response:
    """POST /v1/sessions/NAME/cancel: end the session's requests at once; the session keeps everything that it has read.

    The answer of a streamed request has the tokens drawn so far, and then an error with the code "cancelled".
    """
    name, service = _name(request), service_of(request)
    ended = await service.front.call(lambda kept: kept.cancel(name) if name in kept else None)
    if ended is None:
        raise _unknown(name)
    return json_response({"object": "session", "name": name, "cancelled": ended})


async def copy(request: Request) -> Response:
    """POST /v1/sessions/NAME/copy with {"to": OTHER}: give OTHER, new or existing, the memory of NAME."""
    name, service = _name(request), service_of(request)
    to = check_session_name(decode(await read_json(request), CopyBody).to)

    def put(kept: Sessions) -> SessionState | None:
        if name not in kept:
            return None
        service.tabs.check(to, kept)
        _check_rests(to, kept)
        copied = kept.take(name)
        kept.put(to, copied)
        return copied

    copied = await service.front.call(put)
    if copied is None:
        raise _unknown(name)
    return json_response({"object": "session", "name": to, "seen": copied.seen})


async def state(request: Request) -> Response:
    """GET /v1/sessions/NAME/state: the session's state as a safetensors file, which `StreamState.load` also reads."""
    name, service = _name(request), service_of(request)
    row_state = await service.front.call(lambda kept: kept.take(name) if name in kept else None)
    if row_state is None:
        raise _unknown(name)
    return Response(row_state.to_bytes(), media_type=BYTES)


async def set_state(request: Request) -> Response:
    """PUT /v1/sessions/NAME/state: begin the session with the state in the body, or replace its state by it."""
    name, service = _name(request), service_of(request)
    most = max(BODY_BYTES, service.largest_state + STATE_SPARE)
    new_state = SessionState.from_bytes(await read_body(request, most), "the state")

    def put(kept: Sessions) -> None:
        service.tabs.check(name, kept)
        _check_rests(name, kept)
        kept.put(name, new_state)

    await service.front.call(put)
    return json_response({"object": "session", "name": name, "seen": new_state.seen})


async def run(request: Request) -> Response:
    """POST /v1/sessions/NAME/run: run input arrays, and answer with output arrays in the request's content type."""
    name, service = _name(request), service_of(request)
    plain = content_type(request) != SAFETENSORS
    if plain:
        inputs = _arrays(decode(await read_json(request), RunBody).inputs, service.model.manifest)
    else:
        inputs = tensors_of(await read_body(request), "the inputs")[1]
    _check_size(inputs, service.model.manifest)
    asked = SessionRequest(inputs=inputs, seconds=REQUEST_SECONDS)
    ticket = await service.front.submit(asked, name, lambda kept: service.tabs.check(name, kept, asking=True))
    try:
        outputs, fed = await unless_gone(request.receive, _outputs(ticket, service.model.manifest.outputs))
    finally:
        ticket.cancel()
    noted_of(request).prompt_tokens = fed
    if not plain:
        return Response(
            save({key: np.ascontiguousarray(array) for key, array in outputs.items()}), media_type=SAFETENSORS
        )
    document = {"outputs": {key: array.tolist() for key, array in outputs.items()}, "positions": fed}
    return json_response({"object": "session.run", **document})


def _check_size(inputs: Mapping[str, Array], manifest: Manifest) -> None:
    """Refuse inputs whose outputs would not fit into one answer. The runtime checks that inputs fit the model.

    Raises:
        ApiError: the outputs would hold too many values.
    """
    positions = 1
    for entry in manifest.inputs:
        array = inputs.get(entry.name)
        if array is not None and entry.axes.positions and array.ndim == len(entry.shape):
            positions = max(positions, entry.axes.length(array) + entry.lookahead)
    each = sum(math.prod(output.sizes(1, 1)) for output in manifest.outputs)
    if positions * each > VALUES:
        raise ApiError(
            400,
            f"{positions} positions with {each} values each exceed {VALUES} values in one answer; send at most "
            f"{max(1, VALUES // each)} positions at once, the session goes on",
            "inputs",
        )


async def _outputs(ticket: Handle, table: Sequence[Output]) -> tuple[dict[str, Array], int]:
    """Return all outputs of a run by name, joined over its segments, and the number of positions that it read.

    Raises:
        ApiError: the run ended early.
    """
    segments: list[Outputs] = []
    fed = 0
    async for events in ticket.batches():
        for event in events:
            if isinstance(event, Outputs):
                segments.append(event)
            elif isinstance(event, Finished):
                fed = event.fed
                if event.reason in ENDED:
                    status, message = ENDED[event.reason]
                    error = ApiError(status, message, code=event.reason)
                    error.repeatable = False
                    raise error
    if ticket.ticket.error is not None:
        error = as_api_error(ticket.ticket.error)
        error.repeatable = False
        raise error
    return joined(segments, table) if segments else {}, fed


def _arrays(values: Mapping[str, Raw], manifest: Manifest) -> dict[str, Array]:
    """Turn nested lists into arrays. The parser knows the expected depth and number type, so it takes little memory.

    Raises:
        ApiError: an input is unknown, has a different depth, has values that are no numbers, or rows of unequal length.
    """
    table = {entry.name: entry for entry in manifest.given}
    arrays: dict[str, Array] = {}
    for name, raw in values.items():
        entry = table.get(name)
        if entry is None:
            todo = todo_about(name, table.keys() - values.keys())
            raise ApiError(400, f"inputs hold {shown(name)}, expected {', '.join(table)}; {todo}", "inputs")
        leaf, dtype = LEAVES.get(entry.dtype, LEAVES["float32"])
        kind: Any = leaf
        for _ in entry.shape:
            kind = list[kind]
        try:
            with np.errstate(over="ignore"):
                arrays[name] = np.asarray(msgspec.json.decode(raw, type=kind), dtype)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise ApiError(
                400,
                f"{name} is no array of {entry.dtype} {list(entry.shape)} ({one_line(error)}), expected nested lists "
                "with rows of the same length; check it",
                "inputs",
            ) from None
    return arrays


def _name(request: Request) -> str:
    name = session_of(request.headers, request.path_params["name"])
    assert name is not None
    return name


def _check_rests(name: str, sessions: Sessions) -> None:
    """Refuse to replace the state of a session while it has a request.

    Raises:
        ApiError: the session has a request.
    """
    if name in sessions and sessions.info(name).running:
        raise ApiError(
            409,
            "the session has a request under way, expected none; wait for its end, or DELETE the session",
            code="session_busy",
        )


def _unknown(name: str) -> ApiError:
    return ApiError(
        404,
        f"there is no session {name!r}, expected one that was used before; it may have expired",
        code="session_not_found",
    )
