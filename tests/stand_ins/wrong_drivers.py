"""Python's driver with one fault, as a reader in another language may have it.

In `tests`, `python -m stand_ins.wrong_drivers FAULT` answers as a driver does.

Each fault is a function that changes the runtime of its process before it answers; `FAULTS` says which promise of the
conformance list it breaks. `MANNERS` are drivers that compute nothing wrong, and do not keep to the protocol.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import txl_runtime
from txl_runtime.host.growing import Growing
from txl_runtime.host.placements import Replaced, Ring
from txl_runtime.host.softmax import SplitSoftmax
from txl_runtime.streaming import best_words, feeding, inputs, sampling, stream
from txl_runtime.streaming.carried import CarriedState
from txl_runtime.streaming.inputs import Segments
from txl_runtime.streaming.loop import LoopState
from txl_runtime.streaming.outputs import SegmentResult
from txl_runtime.streaming.sampling import Sampler
from txl_runtime.streaming.state import SequenceCounters

from conformance import driver
from conformance.driver import Driver, is_array

HASHES = "every file has the size and the SHA-256 that the manifest says"


FAULTS: dict[str, tuple[list[tuple[Any, str, Callable[..., Any]]], str]] = {}
"""Every fault: what it puts in the place of which functions, and the promise that it breaks."""

Wrong = Callable[..., Any]


def fault(name: str, promise: str, *places: Any) -> Callable[[Wrong], Wrong]:
    """A function in the place of one of the runtime's, which it gets as its first argument: `fault(…, OWNER, "name")`.

    Where several faults of one name are declared, all of them are put in.
    """

    def declared(wrong: Wrong) -> Wrong:
        known, _ = FAULTS.setdefault(name, ([], promise))
        known.append((*places, wrong))
        return wrong

    return declared


def put_in(name: str) -> list[tuple[Any, str, Any]]:
    """Put a fault into the runtime of this process; what stood in its places."""
    before = []
    for owner, place, wrong in FAULTS[name][0]:
        right = getattr(owner, place)
        before.append((owner, place, right))
        setattr(owner, place, wraps(right)(_around(wrong, right)))
    return before


def _around(wrong: Wrong, right: Wrong) -> Wrong:
    return lambda *given, **more: wrong(right, *given, **more)


@contextlib.contextmanager
def faulty(name: str) -> Iterator[None]:
    """The runtime of this process has a fault inside."""
    before = put_in(name)
    try:
        yield
    finally:
        for place in reversed(before):
            setattr(*place)


# --- a call otherwise, or left out ----------------------------------------------------------------------------------


def left_out(*_: Any) -> None:
    """Do nothing in place of a call."""


fault("memory_length is ignored", "limit", LoopState, "limit")(left_out)
fault("the spill is not copied", "spill", Ring, "spill")(left_out)
fault("sides are not brought together", "open", Replaced, "join")(left_out)
fault("the self-test always passes", "selftest", Driver, "_do_selftest")(lambda *_: {"passed": True})
fault("hashes are not checked", HASHES, txl_runtime, "load")(
    lambda right, *given, **options: right(*given, **options, verify_files=False)
)
fault("idle sequences advance", "idle", LoopState, "count")(
    lambda right, self, counts: right(self, np.maximum(counts, 1))
)
fault("padding is counted", "padding", LoopState, "count")(
    lambda right, self, counts: right(self, np.where(counts > 0, counts.max(), 0).astype(np.int32))
)
fault("reset resets all", "reset", CarriedState, "reset")(lambda right, self, rows=None: right(self))
fault("put goes to the sequence beside", "rows", CarriedState, "put")(
    lambda right, self, row, state: right(self, (row + 1) % self.batch_size, state)
)
fault("commit=False commits", "commit", stream.Stream, "run")(
    lambda right, self, given, lengths=None, commit=True: right(self, given, lengths)
)
fault("what grew keeps its rows", "grows", Growing, "clear")(lambda _, *given: Replaced.clear(*given))
fault("clusters' columns are swapped", "clusters", SplitSoftmax, "tail")(lambda right, *given: right(*given)[:, ::-1])
fault("scores are shifted by one", "score", stream.Stream, "score")(
    lambda right, *given: np.roll(right(*given), 1, axis=1)
)
fault("feed goes step by step", "cut", inputs, "segment_size")(
    lambda right, rest, known, *more: right(rest, known[-1:], *more)
)
fault("draws ignore the row's spawn key", "apart", Sampler, "__init__")(lambda right, *given: right(*given[:5], 0))
fault("temperature is ignored", "temperature", Sampler, "__init__")(
    lambda right, self, temperature, *given: right(self, 1.0 if temperature else 0.0, *given)
)
fault("temperatures have a floor", "temperature", Sampler, "__init__")(
    lambda right, self, temperature, *given: right(self, max(temperature, 0.1) if temperature else 0.0, *given)
)
fault("top_k keeps one more", "top_k", Sampler, "_k_best")(
    lambda right, self, known, count: right(self, known, count + 1)
)
for place in (sampling, best_words):
    fault("top_p keeps one too few", "top_p", place, "reaching")(lambda right, *given: max(1, right(*given) - 1))


# --- counts ---------------------------------------------------------------------------------------------------------


@fault("nothing runs behind b", "lockstep", LoopState, "count")
def nothing_runs_behind_b(right: Any, self: LoopState, counts: Any) -> int:
    rows = right(self, counts)
    self.counters.valid[len(counts) :] = 0
    return int(rows)


@fault("fill ends at M - 1", "fill", SequenceCounters, "__init__")
def fill_stops_early(right: Any, self: SequenceCounters, *given: Any) -> None:
    right(self, *given)
    self.most[:] = np.maximum(self.most - 1, 0)


@fault("padding is shown", "padding", SegmentResult, "outputs")
def padding_is_shown(right: Any, self: SegmentResult) -> Any:
    found = right(self)
    self._counts = np.full_like(self._counts, self._columns)
    shown = right(self)
    return {name: np.where(found[name] == 0, shown[name], found[name]) for name in found}


@fault("look-ahead is taken as padding", "lookahead", Segments, "run")
def run_sees_nothing_ahead(right: Any, self: Any, loop: Any, b: int, given: Any, *more: Any) -> Any:
    return right(self, loop, b, _blind(self._manifest, given), *more)


@fault("look-ahead is taken as padding", "lookahead", stream, "feed_arrays")
def feed_sees_nothing_ahead(right: Any, given: Any, counts: Any, manifest: Any, *more: Any) -> Any:
    return right(_blind(manifest, given), counts, manifest, *more)


def _blind(manifest: Any, given: Any) -> Any:
    ahead = {entry.name: entry.lookahead for entry in manifest.inputs if entry.lookahead}
    for name, count in ahead.items():
        if name in given:
            given = {**given, name: np.array(given[name])}
            given[name][:, -count:] = 0
    return given


# --- states ---------------------------------------------------------------------------------------------------------


@fault("reset forgets the first state", "initial", CarriedState, "reset")
def reset_forgets_the_first_state(right: Any, self: CarriedState, rows: Any = None) -> None:
    for placement in self.loop.placements:
        placement._starts = {name: np.zeros_like(start) for name, start in placement._starts.items()}
    right(self, rows)


@fault("reset empties the memory", "initial", SequenceCounters, "clear")
def reset_empties_the_memory(right: Any, self: SequenceCounters, rows: Any) -> None:
    right(self, rows)
    self.fill[rows] = 0


@fault("select is the wrong way round", "select", CarriedState, "select")
def select_is_the_wrong_way_round(right: Any, self: CarriedState, rows: Any) -> None:
    turned = sorted(np.asarray(rows).tolist()) == list(range(len(rows)))
    right(self, np.argsort(rows) if turned else rows)


@fault("restore loses the fill", "snapshot", LoopState, "put")
def restore_loses_the_fill(right: Any, self: LoopState, row: int, state: Any) -> None:
    right(self, row, state)
    self.counters.fill[row] = 0


@fault("restore turns the head", "snapshot", LoopState, "put")
def restore_turns_the_head(right: Any, self: LoopState, row: int, state: Any) -> None:
    right(self, row, state)
    if self.counters.ring is not None:
        self.counters.head[row] = -state.head % self.counters.ring


# --- log-probabilities and draws ------------------------------------------------------------------------------------


@fault("the last position is the segment's", "last", feeding, "_place")
def the_last_position_is_the_segments(
    right: Any, axes: Any, found: Any, result: Any, first: int, counts: Any, last: bool
) -> None:
    right(axes, found, result, first, np.where(counts > 0, counts.max(), 0) if last else counts, last)


@fault("draws have no spawn key", "draws", Sampler, "__init__")
def draws_are_plain(right: Any, self: Sampler, *given: Any) -> None:
    right(self, *given)
    self._draws = np.random.default_rng(given[3])


def greedy_takes(name: str, pick: Callable[[Any], int]) -> None:
    """A fault: of temperature 0 a word is taken that is not the first of the best ones."""

    @fault(name, "greedy", sampling, "draw")
    def draw(right: Any, samplers: Any, output: Any, features: Any, tokens: Any, count: Any) -> Any:
        failed = right(samplers, output, features, tokens, count)
        for row, sampler in enumerate(samplers):
            if sampler is not None and sampler.temperature == 0:
                values = np.empty((1, output.clusters[-1][1]), np.float32)
                output.logprobs(features[row : row + 1], values)
                tokens[row] = pick(values[0])
        return failed


greedy_takes("greedy takes the second best", lambda values: int(np.argsort(-values)[1]))
greedy_takes("greedy takes the last that ties", lambda values: len(values) - 1 - int(values[::-1].argmax()))


@fault("temperature comes after top_p", "top_p", Sampler, "_candidates")
def temperature_comes_after_top_p(right: Any, self: Sampler, known: Any) -> Any:
    heat, self.temperature = self.temperature, 1.0
    try:
        ids, weights = right(self, known)
    finally:
        self.temperature = heat
    return ids, weights ** (1 / heat)


# --- what is refused ------------------------------------------------------------------------------------------------


@fault("what is wrong is done", "refusals", Driver, "answer")
def what_is_wrong_is_done(right: Any, self: Driver, request: Any) -> Any:
    reply = right(self, request)
    return {"ok": {}} if reply.get("kind") == "usage" else reply


@fault("refusals change the state", "refusals", Driver, "answer")
def refusals_change_the_state(right: Any, self: Driver, request: Any) -> Any:
    reply = right(self, request)
    if reply.get("kind") == "usage" and self._stream is not None:
        self._stream.reset()
    return reply


@fault("text loses the end of its line", "text", Driver, "_do_encode")
def text_loses_its_ends_of_lines(right: Any, self: Driver, request: Any) -> Any:
    found = right(self, request)
    tokens = driver.unpacked(found["tokens"])
    return {"tokens": driver.packed(tokens[: len(tokens) - 1] if len(tokens) else tokens)}


# --- what is asked for, a little otherwise --------------------------------------------------------------------------


def asked_otherwise(
    name: str, promise: str, do: str, change: Callable[[Driver, dict[str, Any]], dict[str, Any]]
) -> None:
    """A fault that changes what a request has before it is answered."""

    @fault(name, promise, Driver, f"_do_{do}")
    def answer(right: Any, self: Driver, request: dict[str, Any]) -> Any:
        return right(self, {**request, **change(self, request)})


def any_model(self: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a snapshot that say that it is of the model that is loaded."""
    data = base64.b64decode(request["bytes"])
    header = data.partition(b'"model_id":')[2].lstrip()[1:65]
    return {"bytes": driver.packed_bytes(data.replace(header, self.model.manifest.model_id.encode()))}


