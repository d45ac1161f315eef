"""`commit` of a part of a segment: the state is the one after running that part alone, or the part is refused.

Two streams are compared. One runs a segment with `commit=False` and commits a part; the other runs the part alone.
Where both ran the same program for as many sequences, every bit has to be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_models
from frozen import frozen
from step_models import Graph, StepModel, counting, recurrent
from txl_runtime import BackendError, Model, Stream, UsageError, load
from txl_runtime.bundle.tables import Input, Output

ROUNDING = 2e-6
ROWS = 6


def growing() -> StepModel:
    """Rows that become more up to 6, by segments of 4, 2 and 1: in lockstep."""
    model = StepModel(
        inputs=(Input(name="x", dtype="float32", shape=("B", "L", 4), role="feature"),),
        outputs=(Output(name="mean", dtype="float32", shape=("B", 1, 4)),),
        states=(step_models.state("rows", (step_models.B, ROWS, 4), 0, row_axis=1, rows=(0, ROWS)),),
        streams="lockstep",
    )
    for length in (4, 2, 1):
        for rows in range(ROWS + 1):
            graph, after = Graph(), min(rows + length, ROWS)
            every = graph.add("Concat", ["state.rows.in", "x"], axis=1) if rows else "x"
            ends = [graph.constant([place], np.int64) for place in (rows + length - after, rows + length, 1)]
            graph.add("Slice", [every, *ends], "state.rows.out")
            graph.add("ReduceMean", [every, graph.constant([1], np.int64)], "mean", keepdims=1)
            model.add(f"step-{length}.{rows}", length, graph, {"rows": (rows, after)})
    return model


SHALLOW: dict[str, Any] = {
    "config": {
        "n_layer": 2,
        "d_model": 8,
        "d_embed": 8,
        "d_head": 4,
        "d_inner": 8,
        "memory_length": 2,
        "vocab_size": 41,
    },
    "segment_length": (7, 3, 1),
    "batch_size": 3,
    "verify": False,
}
"""A memory that is shorter than a segment."""


@dataclass
class Case:
    """A model on the CPU, and what may be drawn for it."""

    model: Model
    alone: Callable[[Stream, dict[str, Any], np.ndarray], Any]

    def inputs(self, draws: np.random.Generator, b: int, length: int) -> dict[str, np.ndarray]:
        found = {}
        for entry in self.model.manifest.given:
            shape, dtype = entry.sizes(b, length), np.dtype(entry.dtype)
            found[entry.name] = (
                draws.integers(0, entry.vocab or 2, shape).astype(dtype)
                if dtype.kind != "f"
                else draws.normal(size=shape).astype(dtype)
            )
        return found

    def counts(self, draws: np.random.Generator, b: int) -> tuple[int, np.ndarray, np.ndarray]:
        """T, how many positions run, and how many are committed."""
        manifest = self.model.manifest
        known = manifest.segment_lengths
        if manifest.lengths == "valid":
            length = int(draws.integers(1, known[0] + 1))
            ran = draws.integers(0, length + 1, b) * (draws.random(b) < 0.8)
            return length, ran.astype(np.int32), draws.integers(0, ran + 1).astype(np.int32)
        length, part = sorted(draws.choice([*known, known[0]], 2), reverse=True)
        if not manifest.can.run_apart:
            return int(length), np.full(b, length, np.int32), np.full(b, part * (draws.random() < 0.9), np.int32)
        ran = length * (draws.random(b) < 0.8)
        return int(length), ran.astype(np.int32), (np.minimum(ran, part) * (draws.random(b) < 0.8)).astype(np.int32)


def whole(stream: Stream, inputs: dict[str, Any], counts: np.ndarray) -> Any:
    """A ring's part: the same program with fewer positions that count."""
    return stream.run(inputs, counts)


def cut(stream: Stream, inputs: dict[str, Any], counts: np.ndarray) -> Any:
    """Run a part again: a segment of `counts` positions."""
    return stream.run(stream.loop.parts.inputs(inputs, counts), counts)


