"""Uses a server by the `openai` package: a test runs it in another environment, with an address and a token.

Everything here is as its documentation has it; nothing is told of the server but its address, token and model.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from collections.abc import Callable

import openai

URL, TOKEN = sys.argv[1:]
PROMPT = "once upon a time, "


def sync(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    whole = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=400, temperature=0)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 400)
    assert whole._request_id

    parts = list(
        client.completions.create(
            model=model.id,
            prompt=PROMPT,
            max_tokens=400,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage == whole.usage
    assert len(parts) > 3, "it comes piece by piece: of 64 tokens at most, however slowly it is read"

    asked = {"model": model.id, "prompt": [PROMPT, "b"], "n": 2, "max_tokens": 8, "seed": 4}
    several = client.completions.create(**asked)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices == client.completions.create(**asked).choices

    scored = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=0, echo=True, logprobs=2)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == PROMPT == scored.choices[0].text
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert all(len(top) in (2, 3) for top in logprobs.top_logprobs[1:])

    biased = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=9, logit_bias={"97": 100, "98": -100})
    assert biased.choices[0].text == "a" * 9

    stop = whole.choices[0].text[5:7]
    stopped = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == whole.choices[0].text.partition(stop)[0]
    return model.id


def session(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "temperature": 0, "extra_body": {"session": "mine"}}
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
    first = client.completions.create(prompt=PROMPT, max_tokens=7, **asked).choices[0].text
    second = client.completions.create(prompt="", max_tokens=5, **asked).choices[0].text
    assert first + second == whole or "\ufffd" in first + second
    (found,) = (each for each in client.get("/sessions", cast_to=object)["data"] if each["name"] == "mine")
    assert found["seen"] == len(PROMPT) + 11
    client.delete("/sessions/mine", cast_to=object)


def errors(client: openai.OpenAI, model: str) -> None:
    for asked, kind, says in [
        ({"model": "gpt", "prompt": "a"}, openai.NotFoundError, "model 'gpt' is not here"),
        ({"model": model, "prompt": "a", "temperature": -1}, openai.BadRequestError, "temperature is -1"),
        ({"model": model, "prompt": "a", "presence_penalty": 1}, openai.BadRequestError, "is not offered"),
        ({"model": model, "prompt": "a" * (1 << 23)}, openai.APIStatusError, "bytes, expected at most"),
    ]:
        error = refused(lambda asked=asked: client.completions.create(**asked), kind)
        assert says in error.message, error.message
        assert isinstance(error.body, dict)
        assert error.body["message"]
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong")
    assert "no token or a wrong one" in refused(stranger.models.list, openai.AuthenticationError).message
    stranger.close()


def refused(call: Callable[[], object], kind: type[openai.APIStatusError]) -> openai.APIStatusError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"nothing was refused, expected {kind}")


def metrics() -> str:
    request = urllib.request.Request(f"{URL}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


async def many(model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=TOKEN) as client:

        async def one(number: int) -> str:
            text = ""
            asked = {"model": model, "prompt": PROMPT, "max_tokens": 16, "seed": number, "stream": True}
            stream = await client.completions.create(**asked)
            async for part in stream:
                text += part.choices[0].text
            return text

        together = await asyncio.gather(*(one(number) for number in range(12)))
        alone = [await one(number) for number in (0, 5, 11)]
        assert [together[number] for number in (0, 5, 11)] == alone
        assert len(set(together)) > 8

        stream = await client.completions.create(model=model, prompt=PROMPT, max_tokens=8000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        for _ in range(200):  # the server notices that nobody reads
            if "\ntxl_requests_running 1.0\n" in metrics():  # the one that asks
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the request still runs")


with openai.OpenAI(base_url=f"{URL}/v1", api_key=TOKEN) as opened:
    name = sync(opened)
    session(opened, name)
    errors(opened, name)
asyncio.run(many(name))
print("all of it")
