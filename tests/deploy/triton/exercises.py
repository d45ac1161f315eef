"""The clients of Triton in tests: `python exercises.py NAME JSON`, where `tritonclient` is installed."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
import txl_runtime
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}
CLOSE = 1e-4


class Client:
    """Sequences of one model, over HTTP or gRPC."""

    def __init__(self, protocol: str, port: int, model: str) -> None:
        self._library, self._model = CLIENTS[protocol], model
        self._client = self._library.InferenceServerClient(f"127.0.0.1:{port}")

    def infer(self, name: Any, arrays: dict[str, np.ndarray], *wanted: str, **flags: bool) -> dict[str, np.ndarray]:
        inputs = []
        for key, array in arrays.items():
            inputs.append(self._library.InferInput(key, list(array.shape), np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        outputs = [self._library.InferRequestedOutput(output) for output in wanted]
        result = self._client.infer(self._model, inputs, outputs=outputs, sequence_id=name, **flags)
        return {output: result.as_numpy(output) for output in wanted}

    def feed(self, name: Any, ids: Any, wanted: str, **flags: bool) -> np.ndarray:
        return self.infer(name, {"tokens": np.array(ids, np.int32)[None]}, wanted, **flags)[wanted]


def together(count: int, work: Callable[[int], None]) -> None:
    """Calls in as many threads; what one of them raises is raised."""
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, number) for number in range(count)]:
            done.result()


@contextlib.contextmanager
def refused(said: str, kind: type[Exception] = InferenceServerException) -> Iterator[None]:
    """As `pytest.raises`, which is not installed here."""
    found = ""
    try:
        yield
    except kind as error:
        found = str(error)
    if not re.search(said, found):
        raise AssertionError(f"{found!r}, expected {said!r}")


def tokens(http: int, grpc: int, bundle: str, model: str) -> None:
    """Sequences in parallel, cut at random, beside a stream alone; half over HTTP, half over gRPC."""
    loaded = txl_runtime.load(bundle, backend="cpu", threads=1)
    names = [7, "a text", 2**40, 11]

    def talk(number: int) -> None:
        draws, alone = np.random.default_rng(number), loaded.stream(1)
        client = Client(*(("http", http), ("grpc", grpc))[number % 2], model)
        ids = draws.integers(0, loaded.vocab_size, 60)
        first, starts = 0, True
        while first < len(ids):
            end = first + int(draws.integers(1, 12))
            wanted = str(draws.choice(["logprobs", "last"]))
            found = client.feed(
                names[number], ids[first:end], wanted, sequence_start=starts, sequence_end=end >= len(ids)
            )
            expected = alone.feed(ids[None, first:end], last=wanted == "last")
            assert found.shape == expected.shape, (found.shape, expected.shape)
            assert np.abs(found - expected).max() < CLOSE, (number, first, np.abs(found - expected).max())
            first, starts = end, False

    together(4, talk)


def arrays(http: int, grpc: int, bundle: str, model: str) -> None:
    """A model without tokens: six sequences on three rows, segments of exact lengths, states of several types."""
    loaded = txl_runtime.load(bundle, backend="cpu", threads=1)

    def act(number: int) -> None:
        draws, alone = np.random.default_rng(number), loaded.stream(1)
        client = Client(*(("http", http), ("grpc", grpc))[number % 2], model)
        for step in range(10):
            obs = draws.normal(size=(1, int(draws.choice([1, 4, 5])), 5)).astype(np.float32)
            inputs = {"obs": obs, "starts": np.array([draws.random() < 0.3])}
            given = inputs | {"starts": inputs["starts"][:, None]}
            flags = {"sequence_start": step == 0, "sequence_end": step == 9}
            found = client.infer(100 + number, given, "best", "which", "total", "known", **flags)
            expected = alone.feed(inputs)
            assert np.abs(found["best"] - expected["best"]).max() < CLOSE
            assert (found["which"] == expected["which"]).all()
            assert np.abs(found["total"] - expected["total"].T).max() < CLOSE
            assert (found["known"][:, 0] == expected["known"]).all()

    together(6, act)


def slots(http: int, grpc: int, bundle: str, model: str) -> None:
    """The fifth of four sequences waits until one ends; START empties a memory in mid-sequence."""
    fresh = txl_runtime.load(bundle, backend="cpu", threads=1).stream(1).feed([[5, 6]], last=True)
    client = Client("grpc", grpc, model)
    for name in (1, 2, 3, 4):
        client.feed(name, [name, 9], "next", sequence_start=True)
    again = client.feed(2, [5, 6], "last", sequence_start=True)
    assert np.abs(again - fresh).max() < CLOSE
    done: Queue[np.ndarray] = Queue()
    later = Client("grpc", grpc, model)
    thread = threading.Thread(target=lambda: done.put(later.feed(5, [5, 6], "last", sequence_start=True)))
    thread.start()
    time.sleep(0.5)
    assert done.empty()
    client.feed(3, [1], "next", sequence_end=True)
    assert np.abs(done.get(timeout=20) - fresh).max() < CLOSE
    thread.join()
    with refused("START flag"):
        client.feed(3, [1], "next")
    for name in (1, 2, 4, 5):
        client.feed(name, [1], "next", sequence_end=True)


def idle(http: int, grpc: int, bundle: str, model: str) -> None:
    """Sequences that are idle for a second lose their places, on the server's side and on the model's."""
    loaded = txl_runtime.load(bundle, backend="cpu", threads=1)
    client, three = Client("http", http, model), (1, 2, 3)
    for name in three:
        client.feed(name, [1, 2, 3], "last", sequence_start=True)
    fresh = loaded.stream(1).feed([[4]], last=True)
    for name in (11, 12, 13):  # each waits until a place is free
        assert np.abs(client.feed(name, [4], "last", sequence_start=True) - fresh).max() < CLOSE
    with refused("START flag"):
        client.feed(1, [4], "last")


def ask(client: Any, model: str, ids: Any, count: int, name: Any = 0, **more: Any) -> None:
    """A request for tokens over a stream of responses."""
    given = {"tokens": np.array(ids, np.int32), "max_new_tokens": np.array([count], np.int32)}
    given["temperature"] = np.array([0.0], np.float32)
    inputs = []
    for key, array in given.items():
        inputs.append(tritonclient.grpc.InferInput(key, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    client.async_stream_infer(model, inputs, sequence_id=name, **more)


def answers(found: Queue[Any], count: int = 1) -> dict[str, tuple[list[int], list[float], str]]:
    """Collect answers until `count` requests ended: ids, log-probabilities and the reason, by the request's id."""
    results: dict[str, tuple[list[int], list[float], str]] = {}
    while len([reason for _, _, reason in results.values() if reason]) < count:
        result, error = found.get(timeout=60)
        if error is not None:
            raise error
        tokens, logprobs, _ = results.get(result.get_response().id, ([], [], ""))
        tokens += result.as_numpy("tokens").tolist()
        logprobs += result.as_numpy("logprobs").tolist()
        results[result.get_response().id] = (tokens, logprobs, result.as_numpy("finish_reason")[0].decode())
    return results