RINGS = {"ring": "ring", "zeros": "zeros", "clusters": "clusters", "seven rows": "0.8/tokens", "one": "0.8/half"}
STEPS = {"counting": counting, "recurrent": recurrent, "growing": growing}
KEPT = {"look-ahead": "lookahead", "lockstep": "lockstep", "time first": "0.8/adapted", "sixteen": "policy-16"}
EVERY = [*RINGS, *STEPS, *KEPT, pytest.param("shallow", marks=pytest.mark.slow(keep=1))]


@pytest.fixture(scope="module")
def find(tmp_path_factory, make_bundle) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def opened(name: str) -> Case:
        if name not in made:
            path: Path
            if name in STEPS:
                path = STEPS[name]().write(tmp_path_factory.mktemp("steps") / "b.txl")
            else:
                path = make_bundle(**SHALLOW) if name == "shallow" else frozen({**RINGS, **KEPT}[name])
            made[name] = Case(load(path, "cpu", threads=1), whole if name in (*RINGS, "shallow") else cut)
        return made[name]

    return opened


def bits(stream: Stream) -> dict[str, Any]:
    """All that a stream carries: also of sequences that it does not have, as far as they are seen."""
    state = stream.snapshot()
    tensors = {**state.memory, **(state.states or {}), "fill": state.fill, "heads": stream.loop.heads}
    return {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in tensors.items()}


def assert_near(found: Any, expected: Any) -> None:
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        scale = max(1.0, float(np.abs(array.astype(np.float64)).max(initial=0)))
        np.testing.assert_allclose(found[name], array, rtol=0, atol=ROUNDING * scale, err_msg=name)


