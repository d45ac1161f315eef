"""Describe the served model, convert text to token ids and back, and report the server's health."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from txl_runtime.errors import TxlError, UsageError

from txl_deploy.serve.bodies import BODY_BYTES, read_json
from txl_deploy.serve.errors import ApiError, json_response
from txl_deploy.serve.metrics import looked_at
from txl_deploy.serve.neighbours import TOKENS, shown
from txl_deploy.serve.orders import check_model, decode, encode
from txl_deploy.serve.service import Service, service_of
from txl_deploy.serve.settings import LOGPROBS, MAX_TOKENS, PROMPT_TOKENS, TOP_LOGPROBS

ANSWERS = 10.0
"""Seconds within which the sessions' thread must answer a health check: longer than any round takes."""


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: Any = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


async def models(request: Request) -> Response:
    """GET /v1/models: a list with the served model."""
    return json_response({"object": "list", "data": [_model(service_of(request))]})


async def model(request: Request) -> Response:
    """GET /v1/models/NAME: the served model, if NAME is its name or its model_id."""
    service = service_of(request)
    check_model(request.path_params["name"], service.model, service.settings)
    return json_response(_model(service))


async def tokenize(request: Request) -> Response:
    """POST /tokenize: {"prompt": TEXT} → {"tokens": IDS, "count": N}."""
    service = service_of(request)
    body = decode(await read_json(request), TokenizeBody)
    check_model(body.model, service.model, service.settings)
    ids = encode(body.prompt, service.model).tolist()
    names = {"token_strs": [service.pieces.name(token) for token in ids]} if body.return_token_strs else {}
    return json_response({"count": len(ids), "max_model_len": None, "tokens": ids, **names})


async def detokenize(request: Request) -> Response:
    """POST /detokenize: {"tokens": IDS} → {"prompt": TEXT}; bytes that are no UTF-8 become U+FFFD."""
    service = service_of(request)
    body = decode(await read_json(request), DetokenizeBody)
    check_model(body.model, service.model, service.settings)
    vocabulary, size = service.model.vocabulary, service.model.manifest.vocab_size
    if vocabulary is None:
        raise ApiError(400, "the bundle has no vocabulary, expected one; export with --vocabulary FILE", "tokens")
    if any(not 0 <= token < size for token in body.tokens):
        raise ApiError(400, f"tokens hold an id outside of 0 … {size - 1}; check them", "tokens")
    return json_response({"prompt": vocabulary.decode(body.tokens).decode(errors="replace") if body.tokens else ""})


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info: the text of the boundary token, which marks the beginning and the end of texts.

    A client that measures likelihoods begins every text with this token. If the bundle names no boundary token, the
    answer is the line end, provided that the line end is a single token.
    """
    service = service_of(request)
    boundary = _boundary_text(service)
    return json_response(
        {
            "tokenizer_class": "txl-deploy",
            "vocab_size": service.model.manifest.vocab_size,
            "boundary_token_id": service.model.manifest.boundary_token,
            "bos_token": boundary,
            "eos_token": boundary,
            "pad_token": None,
            "chat_template": None,
        }
    )


async def health(request: Request) -> Response:
    """GET /health: 200 while the server accepts requests and its self-test passes, else 503; needs no token."""
    service = service_of(request)
    if service.draining:
        return json_response({"status": "draining"}, 503, {"retry-after": "5"})
    problem = await service.health.problem()
    try:
        await asyncio.wait_for(service.front.call(lambda sessions: None), ANSWERS)
    except asyncio.TimeoutError:
        problem = problem or f"the sessions have not answered for {ANSWERS:g} s"
    except TxlError as error:
        problem = problem or str(error)
    if problem:
        return json_response({"status": "failing", "problem": problem}, 503)
    return json_response({"status": "ok", "self_test": service.health.facts()})


async def metrics(request: Request) -> Response:
    """GET /metrics: all counters in Prometheus' format."""
    service = service_of(request)
    looked = await service.front.call(lambda sessions: looked_at(sessions, service.keeping))
    return Response(service.metrics.text(looked), 200, None, CONTENT_TYPE_LATEST)


def _model(service: Service) -> dict[str, Any]:
    manifest = service.model.manifest
    return {
        "id": service.settings.served_name,
        "object": "model",
        "created": service.created,
        "owned_by": "txl-deploy",
        "model_id": manifest.model_id,
        "precision": manifest.precision,
        "batch_size": manifest.batch_size,
        "segment_lengths": manifest.segment_lengths,
        "memory_length": service.model.memory_length,
        "reads_text": service.model.vocabulary is not None,
        "vocab_size": manifest.vocab_size,
        "context": manifest.reach,
        "limits": {
            "prompt_tokens": PROMPT_TOKENS,
            "max_tokens": MAX_TOKENS,
            "body_bytes": BODY_BYTES,
            "logprobs": TOP_LOGPROBS,
            "answer_logprobs": LOGPROBS,
            "neighbours_tokens": TOKENS if shown(service) else 0,
        },
        "inputs": msgspec.to_builtins(manifest.given),
        "outputs": msgspec.to_builtins(manifest.outputs),
    }


def _boundary_text(service: Service) -> str | None:
    vocabulary, token = service.model.vocabulary, service.model.manifest.boundary_token
    if vocabulary is None:
        return None
    if token is not None:
        return service.pieces.bytes_of(token).decode(errors="replace")
    try:
        return "\n" if len(vocabulary.encode("\n")) == 1 else None
    except UsageError:
        return None
