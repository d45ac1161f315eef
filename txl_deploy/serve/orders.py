"""Check the body of a completion request, and turn it into prompts and requests of the runtime.

OpenAI's fields that are not supported are ignored if they are harmless, and refused if they would change the result.
Unknown fields are refused, too, because they may be misspelt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from starlette.datastructures import Headers
from txl_runtime.errors import UsageError, one_line, todo_about
from txl_runtime.model import Model
from txl_runtime.sessions import Request, Sampling
from txl_runtime.streaming.checks import shown
from txl_runtime.streaming.datastore import Datastore
from txl_runtime.streaming.texts import TextStream, TokenTexts
from txl_runtime.types import Ids

from txl_deploy.serve.errors import ApiError
from txl_deploy.serve.session_header import session_of
from txl_deploy.serve.settings import (
    BIASES,
    CHOICES,
    ECHOED,
    LOGPROBS,
    MAX_TOKENS,
    PROMPT_TOKENS,
    STOP_LENGTH,
    STOPS,
    TOP_LOGPROBS,
    ServerSettings,
)

UNFINISHED = 4
"""Number of tokens at the end of a prompt that may hold the first bytes of a character that continues in the text."""
Body = TypeVar("Body", bound=Struct)
_PLACE = re.compile(r"(?:`\$\.|unknown field `|missing required field `)(\w+)")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`$")
_ID = re.compile(r"0|[1-9][0-9]{0,9}")
DEFAULT_TOKENS = 16
"""`max_tokens` of a request that does not give it; the same number as OpenAI's."""


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed answer: whether it ends with a count of tokens; obfuscation is ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions.

    Fields from `user` to `ignore_eos` are ignored. Fields from `best_of` on are refused if they would change the
    result.
    """

    model: str | None = None
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session: str | None = None
    session_seen: int | None = None
    memory_length: int | None = None
    return_token_ids: bool | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    add_special_tokens: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    ignore_eos: Any = None

    best_of: int | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    use_beam_search: bool | None = None


NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
}
"""Fields that would change the result, and for each field the values that are accepted because they change nothing."""


@dataclass(frozen=True)
class Order:
    """A checked completion request.

    Attributes:
        prompts: token ids int32 [T] of every prompt.
        many: number of texts per prompt, n in the request.
        max_tokens: maximum number of tokens of each text.
        seed, temperature, top_p, top_k: see `Sampling`.
        stops: stop texts.
        stop_tokens: ids that end a text.
        logprobs: number of most probable tokens to return at each position; None for no log-probabilities.
        bias: number to add to a token's log-probability before a draw, by token id.
        ids: True to return token ids with the log-probabilities.
        echo: True if the answer begins with the prompt.
        stream, usage: True if the answer is streamed; True if the stream ends with a count of tokens.
        session: the session that continues with its memory; None to begin with empty memory.
        seen: number of positions that the session must have read; None to skip this check.
        memory_length: maximum number of memory rows that are kept while this request runs; None for all.
    """

    prompts: tuple[Ids, ...]
    many: int
    max_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int | None
    stops: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    logprobs: int | None
    bias: dict[int, float]
    ids: bool
    echo: bool
    stream: bool
    usage: bool
    session: str | None
    seen: int | None
    memory_length: int | None

    def request(
        self, choice: int, pieces: TokenTexts, seconds: float, lookup: int = 0, datastore: Datastore | None = None
    ) -> Request:
        """Return the runtime's request for one text; with n = 2, `choice` 3 is the second prompt's second text."""
        scored = self.echo and self.logprobs is not None
        drawing = self.temperature, self.top_k, self.top_p, self.seed, choice
        sampling = Sampling(*drawing, logit_bias=self.bias, lookup=lookup, datastore=datastore)
        return Request(
            tokens=self.prompts[choice // self.many],
            max_new_tokens=self.max_tokens,
            sampling=sampling,
            stop_tokens=self.stop_tokens,
            top_logprobs=self.logprobs,
            score=scored,
            until=_Until(self, self.prompts[choice // self.many], pieces) if self.stops else None,
            seconds=seconds,
            memory_length=self.memory_length,
        )


class _Until:
    """A check that ends a request at a stop text. The session reads nothing after the token that completes the text."""

    def __init__(self, order: Order, prompt: Ids, pieces: TokenTexts) -> None:
        self._text, self._pieces = TextStream(order.stops), pieces
        for token in prompt[-UNFINISHED:].tolist() if order.echo else ():
            self._text.echo(pieces.bytes_of(token))

    def __call__(self, token: int) -> bool:
        self._text.feed(self._pieces.bytes_of(token))
        return self._text.stopped


def read_order(data: bytes, headers: Headers, model: Model, settings: ServerSettings) -> Order:
    """Check a request's body and its header X-Session, and return both as an `Order`.

    Raises:
        ApiError: the body is not JSON, is no completion request, exceeds a limit, or asks for something unsupported.
    """
    body = decode(data, CompletionBody)
    body.session = session_of(headers, body.session)
    check_model(body.model, model, settings)
    _refuse(body)
    if not model.manifest.can.read_text:
        raise ApiError(
            400,
            "this model does not continue texts: it reads named arrays, or returns no log-probabilities; use "
            "POST /v1/sessions/NAME/run",
        )
    prompts = tuple(_prompts(body, model))
    many = _within("n", body.n, 1, 1, CHOICES)
    max_tokens = _within("max_tokens", body.max_tokens, DEFAULT_TOKENS, 0, MAX_TOKENS)
    logprobs = None if body.logprobs is None else _within("logprobs", body.logprobs, 0, 0, TOP_LOGPROBS)
    if body.best_of not in (None, 1, many) or (body.best_of or 1) > many:
        raise ApiError(400, f"best_of is {body.best_of}, expected 1 or n: texts are not ranked here", "best_of")
    if many * len(prompts) > CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts times n {many} exceed {CHOICES} texts; ask for fewer", "n")
    if body.session is not None and many * len(prompts) > 1:
        raise ApiError(400, f"a session continues one text, this asks for {many * len(prompts)}; ask for 1", "session")
    if body.session_seen is not None and body.session is None:
        raise ApiError(400, "session_seen is given without session, expected both; give session", "session_seen")
    if max_tokens == 0 and not body.echo and body.session is None:
        raise ApiError(
            400, "max_tokens is 0 without echo or session, expected at least 1: nothing is asked", "max_tokens"
        )
    echoed = sum(map(len, prompts)) if body.echo else 0
    positions = echoed + max_tokens * len(prompts)
    if logprobs is not None and positions * many * max(logprobs, 1) > LOGPROBS:
        raise ApiError(
            400,
            f"{positions * many} positions with logprobs {logprobs} exceed {LOGPROBS} log-probabilities in one answer; "
            "ask for fewer prompts, tokens or logprobs at once",
            "logprobs",
        )
    if echoed * many > ECHOED:
        raise ApiError(
            400,
            f"{echoed * many} tokens of prompts to echo exceed {ECHOED} in one answer; ask for fewer prompts, texts or "
            "tokens, or leave echo out",
            "echo",
        )
    return Order(
        prompts=prompts,
        many=many,
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=None if body.top_p in (None, 1) else body.top_p,
        top_k=None if body.top_k in (None, -1, 0) else body.top_k,
        seed=None if body.seed is None else body.seed % (1 << 63),
        stops=tuple(_stops(body.stop)),
        stop_tokens=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        bias=_bias(body.logit_bias or {}),
        ids=bool(body.return_token_ids),
        echo=bool(body.echo),
        stream=bool(body.stream),
        usage=bool(body.stream_options and body.stream_options.include_usage),
        session=body.session,
        seen=body.session_seen,
        memory_length=body.memory_length,
    )


def decode(data: bytes, kind: type[Body]) -> Body:
    """Decode JSON into a struct of class `kind`.

    Raises:
        ApiError: the data is not JSON, or a field is unknown, missing or of a wrong type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = one_line(error)
        place = _PLACE.search(reason)
        if unknown := _UNKNOWN.search(reason):
            todo = todo_about(unknown[1], kind.__struct_fields__)
            raise ApiError(
                400, f"the request has the field {shown(unknown[1])}, expected the API's; {todo}", unknown[1][:64]
            ) from None
        raise ApiError(400, f"the body is no request: {reason}; check its JSON", place and place[1][:64]) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply for a request; check its JSON") from None