def last_of(counts: np.ndarray) -> int:
    return int(np.flatnonzero(counts).max(initial=-1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", EVERY)
def test_the_state_is_that_of_the_part_alone(find, name, seed):
    case, draws = find(name), np.random.default_rng(seed)
    model, parts, wrapped, changed = case.model, 0, 0, 0
    fewer = model.batch_size if not model.manifest.can.run_fewer or seed != 1 else max(1, model.batch_size - 1)
    one, other = model.stream(fewer), model.stream(fewer)
    for _ in range(80 if case.alone is whole else 40):
        length, ran, counts = case.counts(draws, fewer)
        inputs, heads, before = case.inputs(draws, fewer, length), one.loop.heads, one.snapshot()
        outputs = one.run(inputs, ran, commit=False)
        assert bits(one) == bits(other), "nothing is committed yet"
        one.commit(counts)
        one.commit()  # it is done
        one.commit(ran)
        if counts.any():
            alone = case.alone(other, inputs, counts)
            for row, count in enumerate(counts):
                for entry in model.manifest.outputs if entry_has_rows(model) else ():
                    place = entry.axes.at(row, slice(count))
                    assert_near({"": outputs[entry.name][place]}, {"": alone[entry.name][place]})
        if case.alone is cut or last_of(ran) == last_of(counts):
            assert bits(one) == bits(other)
        else:  # other sequences were computed with them: the last bit may differ
            assert one.fill.tolist() == other.fill.tolist()
            assert one.loop.heads.tolist() == other.loop.heads.tolist()
            assert_near(one.state(), other.state())
            one.restore(other.snapshot())
        for row in np.flatnonzero(counts == 0) if model.manifest.can.run_apart else ():
            held = model.stream(fewer)
            held.restore(before)
            taken, kept = one.take(row), held.take(row)
            assert (taken.fill, taken.head) == (kept.fill, kept.head)
            assert all(taken.tensors[name].tobytes() == kept.tensors[name].tobytes() for name in kept.tensors)
        parts += bool(((counts > 0) & (counts < ran)).any())
        wrapped += bool((one.loop.heads < heads).any())
        changed += len({*counts.tolist()}) > 1
        probe = case.inputs(draws, fewer, model.segment_lengths[-1])
        found, expected = (stream.run(probe, commit=False) for stream in (one, other))
        assert all(found[entry].tobytes() == expected[entry].tobytes() for entry in expected)
    assert parts > 3
    assert changed > 5 or fewer == 1 or not model.manifest.can.run_apart
    assert wrapped > 2 or case.alone is cut, "a ring went round"


def entry_has_rows(model: Model) -> bool:
    """Return whether all outputs have positions and sequences."""
    return all(entry.axes.batch is not None and entry.axes.positions for entry in model.manifest.outputs)


@pytest.mark.parametrize("name", ["int8", "half", "0.8/int4"])
def test_a_ring_of_low_precision_has_the_same_rows(name):
    """Scales of activations are those of a row: what was not accepted has no part in them."""
    model = load(frozen(name), "cpu", threads=1)
    draws, one, other, b = np.random.default_rng(0), model.stream(), model.stream(), model.batch_size
    for _ in range(12):
        inputs, counts = (
            {"tokens": draws.integers(0, model.vocab_size, (b, 4)).astype(np.int32)},
            draws.integers(1, 5, b),
        )
        one.run(inputs, commit=False)
        one.commit(counts)
        other.run(inputs, counts)
        assert bits(one) == bits(other)


def test_a_draft_that_is_accepted_in_part_goes_on_as_greedy_text_does(find):
    """The use that `commit` is made for: guesses run as one segment, and those stay that the model draws, too."""
    for name in ("ring", "counting"):
        model = find(name).model
        plain, b = model.stream(1), 1
        prompt = np.array([[3, 1, 2]], np.int32)
        expected = [int(token[0]) for token in plain.generate(prompt, 24, temperature=0)]
        stream, draws, found, longest = model.stream(b), np.random.default_rng(1), list[int](), model.segment_lengths[0]
        assert not stream.loop.parts.refusal
        drawn = int(stream.feed(prompt, last=True)[0].argmax())
        accepted = []
        while len(found) < 24:
            guesses = [*expected[len(found) + 1 :], *[0] * 4][: longest - 1]
            if draws.random() < 0.6:
                guesses[int(draws.integers(0, longest - 1))] ^= 1
            draft = np.array([[drawn, *guesses]], np.int32)
            (logprobs,) = stream.run({"tokens": draft}, commit=False).values()
            best = logprobs[0].argmax(axis=-1).tolist()
            count = 1
            while count < longest and guesses[count - 1] == best[count - 1]:
                count += 1
            stream.commit([count])
            found += draft[0, :count].tolist()
            accepted.append(count)
            drawn = best[count - 1]
        assert found[:24] == expected
        assert len({*accepted}) > 1


def test_inputs_may_change_between_the_run_and_the_commit(find):
    case, draws = find("counting"), np.random.default_rng(5)
    one, other = case.model.stream(), case.model.stream()
    inputs = case.inputs(draws, 3, 4)
    kept = {name: array.copy() for name, array in inputs.items()}
    one.run(inputs, commit=False)
    inputs["tokens"][...] = 0
    one.commit([3, 0, 2])
    cut(other, kept, np.array([3, 0, 2], np.int32))
    assert bits(one) == bits(other)


def test_a_part_is_given_its_own_positions_and_zeros_behind_each_count(find):
    ids, counts = np.arange(1, 13, dtype=np.int32).reshape(3, 4) % 9, np.array([3, 0, 1], np.int32)
    found = find("counting").model.open_loop().parts.inputs({"tokens": ids, "targets": ids}, counts)
    assert {name: array.tolist() for name, array in found.items()} == {"tokens": [[1, 2, 3], [0, 0, 0], [0, 0, 0]]}
    parts, frames = find("look-ahead").model.open_loop().parts, np.ones((2, 6, 5), np.float32)
    part = parts.inputs({"frames": frames}, np.array([1, 0], np.int32))["frames"]
    assert part.shape == (2, 3, 5), "with the two positions of look-ahead"
    assert (part.sum(axis=(1, 2)) == [15, 0]).all()
    assert frames.all(), "the arrays that ran stay"


def test_commit_keeps_a_whole_segment_of_every_model(find):
    for name in (*RINGS, *STEPS, *KEPT):
        case, draws = find(name), np.random.default_rng(2)
        one, other, third = (case.model.stream() for _ in range(3))
        for lengths in (None, np.full(case.model.batch_size, case.model.segment_lengths[0])):
            inputs = case.inputs(draws, case.model.batch_size, case.model.segment_lengths[0])
            for stream in (one, third):
                stream.run(inputs, commit=False)
            other.run(inputs)
            one.commit(lengths)
            assert bits(one) == bits(other)
        third.commit(np.zeros(case.model.batch_size, np.int32))
        third.commit()
        assert bits(third) == bits(case.model.stream()), "counts of 0 drop the segment"


CHANGES: dict[str, Callable[[Stream], Any]] = {
    "reset": lambda stream: stream.reset(),
    "one reset": lambda stream: stream.reset([2]),
    "moved": lambda stream: stream.select([1, 0, 2]),
    "put": lambda stream: stream.put(1, stream.take(0)),
    "restored": lambda stream: stream.restore(stream.snapshot()),
    "run": lambda stream: stream.step([[1], [1], [1]]),
    "idle": lambda stream: stream.run({"tokens": np.ones((3, 1), np.int32)}, [0, 0, 0], commit=False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["ring", "counting"])
def test_nothing_is_committed_where_the_state_has_changed_since(find, name, change):
    case = find(name)
    stream = case.model.stream()
    stream.feed([[1, 2], [3, 4], [5, 6]])
    stream.run({"tokens": np.full((3, 4), 2, np.int32)}, commit=False)
    CHANGES[change](stream)
    before = bits(stream)
    stream.commit([1, 2, 0])
    stream.commit()
    assert bits(stream) == before


def test_nothing_is_committed_before_anything_ran(find):
    for name in ("ring", "counting", "growing"):
        stream = find(name).model.stream()
        before = bits(stream)
        stream.commit()
        stream.commit(np.ones(stream.batch_size, np.int32))
        assert bits(stream) == before


def opened(name: str, update: str | None = None) -> Model:
    return load(frozen(name), "cpu", threads=1, update=update)


REFUSED: dict[str, tuple[Callable[[Any], Model], Any, str]] = {
    "rolled": (
        lambda find: opened("ring", "rolled"),
        [4, 2, 0],
        r'the memory is rolled, .* expected a ring; load with update="ring"$',
    ),
    "rolled, a length of a program": (lambda find: opened("ring", "rolled"), [4, 0, 4], "the memory is rolled"),
    "rolled alone": (
        lambda find: opened("hidden"),
        [4, 2],
        "the memory is rolled, .* expected a ring; run the part alone, the bundle has no ring$",
    ),
    "whole segments": (
        lambda find: opened("growing"),
        [2, 2],
        "the model has no state inside a segment, expected 0 or all that ran of each; keep it whole$",
    ),
    "another length": (
        lambda find: find("recurrent").model,
        [3, 3, 3],
        r"it runs again as one segment, expected 0 or one of \[1, 4\] in all sequences; keep so many$",
    ),
    "two lengths": (lambda find: find("recurrent").model, [4, 1, 0], r"expected 0 or one of \[1, 4\] in all"),
    "lockstep": (
        lambda find: find("growing").model,
        [4, 2, 4],
        "sequences run in lockstep, expected the same number of each; take the smallest$",
    ),
    "lockstep, one idle": (lambda find: find("growing").model, [4, 4, 0], "expected the same number of each"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_part_that_the_model_does_not_allow_is_refused_and_the_segment_can_still_be_kept(find, kind):
    opened_model, lengths, said = REFUSED[kind]
    model = opened_model(find)
    case, b = Case(model, whole), model.batch_size
    one, other, draws = model.stream(), model.stream(), np.random.default_rng(0)
    inputs = case.inputs(draws, b, 4)
    one.run(inputs, commit=False)
    before = bits(one)
    with pytest.raises(UsageError, match=said) as caught:
        one.commit(lengths)
    assert str(caught.value).startswith(f"{lengths} positions of {[4] * b} that ran are to be committed, but ")
    assert bits(one) == before
    one.commit()
    other.run(inputs)
    assert bits(one) == bits(other)
    unsure = kind in (
        "lockstep",
        "lockstep, one idle",
    )  # refused for these lengths, and for lengths of its programs too
    assert one.loop.parts.refusal or unsure


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (
            [4, 3, 0],
            r"\[4, 3, 0\] positions of \[4, 2, 0\] that ran .* expected at most those that ran; give other numbers$",
        ),
        ([1, 1, 1], r"of \[4, 2, 0\] that ran .* expected at most those that ran"),
        ([5, 2, 0], r"lengths are \[5, 2, 0\], expected 3 whole numbers of 0 … 4"),
        ([-1, 2, 0], r"lengths are \[-1, 2, 0\], expected 3 whole numbers of 0 … 4"),
        ([4, 2], r"lengths are \[4, 2\], expected 3 whole numbers of 0 … 4"),
        ([1.5, 1, 0], "lengths are float64, expected whole numbers"),
    ],
)
@pytest.mark.parametrize("name", ["ring", "counting"])
def test_more_than_ran_is_refused(find, name, lengths, said):
    one, other = find(name).model.stream(), find(name).model.stream()
    inputs = {"tokens": np.arange(12, dtype=np.int32).reshape(3, 4) % 9}
    one.run(inputs, [4, 2, 0], commit=False)
    with pytest.raises(UsageError, match=said):
        one.commit(lengths)
    one.commit([3, 2, 0])
    other.run(inputs, [3, 2, 0])
    assert bits(one) == bits(other)


def test_counts_of_a_loop_are_of_the_sequences_that_ran(find):
    loop = find("ring").model.open_loop()
    loop.run({"tokens": np.ones((2, 4), np.int32)}, np.array([4, 4], np.int32), commit=False)
    for counts in ([4, 4, 0], [4], [5, 0], [-1, 0]):
        with pytest.raises(UsageError, match=r"of \[4, 4\] that ran .* expected at most those that ran"):
            loop.commit(np.array(counts, np.int32))
    loop.commit(np.array([1, 4], np.int32))
    assert loop.fill.tolist() == [1, 4, 0]


@pytest.mark.parametrize("name", ["counting", "recurrent", "growing"])
def test_a_part_that_fails_leaves_the_state_before_the_segment(find, name, monkeypatch):
    case, draws = find(name), np.random.default_rng(3)
    stream = case.model.stream()
    loop: Any = stream.loop
    for _ in range(2):
        stream.run(case.inputs(draws, 3, 4))
    before = bits(stream)
    for _ in range(2):  # the part's program has run, and fails the second time
        stream.run(case.inputs(draws, 3, 4), commit=False)
        stream.commit([1, 1, 1])
        after, routes = bits(stream), dict(loop._routes)
        assert after != before
        before = after

    def failing(route: Any) -> Any:
        def call() -> None:
            route.call()
            raise BackendError("the engine stopped")

        return route._replace(call=call)

    stream.run(case.inputs(draws, 3, 4), commit=False)
    before = bits(stream)
    if name == "growing":
        before_shape = stream.state()["rows"].shape
        assert before_shape[1] == ROWS, "the next step reads what the last one read"
    monkeypatch.setattr(loop, "_routes", {key: failing(route) for key, route in routes.items()})
    with pytest.raises(BackendError, match="the engine stopped"):
        stream.commit([1, 1, 1])
    assert bits(stream) == before
    stream.commit()
    assert bits(stream) == before, "nothing is left to commit"


def test_a_model_says_beforehand_whether_any_part_can_be_committed(find):
    parts = {name: find(name).model.stream().loop.parts for name in (*RINGS, *STEPS)}
    free = {name: not part.refusal for name, part in parts.items()}
    assert free == {**dict.fromkeys(RINGS, True), "counting": True, "recurrent": False, "growing": False}
    assert [parts[name].again for name in ("ring", "counting")] == [False, True]
