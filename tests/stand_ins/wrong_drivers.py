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
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
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

from txl_deploy.conformance import driver
from txl_deploy.conformance.driver import Driver
from txl_deploy.conformance.messages import is_array

HASHES = "every file has the size and the SHA-256 that the manifest says"


_changed: list[tuple[Any, str, Any]] = []


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Put a function around one of the runtime's: it is called with the right one first."""

    def put(wrong: Callable[..., Any]) -> None:
        right = getattr(owner, name)
        _changed.append((owner, name, right))
        setattr(owner, name, wraps(right)(lambda *given, **more: wrong(right, *given, **more)))

    return put


@contextlib.contextmanager
def faulty(name: str) -> Iterator[None]:
    """The runtime of this process has a fault inside."""
    FAULTS[name][0]()
    try:
        yield
    finally:
        while _changed:
            setattr(*_changed.pop())


# --- counts ---------------------------------------------------------------------------------------------------------


def nothing_runs_behind_b() -> None:
    """In lockstep, sequences behind b count nothing."""

    @around(LoopState, "count")
    def count(right: Any, self: LoopState, counts: Any) -> int:
        rows = right(self, counts)
        self.counters.valid[len(counts) :] = 0
        return int(rows)


def idle_sequences_advance() -> None:
    """One of no positions counts one."""

    @around(LoopState, "count")
    def count(right: Any, self: LoopState, counts: Any) -> int:
        return int(right(self, np.maximum(counts, 1)))


def fill_stops_early() -> None:
    """Fill ends at M - 1."""

    @around(SequenceCounters, "__init__")
    def init(right: Any, self: SequenceCounters, *given: Any) -> None:
        right(self, *given)
        self.most[:] = np.maximum(self.most - 1, 0)


def padding_is_counted() -> None:
    """Every sequence that runs counts as far as the longest."""

    @around(LoopState, "count")
    def count(right: Any, self: LoopState, counts: Any) -> int:
        return int(right(self, np.where(counts > 0, counts.max(), 0).astype(np.int32)))


def padding_is_shown() -> None:
    """Results beyond the counts are what the program returned."""

    @around(SegmentResult, "outputs")
    def outputs(right: Any, self: SegmentResult) -> Any:
        found = right(self)
        self._counts = np.full_like(self._counts, self._columns)
        shown = right(self)
        return {name: np.where(found[name] == 0, shown[name], found[name]) for name in found}


def memory_length_is_ignored() -> None:
    """A stream keeps all M rows whatever it was opened with."""

    @around(LoopState, "limit")
    def limit(right: Any, *_: Any) -> None:
        return


def lookahead_is_padding() -> None:
    """The positions behind a segment are zeros."""

    @around(Segments, "run")
    def run(right: Any, self: Any, loop: Any, b: int, given: Any, *more: Any) -> Any:
        return right(self, loop, b, _blind(self._manifest, given), *more)

    @around(stream, "feed_arrays")
    def feed_arrays(right: Any, given: Any, counts: Any, manifest: Any, *more: Any) -> Any:
        return right(_blind(manifest, given), counts, manifest, *more)


def _blind(manifest: Any, given: Any) -> Any:
    ahead = {entry.name: entry.lookahead for entry in manifest.inputs if entry.lookahead}
    for name, count in ahead.items():
        if name in given:
            given = {**given, name: np.array(given[name])}
            given[name][:, -count:] = 0
    return given


# --- states ---------------------------------------------------------------------------------------------------------


def the_spill_is_not_copied() -> None:
    """What was written behind the ring stays there."""

    @around(Ring, "spill")
    def spill(right: Any, *_: Any) -> None:
        return


def reset_forgets_the_first_state() -> None:
    """A reset puts zeros where a state starts as something else."""

    @around(CarriedState, "reset")
    def reset(right: Any, self: CarriedState, rows: Any = None) -> None:
        for placement in self.loop.placements:
            placement._starts = {name: np.zeros_like(start) for name, start in placement._starts.items()}
        right(self, rows)