def check_model(name: str | None, model: Model, settings: ServerSettings) -> None:
    """Refuse a request for a different model; `name` may be the served name or the model_id.

    Raises:
        ApiError: the model is not served here.
    """
    served = settings.served_name
    if name not in (None, "", served, model.manifest.model_id):
        raise ApiError(
            404,
            f"model {shown(name)} is not here, expected {served!r}; GET /v1/models lists it",
            "model",
            "model_not_found",
        )


def encode(text: str, model: Model) -> Ids:
    """Return the token ids of a text, int32 [T].

    For example, [97, 98] for "ab" with a vocabulary of bytes.

    Raises:
        ApiError: the bundle has no vocabulary, or the vocabulary lacks a word of the text.
    """
    if model.vocabulary is None:
        raise ApiError(
            400,
            "the bundle has no vocabulary to read a text with, expected token ids; give those, or export with "
            "--vocabulary FILE",
            "prompt",
        )
    try:
        return model.vocabulary.encode(text)
    except UsageError as error:
        raise ApiError(400, str(error), "prompt") from None


def boundary(model: Model) -> Ids:
    """Return the prompt that replaces an empty prompt: the boundary token, which separates texts, int32 [1].

    Raises:
        ApiError: the bundle names no boundary token.
    """
    token = model.manifest.boundary_token
    if token is None:
        raise ApiError(
            400,
            "the prompt is empty and the bundle has no boundary token to begin with, expected at least one token; give "
            "one, or export with --boundary-token ID",
            "prompt",
        )
    return np.array([token], np.int32)


