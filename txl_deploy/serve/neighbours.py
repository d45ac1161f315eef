"""Show how a datastore changes the next token: the alternatives in the playground, and the neighbours that were found.

The answer contains passages that the store has read. So only the playground's server gives this answer, as it serves
one person on this machine.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from txl_runtime.errors import UsageError
from txl_runtime.streaming.datastore import entropies, mixed
from txl_runtime.streaming.sampling import best_first
from txl_runtime.types import Ids

from txl_deploy.retrieval.store import Store
from txl_deploy.serve.bodies import read_json
from txl_deploy.serve.errors import ApiError, json_response
from txl_deploy.serve.orders import check_model, decode, encode
from txl_deploy.serve.service import Service, service_of
from txl_deploy.serve.settings import TOP_LOGPROBS

TOKENS = 4096
"""Maximum number of tokens of a text, which is read from empty memory for each answer."""
MOST, BEFORE, AFTER = 32, 48, 16
"""Maximum number of neighbours in an answer; number of a passage's tokens before and after a neighbour's token."""


class NeighboursBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/neighbours.

    Attributes:
        prompt: the tokens before the predicted token, as text or ids.
        alternatives, neighbours: the wanted number of most probable tokens, and of nearest neighbours.
    """

    prompt: str | list[Annotated[int, Meta(ge=0, lt=2**31)]]
    model: str | None = None
    alternatives: int = 10
    neighbours: int = 8


def shown(service: Service) -> Store | None:
    """Return the datastore whose passages the server shows; None if it shows no passages."""
    return service.datastore if service.settings.local and isinstance(service.datastore, Store) else None


async def neighbours(request: Request) -> Response:
    """POST /v1/neighbours: {"prompt": TEXT} → {"alternatives": […], "neighbours": […], "searched": true, …}."""
    service = service_of(request)
    store = shown(service)
    if store is None:
        raise ApiError(
            404, "neighbours are shown by the playground with a datastore alone; start `playground --datastore DIR`"
        )
    body = decode(await read_json(request), NeighboursBody)
    check_model(body.model, service.model, service.settings)
    for name, value, most in (
        ("alternatives", body.alternatives, TOP_LOGPROBS),
        ("neighbours", body.neighbours, MOST),
    ):
        if not 1 <= value <= most:
            raise ApiError(400, f"{name} is {value}, expected 1 … {most}; ask for fewer", name)
    ids = encode(body.prompt, service.model) if isinstance(body.prompt, str) else np.array(body.prompt, np.int32)
    if not 1 <= len(ids) <= TOKENS:
        raise ApiError(400, f"the prompt has {len(ids)} tokens, expected 1 … {TOKENS}; give its end", "prompt")
    if service.looking.locked():
        raise ApiError(429, "neighbours are being looked for, expected one request at a time", retry_after=1.0)
    async with service.looking:
        try:
            answer = await asyncio.to_thread(_look, service, store, ids, body)
        except UsageError as error:
            raise ApiError(400, str(error), "prompt") from None
    return json_response(answer)


def _look(service: Service, store: Store, ids: Ids, body: NeighboursBody) -> dict[str, Any]:
    """Read the text from empty memory; return the answer about the token after the text, as plain data."""
    stream, pieces = service.model.stream(1), service.pieces
    rows = stream.features(ids[None])[0, -1:]
    output = stream.loop.output
    alone = np.empty((1, output.clusters[-1][1]), np.float32)
    output.logprobs(rows, alone)
    neighbours = store.look(rows, partial(entropies, output, rows))
    row = mixed(alone[0].astype(np.float64), neighbours.tokens[0], neighbours.shares[0])
    order = np.argsort(-neighbours.shares[0], kind="stable")[: body.neighbours]
    return {
        "object": "neighbours",
        "searched": bool(neighbours.asked[0]),
        "weight": float(neighbours.shares[0].sum()),
        "alternatives": [
            {
                "id": token,
                "token": pieces.name(token),
                "probability": float(np.exp(row[token])),
                "without": float(np.exp(alone[0, token])),
            }
            for token in best_first(row, body.alternatives).tolist()
        ],
        "neighbours": [
            _neighbour(
                service,
                store,
                int(neighbours.rows[0, at]),
                float(neighbours.shares[0, at]),
                float(neighbours.far[0, at]),
            )
            for at in order.tolist()
            if neighbours.shares[0, at] > 0
        ],
    }


def _neighbour(service: Service, store: Store, row: int, share: float, far: float) -> dict[str, Any]:
    """Return a neighbour: its token, its share of the probability, and the passage around it."""
    vocabulary, passage = service.model.vocabulary, store.passage(row, BEFORE, AFTER)
    token = int(passage.tokens[passage.at])
    parts = passage.tokens[: passage.at], passage.tokens[passage.at + 1 :]
    before, after = (
        "".join(map(service.pieces.name, part.tolist()))
        if vocabulary is None
        else vocabulary.decode(part).decode(errors="replace")
        for part in parts
    )
    return {
        "id": token,
        "token": service.pieces.name(token),
        "share": share,
        "distance": far,
        "text": passage.name,
        "position": passage.position,
        "before": before,
        "after": after,
    }