def reset_empties_the_memory() -> None:
    """A reset leaves no rows, where memory begins with M rows that are attended to."""

    @around(SequenceCounters, "clear")
    def clear(right: Any, self: SequenceCounters, rows: Any) -> None:
        right(self, rows)
        self.fill[rows] = 0


def reset_resets_all() -> None:
    """All sequences begin anew where some should."""

    @around(CarriedState, "reset")
    def reset(right: Any, self: CarriedState, rows: Any = None) -> None:
        right(self)


def select_is_the_wrong_way_round() -> None:
    """Sequence i goes to place rows[i]."""

    @around(CarriedState, "select")
    def select(right: Any, self: CarriedState, rows: Any) -> None:
        turned = sorted(np.asarray(rows).tolist()) == list(range(len(rows)))
        right(self, np.argsort(rows) if turned else rows)


def restore_loses_the_fill() -> None:
    """What is restored has no rows."""

    @around(LoopState, "put")
    def put(right: Any, self: LoopState, row: int, state: Any) -> None:
        right(self, row, state)
        self.counters.fill[row] = 0


def restore_turns_the_head() -> None:
    """The next row goes to the slot of the same number from the other end."""

    @around(LoopState, "put")
    def put(right: Any, self: LoopState, row: int, state: Any) -> None:
        right(self, row, state)
        if self.counters.ring is not None:
            self.counters.head[row] = -state.head % self.counters.ring


def put_leaves_the_sequence() -> None:
    """What was put goes to the sequence beside."""

    @around(CarriedState, "put")
    def put(right: Any, self: CarriedState, row: int, state: Any) -> None:
        right(self, (row + 1) % self.batch_size, state)


def committed() -> None:
    """commit=False commits."""

    @around(stream.Stream, "run")
    def run(right: Any, self: Any, given: Any, lengths: Any = None, commit: bool = True) -> Any:
        return right(self, given, lengths)


def growing_states_keep_their_rows() -> None:
    """A reset makes what grew zeros, and leaves as many rows."""

    @around(Growing, "clear")
    def clear(right: Any, self: Growing, rows: Any) -> None:
        Replaced.clear(self, rows)


# --- log-probabilities and draws ------------------------------------------------------------------------------------


def clusters_are_swapped() -> None:
    """The head's columns for further clusters stand the other way round."""

    @around(SplitSoftmax, "tail")
    def tail(right: Any, self: SplitSoftmax, features: Any, cluster: int) -> Any:
        return right(self, features, cluster)[:, ::-1]


def scores_are_shifted() -> None:
    """The cost of each token stands one place later."""

    @around(stream.Stream, "score")
    def score(right: Any, self: Any, *given: Any) -> Any:
        return np.roll(right(self, *given), 1, axis=1)


def the_last_position_is_the_segments() -> None:
    """What is taken for the last position that counts is the last that there is."""

    @around(feeding, "_place")
    def place(right: Any, axes: Any, found: Any, result: Any, first: int, counts: Any, last: bool) -> None:
        right(axes, found, result, first, np.where(counts > 0, counts.max(), 0) if last else counts, last)


def feed_goes_step_by_step() -> None:
    """Segments are as short as they can be."""

    @around(inputs, "segment_size")
    def segment_size(right: Any, rest: int, known: Any, *more: Any) -> Any:
        return right(rest, known[-1:], *more)


def draws_are_shared() -> None:
    """All sequences draw the numbers of the first."""

    @around(Sampler, "__init__")
    def init(right: Any, self: Sampler, *given: Any) -> None:
        right(self, *given[:4], 0)


def draws_are_plain() -> None:
    """The numbers are a plain generator's of the seed."""

    @around(Sampler, "__init__")
    def init(right: Any, self: Sampler, *given: Any) -> None:
        right(self, *given)
        self._draws = np.random.default_rng(given[3])