def _prompts(body: CompletionBody, model: Model) -> list[Ids]:
    prompts_given = body.prompt
    if prompts_given is None or prompts_given in ("", []):
        prompts = [np.zeros(0, np.int32)]
    elif isinstance(prompts_given, str):
        prompts = [encode(prompts_given, model)]
    elif all(isinstance(part, int) for part in prompts_given):
        prompts = [_ids(prompts_given)]
    elif all(isinstance(part, str) for part in prompts_given) or all(isinstance(part, list) for part in prompts_given):
        if len(prompts_given) > CHOICES:
            raise ApiError(
                400, f"{len(prompts_given)} prompts are given, expected at most {CHOICES}; send fewer", "prompt"
            )
        prompts = [encode(part, model) if isinstance(part, str) else _ids(part) for part in prompts_given]
    else:
        raise ApiError(400, "the prompt mixes texts, ids and lists, expected one kind; see the API", "prompt")
    if body.session is None:
        prompts = [prompt if len(prompt) else boundary(model) for prompt in prompts]
    size = model.manifest.vocab_size
    for prompt in prompts:
        if (odd := prompt[(prompt < 0) | (prompt >= size)]).size:
            raise ApiError(
                400,
                f"the prompt holds id {odd[0]}, expected 0 … {size - 1}; check the vocabulary it comes from",
                "prompt",
            )
    longest = max(map(len, prompts))
    if longest > PROMPT_TOKENS:
        raise ApiError(
            400,
            f"the prompt has {longest} tokens, expected at most {PROMPT_TOKENS}; send it in parts with a session",
            "prompt",
        )
    return prompts


def _ids(value: object) -> Ids:
    try:
        return np.asarray(value, np.int32)
    except (OverflowError, ValueError):
        raise ApiError(
            400, "the prompt holds ids beyond any vocabulary, expected token ids; check it", "prompt"
        ) from None


def _refuse(body: CompletionBody) -> None:
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise ApiError(
                400, f"{name} would change the result and is not offered, expected {neutral[0]!r}; leave it out", name
            )


def _within(name: str, value: int | None, default: int, least: int, most: int) -> int:
    if value is None:
        return default
    if not least <= value <= most:
        raise ApiError(400, f"{name} is {shown(value)}, expected {least} … {most}; check it", name)
    return value


def _bias(numbers: dict[str, float]) -> dict[int, float]:
    """Return biases by token id: {5: -100} of {"5": -100}; the runtime checks ids and numbers."""
    if len(numbers) > BIASES:
        raise ApiError(
            400, f"logit_bias has {len(numbers)} tokens, expected at most {BIASES}; leave some out", "logit_bias"
        )
    if odd := [name for name in numbers if not _ID.fullmatch(name)]:
        raise ApiError(400, f"logit_bias is for {shown(odd[0])}, expected token ids such as '17'", "logit_bias")
    return {int(name): bias for name, bias in numbers.items()}


def _stops(texts: str | list[str] | None) -> list[str]:
    stops = [texts] if isinstance(texts, str) else texts or []
    if len(stops) > STOPS:
        raise ApiError(400, f"{len(stops)} stop texts are given, expected at most {STOPS}; leave some out", "stop")
    if any(len(stop) > STOP_LENGTH for stop in stops):
        raise ApiError(400, f"a stop text has more than {STOP_LENGTH} characters; give a shorter one", "stop")
    return [stop for stop in stops if stop]