def generation(http: int, grpc: int, bundle: str, model: str) -> None:
    """Six requests at once over gRPC and one over HTTP, greedy, beside `Stream.generate`; a memory that goes on."""
    loaded, draws = txl_runtime.load(bundle, backend="cpu", threads=1), np.random.default_rng(0)
    prompts = [draws.integers(0, loaded.vocab_size, int(draws.integers(1, 20))) for _ in range(6)]

    def drawn(prompt: Any, count: int) -> list[int]:
        return [int(token[0]) for token in loaded.stream(1).generate(prompt, count, temperature=0.0)]

    found: Queue[Any] = Queue()
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc}") as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        for place, prompt in enumerate(prompts):
            ask(client, model, prompt, 25, request_id=str(place))
        results = answers(found, len(prompts))
        for place, prompt in enumerate(prompts):
            tokens, logprobs, reason = results[str(place)]
            assert tokens == drawn(prompt, 25), place
            assert (reason, len(logprobs)) == ("length", 25)
        ask(client, model, [1, 2], 3, name="a talk", request_id="first", sequence_start=True)
        first = answers(found)["first"][0]
        ask(client, model, [5], 4, name="a talk", request_id="second", sequence_end=True)
        second = answers(found)["second"][0]
        assert (first, second) == (drawn([1, 2], 3), drawn([1, 2, *first, 5], 4))
        ask(client, model, [999_999], 4, request_id="bad")
        with refused("hold id 999999"):
            answers(found)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc}") as leaver:  # in the middle of its request
        heard: Queue[Any] = Queue()
        leaver.start_stream(lambda result, error: heard.put((result, error)))
        ask(leaver, model, [1], 1_000_000, name=9, request_id="endless")
        heard.get(timeout=60)
        leaver.stop_stream(cancel_requests=True)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc}") as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        ask(client, model, [1], 3, name=9, request_id="behind it", sequence_end=True)
        assert len(answers(found)["behind it"][0]) == 3
    body = json.dumps({"tokens": prompts[0].tolist(), "max_new_tokens": 5, "temperature": 0.0}).encode()
    address = f"http://127.0.0.1:{http}/v2/models/{model}/generate_stream"
    with urllib.request.urlopen(address, body, timeout=30) as answer:
        lines = [json.loads(line.removeprefix(b"data:")) for line in answer if line.startswith(b"data:")]
    assert [line["tokens"] for line in lines] == drawn(prompts[0], 5), lines
    assert [line["finish_reason"] for line in lines] == ["", "", "", "", "length"], lines


def refusals(http: int, grpc: int, bundle: str, model: str) -> None:
    """Check that a wrong request's client is told; its sequence goes on, and the others'."""
    alone = txl_runtime.load(bundle, backend="cpu", threads=1).stream(1)
    for protocol, port in (("http", http), ("grpc", grpc)):
        client = Client(protocol, port, model)
        alone.reset()
        client.feed(1, [1, 2], "last", sequence_start=True)
        alone.feed([[1, 2]])
        for bad, said in (([1, 9999], "hold id 9999"), ([], "with the same T of at least 1")):
            with refused(said):
                client.feed(1, bad, "last")
        found = client.feed(1, [3], "last", sequence_end=True)
        assert np.abs(found - alone.feed([[3]], last=True)).max() < CLOSE


def dead(http: int, grpc: int, bundle: str, model: str) -> None:
    """Check the errors of clients when the process of a model is gone."""
    for protocol, port in (("http", http), ("grpc", grpc)):
        with refused("not healthy"):
            Client(protocol, port, model).feed(1, [1], "last", sequence_start=True)


def unreachable(http: int, grpc: int, bundle: str, model: str) -> None:
    """Check the errors of clients when the server is gone."""
    with refused("UNAVAILABLE"):
        Client("grpc", grpc, model).feed(1, [1], "last", sequence_start=True)
    with refused("refused", OSError):
        Client("http", http, model).feed(1, [1], "last", sequence_start=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
