"""Run the same operations on streams of any loaded model, and yield all results, which `bit_equality.py` compares.

A scene is a sequence of operations on a stream. The module uses only public names of the runtime, so that the same file
runs with two checkouts. If a model refuses an operation, the message of the error is the result. The random inputs
depend only on the manifest's tables and on fixed seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

Items = Iterator[tuple[str, Any]]
"""Pairs of a result's name and the result: an array, or a message as an array of one string."""
HUGE = 3e38
"""A feature so large that the sum of two such features overflows to infinity."""


class Scenes:
    """The scenes of one loaded model.

    Args:
        model: the result of `txl_runtime.load`.
        snapshot: the path to which a stream's state is stored.
        others: the path of a state that the other record stored, which a fresh stream continues; None to continue the
            state of `snapshot`.
    """

    def __init__(self, model: Any, snapshot: Path, others: Path | None) -> None:
        from txl_runtime.errors import TxlError

        self._refusal: type[Exception] = TxlError
        manifest: dict[str, Any] = json.loads(msgspec.json.encode(model.manifest))
        self._model, self._snapshot, self._others = model, snapshot, others
        self._b, self._v = manifest["batch_size"], model.vocab_size
        self._table = [entry for entry in manifest["inputs"] if entry["role"] in ("tokens", "feature")]
        self._exact, self._lockstep = manifest["lengths"] == "exact", manifest["streams"] == "lockstep"
        self._joint = manifest["joint"]
        self._lengths = sorted({p["segment_length"] for p in manifest["programs"]} - {0}, reverse=True)
        self._longest = self._lengths[0]
        self._memory_length = model.memory_length or 0
        logprobs = any(entry["role"] == "logprobs" for entry in manifest["outputs"])
        self._of_tokens = logprobs and [entry["role"] for entry in self._table] == ["tokens"]

    def items(self) -> Items:
        """Run all scenes that fit the model; yield name and value of every result."""
        scenes = [self._run, self._smaller, self._uncommitted, self._finite, self._poisoned, self._feed_arrays]
        scenes += [self._moved, self._states]
        if self._of_tokens:
            scenes += [self._step, self._feed, self._generate, self._rows, self._limited]
        else:
            scenes += [self._refused]
        for scene in scenes:
            for item, array in scene():
                yield f"{scene.__name__[1:]}: {item}", array

    # --- random inputs --------------------------------------------------------------------------------------------

    def _arrays(self, length: int, seed: int, rows: int | None = None) -> dict[str, Any]:
        """Draw random inputs of `length` positions, by name, for `rows` sequences (None for the model's batch size)."""
        draws = np.random.default_rng(seed)
        places = {"B": rows or self._b}
        results = {}
        for entry in self._table:
            sizes = [places.get(size, length + entry["lookahead"] if size == "L" else size) for size in entry["shape"]]
            whole = not entry["dtype"].startswith("float")
            drawn = draws.integers(0, entry["vocab"] or 2, sizes) if whole else draws.normal(size=sizes)
            results[entry["name"]] = drawn.astype(entry["dtype"])
        return results

    def _tokens(self, length: int, seed: int, rows: int | None = None) -> Any:
        shape = (rows or self._b, length)
        return np.random.default_rng(seed).integers(0, self._v, shape, dtype=np.int32)

    def _one(self, length: int) -> int:
        """Return `length`; of a model with exact lengths, its longest segment length that is at most `length`."""
        return next((size for size in self._lengths if size <= length), self._lengths[-1]) if self._exact else length

    def _many(self, length: int) -> int:
        """Return the largest number up to `length` that segment lengths add up to; 1 for inputs without positions."""
        if not any("L" in entry["shape"] for entry in self._table):
            return 1
        return next((size for size in range(length, 0, -1) if self._edges(size)[-1] == size), self._lengths[-1])

    def _edges(self, length: int) -> list[int]:
        """Return the lengths from 0 to `length` that a sequence can have: [0, 4, 8] of 9, if 4 is the exact length."""
        if not self._exact:
            return list(range(length + 1))
        edges = [0]
        while (step := next((size for size in self._lengths if size <= length - edges[-1]), 0)) > 0:
            edges.append(edges[-1] + step)
        return edges

    def _counts(self, length: int, seed: int, rows: int | None = None, least: int = 0) -> Any:
        """Draw for each sequence the number of positions that count, from 0 (from 1 if `least` is 1) to `length`.

        The last sequence has at least 1. In lockstep all have `length`. For example, [0, 5, 3] of 3 sequences.
        """
        b = rows or self._b
        if self._lockstep:
            return np.full(b, length)
        draws, edges = np.random.default_rng(seed), self._edges(length)
        counts = np.array(edges)[draws.integers(min(least, 1), len(edges), b)]
        counts[-1] = max(edges[1], counts[-1])
        return counts

    def _live(self, index: int, b: int) -> Any:
        """Return mask number `index` of the sequences that run, bool [b], e.g. [True, False] for index 0.

        In order: only one runs, all but one, all, none, the first half, the second half, every second one.
        """
        places = np.arange(b)
        ways = [places == row for row in range(b)] + [places != row for row in range(b)]
        ways += [places >= 0, places < 0, places < (b + 1) // 2, places >= b // 2, places % 2 == 0]
        chosen = ways[index % len(ways)]
        return np.full(b, bool(chosen.any())) if self._lockstep else chosen

    # --- results --------------------------------------------------------------------------------------------------

    def _tried(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Items:
        """Call a function, and yield the array or arrays that it returns, or the message with which it refuses."""
        try:
            result = call(*arguments, **named)
        except self._refusal as error:
            yield f"{name}, refused", np.array(str(error))
            return
        if isinstance(result, Mapping):
            yield from ((f"{name}, {key}", array) for key, array in result.items())
        elif isinstance(result, np.ndarray):
            yield name, result

    def _after(self, stream: Any, name: str) -> Items:
        yield f"{name}, fill", stream.fill
        if self._memory_length:
            for layer, rows in stream.memory().items():
                yield f"{name}, memory {layer}", rows
        for state, values in stream.state().items():
            yield f"{name}, state {state}", values

    # --- scenes of any model --------------------------------------------------------------------------------------

    def _run(self) -> Items:
        stream = self._model.stream()
        for index, wanted in enumerate((self._longest, 1, 1, self._longest, max(1, self._longest // 2), 1)):
            length = self._one(wanted)
            yield from self._tried(f"whole {index}", stream.run, self._arrays(length, index))
        yield from self._after(stream, "whole segments")
        laps = 3 * self._memory_length // self._longest
        for index in range(max(2 * self._b + 5, 6 + laps)):
            length = self._one((self._longest, 1, max(1, self._longest // 2))[index % 3])
            counts = self._counts(length, 100 + index, least=1) * self._live(index, self._b)
            arrays = self._arrays(length, 200 + index)
            yield from self._tried(f"partly idle {index}", stream.run, arrays, counts)
            if index % 4 == 3:
                yield from self._after(stream, f"partly idle {index}")
        yield from self._after(stream, "partly idle segments")
        yield "shown", np.array(repr(stream))

    def _smaller(self) -> Items:
        """Run streams of fewer sequences than the bundle has, then enlarge each to the bundle's number."""
        for b in range(1, self._b):
            try:
                stream = self._model.stream(b)
            except self._refusal as error:
                yield f"{b}, refused", np.array(str(error))
                continue
            for index in range(4):
                length = self._one((self._longest, 1)[index % 2])
                counts = self._counts(length, 300 + index, b, least=1) * self._live(index, b)
                arrays = self._arrays(length, 310 + index, b)
                yield from self._tried(f"{b}, segment {index}", stream.run, arrays, counts)
            yield from self._after(stream, f"{b}")
            stream.select([row % b for row in range(self._b)])
            arrays = self._arrays(self._one(1), 320)
            yield from self._tried(f"{b} become {self._b}", stream.run, arrays)
            yield from self._after(stream, f"{b} become {self._b}")

    def _uncommitted(self) -> Items:
        stream = self._model.stream()
        for index in range(2 + 2 * self._memory_length // self._longest):
            stream.run(self._arrays(self._longest, 400 + index))
        for index in range(6):
            length = self._one((self._longest, 1)[index % 2])
            arrays, counts = self._arrays(length, 410 + index), self._counts(length, 420 + index)
            counts *= self._live(index, self._b)
            for commit in (False, False, True):
                name = f"{index}, {'kept' if commit else 'not kept'}"
                yield from self._tried(name, stream.run, arrays, counts, commit=commit)
                yield from self._after(stream, name)

    def _finite(self) -> Items:
        stream = self._model.stream()
        for index in range(5):
            length = self._one((self._longest, 1)[index % 2])
            arrays = self._arrays(length, 500 + index)
            live = self._live(2 * self._b if index > 2 else index, self._b)
            counts = self._counts(length, 510 + index, least=1) * live
            # segments 0 and 1 are healthy; sequence 0 gets NaN in segments 2 and 3, and huge values in segment 4
            if index >= 2:
                self._spoil(arrays, 0, np.nan if index < 4 else HUGE)
            for commit in (False, True):
                name = f"{index}, {'kept' if commit else 'not kept'}"
                yield from self._tried(name, stream.run, arrays, counts, commit=commit, require_finite=True)
                yield from self._after(stream, name)

    def _poisoned(self) -> Items:
        """Put NaN into one sequence's inputs or state, beside healthy sequences; then reset that sequence."""
        if self._b == 1:
            return
        stream, length = self._model.stream(), self._one(self._longest)
        for index in range(3):
            stream.run(self._arrays(length, 600 + index))
        arrays = self._arrays(length, 610)
        self._spoil(arrays, 1, np.nan)
        yield from self._tried("inputs", stream.run, arrays)
        yield from self._after(stream, "inputs")
        yield from self._tried("state", self._poison, stream)
        for index in range(3):
            some = self._arrays(self._one(1), 620 + index)
            live = self._live(self._b + index, self._b) * self._one(1)
            yield from self._tried(f"beside {index}", stream.run, some, live)
        yield from self._after(stream, "beside")
        yield from self._tried("reset", stream.reset, [1])
        some = self._arrays(length, 630)
        yield from self._tried("after the reset", stream.run, some)
        yield from self._after(stream, "after the reset")

    def _spoil(self, arrays: dict[str, Any], row: int, value: float) -> None:
        """Set all floating-point features of sequence `row` to `value`."""
        for entry in self._table:
            if entry["dtype"].startswith("float") and "B" in entry["shape"]:
                arrays[entry["name"]][(slice(None),) * entry["shape"].index("B") + (row,)] = value

    def _poison(self, stream: Any) -> None:
        """Let sequence 1 continue from a state full of NaN, if sequences have states of their own."""
        state = stream.take(1)
        for array in state.tensors.values():
            if array.dtype.kind == "f":
                array.fill(np.nan)
        stream.put(1, state)

    def _feed_arrays(self) -> Items:
        stream = self._model.stream()
        length = self._many(2 * self._longest + self._memory_length + 3)
        for index, last in enumerate((False, True, False, True)):
            arrays, counts = self._arrays(length, 700 + index), self._counts(length, 710 + index)
            given = None if index < 2 else counts
            name = f"{'last of ' if last else ''}{'all' if given is None else 'some'}"
            yield from self._tried(name, stream.feed, arrays, given, last)
            yield from self._after(stream, name)

    def _moved(self) -> Items:
        """Reset, reorder, drop and double sequences, and move their states."""
        stream, length = self._model.stream(), self._one(self._longest)
        for index in range(4 + 2 * self._memory_length // self._longest):
            arrays = self._arrays(length, 800 + index)
            counts = self._counts(length, 810 + index, least=1) * self._live(2 * self._b + 4 + index, self._b)
            yield from self._tried(f"before {index}", stream.run, arrays, counts)
        changes: list[tuple[str, Callable[..., Any], Any]] = [
            ("reset of the last", stream.reset, [self._b - 1]),
            ("reset of none", stream.reset, []),
            ("reset by flags", stream.reset, np.arange(self._b) % 2 == 0),
            ("doubled", stream.select, [row // 2 for row in range(self._b)][::-1]),
            ("turned", stream.select, list(range(self._b))[::-1]),
            ("one left", stream.select, [self._b - 1]),
            ("as many as before", stream.select, [0] * self._b),
            ("put", self._exchange, stream),
            ("reset of all", stream.reset, None),
        ]
        for index, (name, change, given) in enumerate(changes):
            yield from self._tried(name, change, given)
            yield from self._after(stream, name)
            b, size = stream.batch_size, self._one((1, self._longest)[index % 2])
            arrays = self._arrays(size, 820 + index, b)
            counts = self._counts(size, 830 + index, b, least=1) * self._live(index, b)
            yield from self._tried(f"{name}, then some", stream.run, arrays, counts)
            arrays = self._arrays(size, 840 + index, b)
            yield from self._tried(f"{name}, then all", stream.run, arrays)
        yield from self._after(stream, "moved")

    def _exchange(self, stream: Any) -> None:
        """Put the last sequence's state into the first sequence, and a state of a second stream into the last one."""
        other = self._model.stream()
        other.run(self._arrays(self._one(self._longest), 850))
        taken = stream.take(stream.batch_size - 1)
        stream.put(0, taken)
        stream.put(stream.batch_size - 1, other.take(0))

    def _states(self) -> Items:
        from safetensors.numpy import load_file
        from txl_runtime import StreamState

        stream = self._model.stream()
        length = self._many(self._memory_length + self._longest + 3)
        yield from self._tried("fed", stream.feed, self._arrays(length, 50), self._counts(length, 50))
        stream.run(self._arrays(self._one(1), 51))
        stream.snapshot().save(self._snapshot)
        for name, tensor in load_file(self._snapshot).items():
            yield f"file, {name}", tensor
        yield from self._continued(stream, "continued at once")
        stream.restore(StreamState.load(self._snapshot))
        yield from self._continued(stream, "continued in the same stream")
        fresh = self._model.stream()
        # with --snapshots, this is the state that the other record stored
        fresh.restore(StreamState.load(self._others or self._snapshot))
        yield from self._after(fresh, "restored")
        yield from self._continued(fresh, "continued in a fresh stream")
        yield from self._after(fresh, "continued in a fresh stream")

    def _continued(self, stream: Any, name: str) -> Items:
        length = self._many(3 * self._longest + 1)
        yield from self._tried(f"{name}, fed", stream.feed, self._arrays(length, 52))
        yield from self._tried(f"{name}, run", stream.run, self._arrays(self._one(1), 53))

    def _generated(self, stream: Any, prompt: Any, number: int, **how: Any) -> Any:
        return np.array(list(stream.generate(prompt, number, **how)))

    # --- scenes of models of tokens -------------------------------------------------------------------------------

    def _refused(self) -> Items:
        """Call the methods that need tokens, and yield the messages with which a model of other inputs refuses."""
        stream, tokens = self._model.stream(), np.zeros((self._b, 1), np.int32)
        for name in ("step", "feed", "score"):
            yield from self._tried(name, getattr(stream, name), tokens)
        yield from self._tried("generate", self._generated, stream, tokens, 2)
        yield from self._tried("memory", stream.memory)
        yield from self._tried("memory_length", self._model.stream, memory_length=1)

    def _step(self) -> Items:
        stream = self._model.stream()
        shorter = max(1, self._longest // 2)
        for index, wanted in enumerate((1, self._longest, shorter, 1, 1, self._longest, 1)):
            length = self._one(wanted)
            yield f"{index}", stream.step(self._tokens(length, index))
        yield from self._after(stream, "whole segments")
        # the number of steps is large enough to go around a ring several times
        for index in range(6 + 3 * self._memory_length // self._longest):
            length = self._one((self._longest, shorter, 1)[index % 3])
            yield f"partial {index}", stream.step(self._tokens(length, index), self._counts(length, index))
        yield from self._after(stream, "partial segments")

    def _feed(self) -> Items:
        stream, length = self._model.stream(), self._many(2 * self._memory_length + 3 * self._longest + 2)
        yield from self._tried("feed", stream.feed, self._tokens(length, 20))
        counts = self._counts(length, 21)
        yield from self._tried("feed with lengths", stream.feed, self._tokens(length, 21), counts)
        yield from self._after(stream, "fed")
        yield from self._tried("feed, last", stream.feed, self._tokens(length, 24), last=True)
        yield from self._tried("feed with lengths, last", stream.feed, self._tokens(length, 25), counts, True)
        yield from self._tried("score", stream.score, self._tokens(length + 1, 22))
        counts = np.where(counts > 0, counts + 1, 0)
        yield from self._tried("score with lengths", stream.score, self._tokens(length + 1, 26), counts)
        yield from self._after(stream, "scored")
        if self._b > 1 and not self._joint:
            one = self._model.stream(1)
            yield from self._tried("one sequence of several", one.feed, self._tokens(length, 23, 1))

    def _generate(self) -> Items:
        length = self._many(2 * self._longest + 1)
        ways: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0},
            "temperature 1": {"seed": 5},
            "temperature 0.8": {"temperature": 0.8, "seed": 6},
            "top-k": {"top_k": 5, "seed": 7},
            "top-k, warm": {"top_k": 9, "temperature": 1.3, "seed": 8},
            "top-p": {"top_p": 0.9, "seed": 9},
            "top-p, cool": {"top_p": 0.6, "temperature": 0.7, "seed": 10},
            "stop tokens": {"seed": 11, "stop_tokens": list(range(0, self._v, 7))},
            "lengths": {"seed": 12, "lengths": self._counts(length, 13, least=1)},
        }
        for index, (name, how) in enumerate(ways.items()):
            stream, prompt = self._model.stream(), self._tokens(length, 30 + index)
            yield from self._tried(name, self._generated, stream, prompt, 25, **how)
            yield f"{name}, draws", np.array(repr(stream.draws))
            yield from self._after(stream, name)

    def _rows(self) -> Items:
        """Reset, reorder, drop and double sequences between calls of `step` and `feed`."""
        stream, longest = self._model.stream(), self._longest
        stream.feed(self._tokens(self._many(2 * longest + self._memory_length), 40))
        yield from self._tried("one reset", stream.reset, [self._b - 1])
        counts = self._counts(longest, 41)
        yield "step after one reset", stream.step(self._tokens(longest, 41), counts)
        stream.select([index // 2 for index in range(self._b)][::-1])
        yield "step after select", stream.step(self._tokens(self._one(1), 42))
        if not self._joint:
            stream.select([self._b - 1])
            yield "feed of one left", stream.feed(self._tokens(self._many(longest + 1), 43, 1))
            stream.select([0] * self._b)
        yield "feed of one become many", stream.feed(self._tokens(self._many(longest + 1), 44))
        stream.reset()
        yield "step after reset", stream.step(self._tokens(longest, 45))
        yield from self._after(stream, "all reset")

    def _limited(self) -> Items:
        """Run streams that keep fewer memory rows than the bundle has."""
        for most in sorted({0, 1, self._memory_length // 2, self._memory_length, self._memory_length + 1}):
            try:
                stream = self._model.stream(memory_length=most)
            except self._refusal as error:
                yield f"{most}, refused", np.array(str(error))
                continue
            for index in range(4 + 2 * self._memory_length // self._longest):
                length = (self._longest, 1)[index % 2]
                yield (
                    f"{most}, {index}",
                    stream.step(self._tokens(length, 60 + index), self._counts(length, 60 + index)),
                )
            yield from self._after(stream, f"{most}")
            stream.select([self._b - 1] * self._b)
            yield f"{most}, after select", stream.step(self._tokens(1, 69))
            yield from self._after(stream, f"{most}, after select")
