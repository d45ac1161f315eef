"""Random operations on streams of a device and of the CPU, compared: what one says, the other has to.

A device is seldom waited for: results are left unread, states are compared now and then only, and tokens may lie on the
device. So whoever reads, writes or frees too early or too late is found out by the stand-in, or by the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from stand_ins.cuda import open_library
from stand_ins.driver import FakeDriver
from stand_ins.engine import StandInBackend, open_stand_in
from step_models import FEATURES, MODELS
from txl_engines import given_weights
from txl_runtime import Model, Stream
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.device import choosing, staging
from txl_runtime.types import Ids

B = 3
SHORT: dict[str, Any] = {
    "config": {"n_layer": 1, "d_model": 8, "d_embed": 8, "d_head": 4, "d_inner": 8, "memory_length": 1}
    | {"vocab_size": 1100, "cutoffs": (300, 900), "div_val": 2},
    "batch_size": B,
    "verify": False,
}
"""A memory that is shorter than a segment, and words enough for a program `next`."""
TRANSFORMERS = {"plain": "ring", "biased": "zeros", "short": None}
"""The bundles that are kept; fresh memory is not zeros where layers have biases."""
KINDS = [(name, update) for name in TRANSFORMERS for update in ("ring", "rolled")]
KINDS += [(name, "replace") for name in MODELS]


WAYS: tuple[dict[str, Any], ...] = (
    {"recordable": False},
    {"version": "rtx171"},
    {"version": "trt114a"},
    {"version": "rtx171", "given_memory": False},
    {},
    {"version": "rtx171"},
    {"version": "rtx171", "faults": ["not capturable"]},
    {"version": "rtx171", "shared": True},
    {"version": "rtx171", "given_memory": False, "shared": True},
)
"""Whose engines they are, by seeds in turns: the loop records them, or they themselves do, or nobody; and whether they
share weights."""


@dataclass
class Case:
    """A bundle that is open on the CPU, to be opened on devices.

    Attributes:
        within: by what results may differ, relative or, below 1, absolute: nothing where ONNX Runtime runs a step on
            either side; of a Transformer-XL the CPU computes the softmax in another way.
    """

    name: str
    update: str
    path: Path
    theirs: Model
    within: float

    def open(self, driver: FakeDriver, version: str = "", **options: Any) -> Model:
        """The bundle on a stand-in device; as engines of a library's version, if one is named."""

        def opened(name: str, bundle: Bundle, rule: str) -> StandInBackend:
            if version:
                return open_library(bundle, rule, version, driver, **options)
            return open_stand_in(bundle, rule, name, driver=driver, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(given_weights, "LEAST_BYTES", 64)
            patch.setattr(choosing, "open_device", opened)
            return Model(self.theirs.bundle, "rtx", update=self.update)


def open_case(name: str, update: str, make_bundle: Callable[..., Path], folder: Path) -> Case:
    """Make a bundle of a kind, and open it on the CPU."""
    if update == "replace":
        path = MODELS[name]().write(folder / f"{name}.txl")
    else:
        kept = TRANSFORMERS[name]
        path = frozen(kept) if kept else make_bundle(**SHORT)
    within = 0.0 if update == "replace" else 2e-6
    return Case(name, update, path, Model(open_bundle(path), "cpu", threads=1, update=update), within)


@dataclass
class Pair:
    """A stream of the device and the stream of the CPU that it is compared with; and what was kept of them."""

    ours: Stream
    theirs: Stream
    snapshots: list[tuple[Any, Any]] = field(default_factory=list)
    rows: list[tuple[Any, Any]] = field(default_factory=list)
    unread: Any = None

    @property
    def both(self) -> tuple[Stream, Stream]:
        return self.ours, self.theirs


class Play:
    """Random operations on some pairs of streams.

    Args:
        case: whose bundle they are of.
        ours: the bundle on a device.
        seed: of all draws.
        pairs: how many streams take turns.
    """

    def __init__(self, case: Case, ours: Model, seed: int, pairs: int = 2) -> None:
        self.case, self.model, self.draws = case, ours, np.random.default_rng(seed)
        self.said: list[str] = []
        b = ours.batch_size
        sizes = [b if index == 0 or case.name == "growing" else self.number(1, b) for index in range(pairs)]
        most = case.theirs.memory_length
        rows = [None if most is None or index % 2 == 0 else self.number(0, most) for index in range(pairs)]
        self.pairs = [Pair(ours.stream(*given), case.theirs.stream(*given)) for given in zip(sizes, rows, strict=True)]
        fluent = case.name not in ("recurrent", "growing")
        names = ["run", "fewer", "uncommitted", "unread", "together", "feed", "select", "snapshot", "restore", "reset"]
        names += ["run", "renew"]
        names += ["step", "step", "step", "feed_tokens", "score", "generate"] if fluent else ["run", "run"]
        names += [] if case.name == "growing" else ["take", "put"]
        names += [] if case.name == "growing" or case.update == "rolled" else ["part", "part"]
        self.names = names

    def number(self, first: int, last: int) -> int:
        """A draw from first … last."""
        return int(self.draws.integers(first, last + 1))

    def go(self, turns: int) -> None:
        """Do `turns` operations, and compare everything in the end."""
        for _ in range(turns):
            pair = self.pairs[self.number(0, len(self.pairs) - 1)]
            name = str(self.draws.choice(self.names))
            self.said.append(name)
            getattr(self, f"do_{name}")(pair)
            if self.draws.random() < 0.1:
                self.compare(pair)
        for pair in self.pairs:
            self.compare(pair)

    def compare(self, pair: Pair) -> None:
        """The whole state of both."""
        assert pair.ours.fill.tolist() == pair.theirs.fill.tolist()
        assert pair.ours.loop.heads.tolist() == pair.theirs.loop.heads.tolist()
        self.same(*(stream.state() for stream in pair.both))
        for row in range(self.model.batch_size):  # those too that no sequence is in
            self.same(*(stream.loop.take(row).tensors for stream in pair.both))

    def same(self, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Check that arrays are equal, or as near as the two ways of computing them."""
        assert list(found) == list(expected)
        for name, array in expected.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
            if array.dtype == np.float32 and self.case.within:
                scale = max(1.0, float(np.abs(array).max(initial=0)))
                np.testing.assert_allclose(found[name], array, rtol=0, atol=self.case.within * scale, err_msg=name)
            else:
                assert found[name].tobytes() == array.tobytes(), name

    # --- segments -------------------------------------------------------------------------------------------------

    def segment(self, b: int) -> tuple[dict[str, Any], Ids]:
        """Inputs of one segment, and how many positions of each sequence count."""
        lengths = self.model.segment_lengths
        exact = self.case.name in ("recurrent", "growing")
        length = int(self.draws.choice(lengths)) if exact else self.number(1, lengths[0])
        counts = np.full(b, length)
        if self.case.name == "recurrent":
            counts[self.draws.random(b) < 0.3] = 0
        elif not exact and self.draws.random() < 0.7:
            counts = self.draws.integers(0, length + 1, b)
        return self.inputs(b, length), counts.astype(np.int32)

    def inputs(self, b: int, length: int) -> dict[str, Any]:
        """Arrays by name."""
        if self.case.name == "recurrent":
            obs = self.draws.normal(size=(b, length, FEATURES)).astype(np.float32)
            return {"obs": obs, "starts": self.draws.random(b) < 0.2}
        return {"tokens": self.tokens(b, length)}

    def tokens(self, b: int, length: int) -> Ids:
        return self.draws.integers(0, self.model.vocab_size or 1, (b, length)).astype(np.int32)

    def do_run(self, pair: Pair) -> None:
        inputs, counts = self.segment(pair.ours.batch_size)
        self.same(*(stream.run(inputs, counts) for stream in pair.both))

    def do_fewer(self, pair: Pair) -> None:
        """A segment of the first sequences alone, as a loop takes it."""
        inputs, counts = self.segment(self.number(1, pair.ours.batch_size))
        self.same(*(stream.loop.run(inputs, counts).outputs() for stream in pair.both))

    def do_uncommitted(self, pair: Pair) -> None:
        inputs, counts = self.segment(pair.ours.batch_size)
        self.same(*(stream.run(inputs, counts, commit=False) for stream in pair.both))

    def do_part(self, pair: Pair) -> None:
        """A segment of which only the first positions are kept; it is looked at before, or not."""
        inputs, ran = self.segment(pair.ours.batch_size)
        most = np.minimum(ran, 1) if self.case.name == "recurrent" else ran
        counts = self.draws.integers(0, most + 1)
        if self.draws.random() < 0.5:
            self.same(*(stream.run(inputs, ran, commit=False) for stream in pair.both))
            for stream in pair.both:
                stream.commit(counts)
        else:
            for stream in pair.both:
                stream.loop.run(inputs, ran, commit=False)
                stream.loop.commit(counts.astype(np.int32))

    def do_unread(self, pair: Pair) -> None:
        """A segment whose result nobody looks at; the last of several at times."""
        for _ in range(self.number(1, 3)):
            found, expected = self.start(pair)
        if self.draws.random() < 0.3:
            self.same(found.outputs(), expected.outputs())

    def do_together(self, pair: Pair) -> None:
        """Segments of all streams, whose results are read when all are on their way."""
        started = [self.start(other) for other in self.pairs]
        for index in self.draws.permutation(len(started)):
            found, expected = started[index]
            self.same(found.outputs(), expected.outputs())

    def start(self, pair: Pair) -> tuple[Any, Any]:
        """One segment that is on its way."""
        inputs, counts = self.segment(pair.ours.batch_size)
        return pair.ours.loop.run(inputs, counts), pair.theirs.loop.run(inputs, counts)

    def do_step(self, pair: Pair) -> None:
        inputs, counts = self.segment(pair.ours.batch_size)
        ours = pair.ours.step(inputs["tokens"], counts)
        self.same({"step": ours}, {"step": pair.theirs.step(inputs["tokens"], counts)})

    def do_feed(self, pair: Pair) -> None:
        columns = self.number(1, 3) * max(self.model.segment_lengths)
        inputs, last = self.inputs(pair.ours.batch_size, columns), self.draws.random() < 0.5
        self.same(*(stream.feed(inputs, last=last) for stream in pair.both))

    def do_feed_tokens(self, pair: Pair) -> None:
        b, columns = pair.ours.batch_size, self.number(1, 9)
        tokens, last = self.tokens(b, columns), self.draws.random() < 0.3
        lengths = self.draws.integers(0, columns + 1, b) if self.draws.random() < 0.6 else None
        ours = pair.ours.feed(tokens, lengths, last)
        self.same({"feed": ours}, {"feed": pair.theirs.feed(tokens, lengths, last)})

    def do_score(self, pair: Pair) -> None:
        columns = self.number(2, 9)
        tokens = self.tokens(pair.ours.batch_size, columns)
        lengths = self.draws.integers(0, columns + 1, len(tokens)) if self.draws.random() < 0.6 else None
        ours = pair.ours.score(tokens, lengths)
        self.same({"nll": ours}, {"nll": pair.theirs.score(tokens, lengths)})

    def do_generate(self, pair: Pair) -> None:
        tokens = self.tokens(pair.ours.batch_size, self.number(1, 6))
        lengths = self.draws.integers(1, tokens.shape[1] + 1, len(tokens))
        options = {
            "temperature": 0.0 if self.case.within > 1e-4 else float(self.draws.choice([0.0, 0.8])),
            "seed": self.number(0, 99),
            "lengths": lengths,
            **[{}, {"top_k": 5}, {"top_p": 0.4}][self.number(0, 2)],
        }
        number = self.number(1, 5)
        drawn = [list(stream.generate(tokens, number, **options)) for stream in pair.both]
        assert np.array_equal(*drawn)

    def do_renew(self, pair: Pair) -> None:
        """Streams go with work on its way, and others come."""
        if self.draws.random() < 0.5:
            self.start(pair)
        else:
            self.do_reset(pair)
        size = pair.ours.batch_size
        pair.ours, pair.theirs = self.model.stream(size), self.case.theirs.stream(size)

    # --- states ---------------------------------------------------------------------------------------------------

    def do_reset(self, pair: Pair) -> None:
        rows = None if self.case.name == "growing" else self.draws.random(pair.ours.batch_size) < 0.4
        for stream in pair.both:
            stream.reset(rows)

    def do_select(self, pair: Pair) -> None:
        most = self.model.batch_size
        count = most if self.case.name == "growing" else self.number(1, most)
        rows = self.draws.integers(0, pair.ours.batch_size, count)
        for stream in pair.both:
            stream.select(rows)

    def do_snapshot(self, pair: Pair) -> None:
        pair.snapshots.append((pair.ours.snapshot(), pair.theirs.snapshot()))

    def do_restore(self, pair: Pair) -> None:
        kept = [states for states in pair.snapshots if states[0].batch_size == pair.ours.batch_size]
        if kept:
            states = kept[self.number(0, len(kept) - 1)][:: self.number(0, 1) * 2 - 1]
            for stream, state in zip(pair.both, states, strict=True):
                stream.restore(state)

    def do_take(self, pair: Pair) -> None:
        row = self.number(0, pair.ours.batch_size - 1)
        pair.rows.append((pair.ours.take(row), pair.theirs.take(row)))

    def do_put(self, pair: Pair) -> None:
        other = self.pairs[self.number(0, len(self.pairs) - 1)]
        if other.rows:
            row, states = self.number(0, pair.ours.batch_size - 1), other.rows[self.number(0, len(other.rows) - 1)]
            for stream, state in zip(pair.both, states, strict=True):
                stream.put(row, state)


def play(case: Case, seed: int, turns: int = 20) -> None:
    """One seed from the opening of the device to its end, when everything was given back."""
    driver = FakeDriver(seed)
    with pytest.MonkeyPatch.context() as patch:
        if seed % 4 == 3:  # hardly any result is small enough to arrive with its step, and those that are not are cut
            for name, size in (("LARGEST", 600), ("PIECE", 100), ("SMALLEST", 64)):
                patch.setattr(staging, name, size)
        game = Play(case, case.open(driver, **WAYS[seed % len(WAYS)]), seed)
        try:
            game.go(turns)
            said = {said for pair in game.pairs for said in pair.ours.loop.recorded.values()}
            assert said <= {"recorded", "not yet", "by the engine"}
        except Exception as error:
            raise AssertionError(f"seed {seed} after {', '.join(game.said)}: {error}") from error
        finally:
            del game
    driver.check(everything=True)
    FakeDriver.made.remove(driver)


def threads(case: Case, seed: int, number: int = 8, turns: int = 12) -> None:
    """Streams of one model, each in a thread of its own."""
    driver = FakeDriver(seed)
    model = case.open(driver, **WAYS[seed % len(WAYS)])
    games = [Play(case, model, 1000 * seed + index, pairs=1) for index in range(number)]
    with ThreadPoolExecutor(number) as pool:
        for running in [pool.submit(game.go, turns) for game in games]:
            running.result(timeout=120)
    del running, games, model, pool
    driver.check(everything=True)
    FakeDriver.made.remove(driver)