def lines(self: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """A text whose lines end where Python's `str.splitlines` has ends."""
    return {"bytes": driver.packed_bytes(b"\n".join(base64.b64decode(request["bytes"]).splitlines()))}


@fault("put forgets the stream's memory_length", "limit", Driver, "_do_put")
def put_forgets_the_limit(right: Any, self: Driver, request: Any) -> Any:
    held = self.stream.snapshot()
    self._stream = self.model.stream(self.stream.batch_size)
    self._stream.restore(held)
    return right(self, request)


for size in (32, 64, 128):
    fault(f"seeds are cut to {size} bits", "draws", Sampler, "__init__")(
        lambda right, *given, size=size: right(*given[:4], given[4] % 2**size, *given[5:])
    )
asked_otherwise(
    "a memory_length of 0 is none", "limit", "open", lambda _, asked: {"memory_length": asked["memory_length"] or None}
)
asked_otherwise(
    "too many sequences are cut", "refusals", "open", lambda self, asked: {"b": min(asked["b"], self.model.batch_size)}
)
asked_otherwise(
    "sequences are counted from the end",
    "refusals",
    "select",
    lambda self, asked: {"rows": [row % self.stream.batch_size for row in asked["rows"]]},
)
asked_otherwise("a reset of none is one of all", "reset", "reset", lambda _, asked: {"rows": asked["rows"] or None})
asked_otherwise("a snapshot of any model is taken", "refusals", "restore", any_model)
asked_otherwise("lines end at other signs", "text", "encode", lines)
asked_otherwise(
    "top_p is forgotten beside a small top_k",
    "top_p",
    "generate",
    lambda _, asked: {"top_p": asked["top_p"] if asked["top_k"] != 3 else None},
)
asked_otherwise(
    "temperatures are float32",
    "temperature",
    "generate",
    lambda _, asked: {"temperature": float(np.float32(asked["temperature"]))},
)


# --- manners --------------------------------------------------------------------------------------------------------


def rounded(reply: Any) -> Any:
    """A reply whose numbers are a little larger."""
    if is_array(reply):
        array = driver.unpacked(reply)
        return driver.packed(array * np.float32(1.000001) if array.dtype == np.float32 else array)
    return {name: rounded(part) for name, part in reply.items()} if isinstance(reply, dict) else reply


class Odd(Driver):
    """A driver that is right until it is asked for a third stream."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.manner, self.opened = manner, 0

    def answer(self, request: object) -> dict[str, Any]:
        self.opened += isinstance(request, dict) and request.get("do") == "open"
        if self.manner == "lacks" and isinstance(request, dict) and request.get("do") == "hello":
            hello = super().answer(request)
            hello["ok"]["supports"] = ["padding", "initial", "lockstep", "selftest", "text"]
            return hello
        if self.manner == "rounds":
            return rounded(super().answer(request))
        return self.misbehave() if self.opened == 3 else super().answer(request)

    def misbehave(self) -> dict[str, Any]:
        if self.manner == "dies":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        if self.manner == "aborts":
            os.abort()
        if self.manner == "out of order":
            return {"id": 1, "ok": {}}
        if self.manner == "declines":
            return {"refused": "not yet", "kind": "unsupported"}
        return {"ok": {}}


MANNERS = ("rounds", "dies", "aborts", "out of order", "declines", "lacks")


def main() -> None:
    """Answer, wrongly."""
    (name,) = sys.argv[1:]
    if name in MANNERS:
        driver.main(Odd(name))
    else:
        if name != "nothing":
            put_in(name)
        driver.main()


if __name__ == "__main__":
    main()
