"""Python's driver: requests as JSON lines on standard input, `txl_runtime`'s answers on standard output.

    python conformance/driver.py

It imports nothing but the runtime, so it runs wherever an application with the runtime does. Promises, arrays and bytes
as JSON are here, too: the runner takes them from this module.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import txl_runtime
from txl_runtime import Model, Stream, StreamState
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError
from txl_runtime.selftest import run_selftest
from txl_runtime.types import Array
from txl_runtime.update_rules import usable_updates

Json = dict[str, Any]
# fmt: off
PROMISES = [
    "padding", "idle", "last", "cut", "fill", "spill", "initial", "reset", "select",
    "snapshot", "rows", "limit", "commit", "lookahead", "lockstep", "grows", "open", "score",
    "greedy", "draws", "apart", "temperature", "top_k", "top_p", "clusters", "text", "selftest",
    "refusals", "int8", "half", "old", "axes", "strangers",
]
# fmt: on
"""The promises that vectors show; `conformance/README.md` says what each means."""
DTYPES = ("float32", "float16", "int32", "bool")


def packed(array: Array) -> dict[str, Any]:
    """An array as JSON: dtype, shape, and its values as base64 of little-endian bytes in C order."""
    ordered = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": packed_bytes(ordered.tobytes())}


def unpacked(document: Any) -> Array:
    """The array that `packed` made JSON of.

    Raises:
        UsageError: it is something else.
    """
    if not is_array(document):
        raise UsageError(f"an array is {str(document)[:80]}, expected dtype, shape and data")
    name, shape, data = document["dtype"], document["shape"], unpacked_bytes(document["data"])
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if name not in DTYPES or not sizes or math.prod(shape) * np.dtype(name).itemsize != len(data):
        raise UsageError(
            f"an array is {name} {shape} of {len(data)} bytes, expected one of {', '.join(DTYPES)} and as many"
        )
    try:
        return np.frombuffer(data, np.dtype(name).newbyteorder("<")).astype(name).reshape(shape)
    except ValueError as error:  # of no numbers, such as [2**62, 2**62, 0], or of more axes than NumPy has
        raise UsageError(f"an array is {name} {str(shape)[:80]} ({error}), expected one that NumPy can hold") from None


def is_array(document: object) -> bool:
    """Return whether JSON has the form of an array."""
    return isinstance(document, dict) and document.keys() == {"dtype", "shape", "data"}


def packed_bytes(data: bytes) -> str:
    """Bytes as JSON: base64."""
    return base64.b64encode(data).decode()


def unpacked_bytes(text: Any) -> bytes:
    """The bytes that `packed_bytes` made JSON of.

    Raises:
        UsageError: it is no base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise UsageError(f"bytes are {str(text)[:80]!r}, expected base64") from None


class _Unsupported(TxlError):  # noqa: N818
    """Raised for a request that is right and that this driver cannot do."""