def greedy_is_second_best() -> None:
    """Of temperature 0 the second best word is taken."""

    @around(sampling, "draw")
    def draw(right: Any, samplers: Any, output: Any, features: Any, tokens: Any, count: Any) -> Any:
        failed = right(samplers, output, features, tokens, count)
        for row, sampler in enumerate(samplers):
            if sampler is not None and sampler.temperature == 0:
                values = np.empty((1, output.clusters[-1][1]), np.float32)
                output.logprobs(features[row : row + 1], values)
                tokens[row] = np.argsort(-values[0])[1]
        return failed


def top_p_keeps_one_too_few() -> None:
    """The word that reaches the share is cut off."""
    for module in (sampling, best_words):

        @around(module, "reaching")
        def reaching(right: Any, *given: Any) -> int:
            return max(1, right(*given) - 1)


def top_k_keeps_one_more() -> None:
    """One word more than k."""

    @around(Sampler, "_k_best")
    def k_best(right: Any, self: Sampler, known: Any, count: int) -> Any:
        return right(self, known, count + 1)


def temperature_comes_after_top_p() -> None:
    """The nucleus is that of temperature 1; only the draw within it is at the temperature."""

    @around(Sampler, "_candidates")
    def candidates(right: Any, self: Sampler, known: Any) -> Any:
        heat, self.temperature = self.temperature, 1.0
        try:
            ids, weights = right(self, known)
        finally:
            self.temperature = heat
        return ids, weights ** (1 / heat)


def temperature_is_ignored() -> None:
    """Every draw is at temperature 1."""

    @around(Sampler, "__init__")
    def init(right: Any, self: Sampler, temperature: float, *given: Any) -> None:
        right(self, 1.0 if temperature else 0.0, *given)


# --- what is refused ------------------------------------------------------------------------------------------------


def hashes_are_not_checked() -> None:
    """A file is taken as it is, where its size is right."""

    @around(txl_runtime, "load")
    def load(right: Any, *given: Any, **options: Any) -> Any:
        return right(*given, **options, verify_files=False)


def what_is_wrong_is_done() -> None:
    """What has to be refused is answered with nothing."""

    @around(Driver, "answer")
    def answer(right: Any, self: Driver, request: Any) -> Any:
        reply = right(self, request)
        return {"ok": {}} if reply.get("kind") == "usage" else reply


def refusals_change_the_state() -> None:
    """What is refused has happened to the first sequence."""

    @around(Driver, "answer")
    def answer(right: Any, self: Driver, request: Any) -> Any:
        reply = right(self, request)
        if reply.get("kind") == "usage" and self._stream is not None:
            self._stream.reset()
        return reply


def text_loses_its_ends_of_lines() -> None:
    """Text comes back without the ends of its lines."""

    @around(Driver, "_do_encode")
    def encode(right: Any, self: Driver, request: Any) -> Any:
        found = right(self, request)
        tokens = driver.unpacked(found["tokens"])
        return {"tokens": driver.packed(tokens[: len(tokens) - 1] if len(tokens) else tokens)}


def open_batch_is_wrong() -> None:
    """What stands on both sides is not brought to one."""

    @around(Replaced, "join")
    def join(right: Any, *_: Any) -> None:
        return


# --- what is asked for, a little otherwise --------------------------------------------------------------------------


def asked_otherwise(do: str, change: Callable[[Driver, dict[str, Any]], dict[str, Any]]) -> Callable[[], None]:
    """A fault that changes what a request has before it is answered."""

    def fault() -> None:
        @around(Driver, f"_do_{do}")
        def answer(right: Any, self: Driver, request: dict[str, Any]) -> Any:
            return right(self, {**request, **change(self, request)})

    return fault


def any_model(self: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a snapshot that say that it is of the model that is loaded."""
    data = base64.b64decode(request["bytes"])
    header = data.partition(b'"model_id":')[2].lstrip()[1:65]
    return {"bytes": driver.packed_bytes(data.replace(header, self.model.manifest.model_id.encode()))}


def lines(self: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """A text whose lines end where Python's `str.splitlines` has ends."""
    return {"bytes": driver.packed_bytes(b"\n".join(base64.b64decode(request["bytes"]).splitlines()))}


def greedy_takes_the_last_that_ties() -> None:
    """Of words that are equally probable the last is taken."""

    @around(sampling, "draw")
    def draw(right: Any, samplers: Any, output: Any, features: Any, tokens: Any, count: Any) -> Any:
        failed = right(samplers, output, features, tokens, count)
        for row, sampler in enumerate(samplers):
            if sampler is not None and sampler.temperature == 0:
                values = np.empty((1, output.clusters[-1][1]), np.float32)
                output.logprobs(features[row : row + 1], values)
                tokens[row] = values.shape[1] - 1 - values[0, ::-1].argmax()
        return failed


def seeds_are_cut(bits: int) -> Callable[[], None]:
    """A fault: of a seed only the lowest bits are used."""

    def fault() -> None:
        @around(Sampler, "__init__")
        def init(right: Any, self: Sampler, *given: Any) -> None:
            right(self, *given[:3], given[3] % 2**bits, *given[4:])

    return fault


def temperatures_have_a_floor() -> None:
    """What is colder than 0.1 is drawn as if it were not."""

    @around(Sampler, "__init__")
    def init(right: Any, self: Sampler, temperature: float, *given: Any) -> None:
        right(self, max(temperature, 0.1) if temperature else 0.0, *given)


def put_forgets_the_limit() -> None:
    """After a put the stream keeps all M rows."""

    @around(Driver, "_do_put")
    def put(right: Any, self: Driver, request: Any) -> Any:
        held = self.stream.snapshot()
        self._stream = self.model.stream(self.stream.batch_size)
        self._stream.restore(held)
        return right(self, request)


def the_selftest_always_passes() -> None:
    """Whatever the stored vectors say, they pass."""

    @around(Driver, "_do_selftest")
    def selftest(right: Any, self: Driver, request: Any) -> Any:
        return {"passed": True}


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "nothing runs behind b": (nothing_runs_behind_b, "lockstep"),
    "idle sequences advance": (idle_sequences_advance, "idle"),
    "fill ends at M - 1": (fill_stops_early, "fill"),
    "padding is counted": (padding_is_counted, "padding"),
    "padding is shown": (padding_is_shown, "padding"),
    "the spill is not copied": (the_spill_is_not_copied, "spill"),
    "reset forgets the first state": (reset_forgets_the_first_state, "initial"),
    "reset empties the memory": (reset_empties_the_memory, "initial"),
    "reset resets all": (reset_resets_all, "reset"),
    "select is the wrong way round": (select_is_the_wrong_way_round, "select"),
    "restore loses the fill": (restore_loses_the_fill, "snapshot"),
    "restore turns the head": (restore_turns_the_head, "snapshot"),
    "put goes to the sequence beside": (put_leaves_the_sequence, "rows"),
    "memory_length is ignored": (memory_length_is_ignored, "limit"),
    "commit=False commits": (committed, "commit"),
    "look-ahead is taken as padding": (lookahead_is_padding, "lookahead"),
    "what grew keeps its rows": (growing_states_keep_their_rows, "grows"),
    "sides are not brought together": (open_batch_is_wrong, "open"),
    "the last position is the segment's": (the_last_position_is_the_segments, "last"),
    "feed goes step by step": (feed_goes_step_by_step, "cut"),
    "clusters' columns are swapped": (clusters_are_swapped, "clusters"),
    "scores are shifted by one": (scores_are_shifted, "score"),
    "greedy takes the second best": (greedy_is_second_best, "greedy"),
    "draws ignore the row's spawn key": (draws_are_shared, "apart"),
    "draws have no spawn key": (draws_are_plain, "draws"),
    "top_k keeps one more": (top_k_keeps_one_more, "top_k"),
    "top_p keeps one too few": (top_p_keeps_one_too_few, "top_p"),
    "temperature comes after top_p": (temperature_comes_after_top_p, "top_p"),
    "temperature is ignored": (temperature_is_ignored, "temperature"),
    "text loses the end of its line": (text_loses_its_ends_of_lines, "text"),
    "what is wrong is done": (what_is_wrong_is_done, "refusals"),
    "refusals change the state": (refusals_change_the_state, "refusals"),
    "a memory_length of 0 is none": (
        asked_otherwise("open", lambda _, request: {"memory_length": request["memory_length"] or None}),
        "limit",
    ),
    "too many sequences are as many as there can be": (
        asked_otherwise("open", lambda self, request: {"b": min(request["b"], self.model.batch_size)}),
        "refusals",
    ),
    "sequences are counted from the end": (
        asked_otherwise(
            "select", lambda self, request: {"rows": [r % self.stream.batch_size for r in request["rows"]]}
        ),
        "refusals",
    ),
    "a reset of none is one of all": (
        asked_otherwise("reset", lambda _, request: {"rows": request["rows"] or None}),
        "reset",
    ),
    "a snapshot of any model is taken": (asked_otherwise("restore", any_model), "refusals"),
    "lines end at other signs": (asked_otherwise("encode", lines), "text"),
    "greedy takes the last that ties": (greedy_takes_the_last_that_ties, "greedy"),
    "seeds are cut to 32 bits": (seeds_are_cut(32), "draws"),
    "seeds are cut to 64 bits": (seeds_are_cut(64), "draws"),
    "seeds are cut to 128 bits": (seeds_are_cut(128), "draws"),
    "temperatures have a floor": (temperatures_have_a_floor, "temperature"),
    "put forgets the stream's memory_length": (put_forgets_the_limit, "limit"),
    "top_p is forgotten beside a small top_k": (
        asked_otherwise("generate", lambda _, request: {"top_p": request["top_p"] if request["top_k"] != 3 else None}),
        "top_p",
    ),
    "temperatures are float32": (
        asked_otherwise("generate", lambda _, request: {"temperature": float(np.float32(request["temperature"]))}),
        "temperature",
    ),
    "the self-test always passes": (the_selftest_always_passes, "selftest"),
    "hashes are not checked": (hashes_are_not_checked, HASHES),
}
"""Every fault, and the promise that it breaks."""


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
        if self.manner == "says both":
            return {"refused": "perhaps", "kind": "usage", "ok": {}, **super().answer(request)}
        if self.manner == "rounds":
            return rounded(super().answer(request))
        if self.manner == "takes another rule":
            reply = super().answer(request)
            return {"ok": {"update": "rolled"}} if "update" in reply.get("ok", {}) else reply
        return self.misbehave() if self.opened == 3 else super().answer(request)

    def misbehave(self) -> dict[str, Any]:
        if self.manner == "dies":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        if self.manner == "aborts":
            os.abort()
        if self.manner == "hangs":
            Path(sys.argv[2]).with_name("hangs").touch()
            time.sleep(1000)
        if self.manner == "chatters":
            print("loading weights …", flush=True)
        if self.manner == "out of order":
            return {"id": 1, "ok": {}}
        if self.manner == "declines":
            return {"refused": "not yet", "kind": "unsupported"}
        return {"ok": {}}


MANNERS = (
    *("rounds", "takes another rule", "dies", "aborts", "hangs", "chatters", "out of order", "declines", "lacks"),
    "says both",
)


def main() -> None:
    """Answer, wrongly."""
    name, *note = sys.argv[1:]
    if note:  # a file that is told which process this is
        Path(note[0]).write_text(str(os.getpid()))
    if name in MANNERS:
        driver.main(Odd(name))
    else:
        if name != "nothing":
            FAULTS[name][0]()
        driver.main()


if __name__ == "__main__":
    main()