class Driver:
    """One model and one stream of it at a time; `_do_run` answers "run", and so on."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._stream: Stream | None = None

    def answer(self, request: object) -> Json:
        """The reply to a request, which may be a refusal; the state is then what it was."""
        try:
            does = request.get("do") if isinstance(request, dict) else None
            work: Callable[[Json], Json] | None = getattr(self, f"_do_{does}", None)
            if not isinstance(request, dict) or work is None:
                raise UsageError(f"a request is to do {str(does)[:80]}, expected one that the protocol has")
            return {"ok": work(request)}
        except KeyError as error:
            return {"refused": f"the request lacks {error}, expected all that the protocol names", "kind": "usage"}
        except TxlError as error:
            kinds = {BundleError: "bundle", BackendError: "backend", _Unsupported: "unsupported"}
            return {"refused": str(error), "kind": kinds.get(type(error), "usage")}

    @property
    def model(self) -> Model:
        """The model that was loaded last."""
        if self._model is None:
            raise UsageError("no model is loaded, expected load before anything else")
        return self._model

    @property
    def stream(self) -> Stream:
        """The stream that was opened last."""
        if self._stream is None:
            raise UsageError("no stream is open, expected open before anything that has a state")
        return self._stream

    def _do_hello(self, request: Json) -> Json:
        keeps = [name for name in PROMISES if name != "spill" or _has_rings()]
        return {"name": "txl_runtime", "version": version("txl-deploy"), "engine": engine(), "supports": keeps}

    def _do_load(self, request: Json) -> Json:  # on one thread, so that results are the same to the bit each time
        update = request["update"]
        if update == "ring" and not _has_rings():
            raise _Unsupported("update is ring, which needs ONNX Runtime 1.25 or newer; use rolled")
        self._model = self._stream = None
        trial = request.get("trial") is True
        self._model = txl_runtime.load(request["path"], "cpu", threads=1, update=update, trial=trial)
        return {"update": self._model.update}

    def _do_open(self, request: Json) -> Json:
        self._stream = self.model.stream(request["b"], request["memory_length"])
        return {}

    def _do_run(self, request: Json) -> Json:
        return _named(self.stream.run(_arrays(request["inputs"]), request["counts"], request["commit"]))

    def _do_feed(self, request: Json) -> Json:
        return _named(self.stream.feed(_arrays(request["inputs"]), request["counts"], request["last"]))

    def _do_score(self, request: Json) -> Json:
        return {"nll": packed(self.stream.score(unpacked(request["tokens"]), request["counts"]))}

    def _do_generate(self, request: Json) -> Json:
        options = {name: request[name] for name in ("temperature", "top_k", "top_p", "seed")}
        tokens, counts = unpacked(request["tokens"]), request["counts"]
        if request["count"] == 0:
            raise UsageError("count is 0, expected at least 1; ask for a token")
        drawn = self.stream.generate(tokens, request["count"], lengths=counts, logprobs=True, **options)
        found = [(token, drawn.logprobs) for token in drawn]
        shape = len(found), self.stream.batch_size
        arrays = {"tokens": np.zeros(shape, np.int32), "logprobs": np.zeros(shape, np.float32)}
        for place, (tokens, logprobs) in enumerate(found):
            assert logprobs is not None, "they were asked for"
            arrays["tokens"][place], arrays["logprobs"][place] = tokens, logprobs
        return {name: packed(array) for name, array in arrays.items()}

    def _do_reset(self, request: Json) -> Json:
        self.stream.reset(request["rows"])
        return {}

    def _do_select(self, request: Json) -> Json:
        self.stream.select(request["rows"])
        return {}

    def _do_save(self, request: Json) -> Json:
        return {"bytes": packed_bytes(self.stream.snapshot().to_bytes())}

    def _do_restore(self, request: Json) -> Json:
        self.stream.restore(StreamState.from_bytes(unpacked_bytes(request["bytes"])))
        return {}

    def _do_take(self, request: Json) -> Json:
        return {"bytes": packed_bytes(self.stream.take(request["row"]).to_bytes())}

    def _do_put(self, request: Json) -> Json:
        self.stream.put(request["row"], StreamState.from_bytes(unpacked_bytes(request["bytes"])))
        return {}

    def _do_state(self, request: Json) -> Json:
        states = {name: packed(array) for name, array in self.stream.state().items()}
        return {"states": states, "fill": self.stream.fill.tolist()}

    def _do_encode(self, request: Json) -> Json:
        return {"tokens": packed(self._vocabulary().encode(unpacked_bytes(request["bytes"])))}

    def _do_decode(self, request: Json) -> Json:
        return {"bytes": packed_bytes(self._vocabulary().decode(unpacked(request["tokens"])))}

    def _do_selftest(self, request: Json) -> Json:
        return {"passed": run_selftest(self.model).passed}

    def _vocabulary(self) -> Any:
        found = self.model.vocabulary
        if found is None:
            raise UsageError("the bundle has no vocabulary, expected one to turn text into ids")
        return found


def _has_rings() -> bool:
    return "ring" in usable_updates(("rolled", "ring"))


def engine() -> str:
    """Return the engine of Python's driver, e.g. "ONNX Runtime 1.24.4", or "none"."""
    try:
        import onnxruntime
    except ImportError:
        return "none"
    return f"ONNX Runtime {onnxruntime.__version__}"


def _arrays(documents: Any) -> dict[str, Array]:
    if not isinstance(documents, dict):
        raise UsageError(f"inputs are {str(documents)[:80]}, expected arrays by name")
    return {name: unpacked(document) for name, document in documents.items()}


def _named(outputs: dict[str, Array]) -> Json:
    return {"outputs": {name: packed(array) for name, array in outputs.items()}}


def main(driver: Driver | None = None) -> None:
    """Answer line by line until standard input ends."""
    driver = driver or Driver()
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
        except ValueError:
            request = None
        number = request.get("id") if isinstance(request, dict) else None
        sys.stdout.write(json.dumps({"id": number, **driver.answer(request)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
