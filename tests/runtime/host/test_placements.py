"""States of several placements in one loop: a ring and a rolled memory beside a state that is replaced.

The program is a few lines of NumPy, so that what each placement does is seen beside a plain simulation: lists of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from opcodes import interrupted_at
from txl_runtime.bundle.tables import Counter, Input, Output, Program, StateTensor, TensorSpec
from txl_runtime.errors import UsageError
from txl_runtime.host.loop import HostLoop
from txl_runtime.sessions.state import SessionState, largest_state
from txl_runtime.streaming.carried import CarriedState
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.streaming.states import parted

B, L, M = 4, 3, 5
SLOTS, ROOM = M + L, M + 2 * L
MIXTURES = {
    "ring": ("ring",),
    "rolled": ("rolled",),
    "ring and replaced": ("ring", "sum"),
    "rolled and replaced": ("rolled", "sum"),
}
STATES = {
    "ring": StateTensor(
        name="rows",
        input="rows.in",
        output="rows.out",
        shape=(B, 1, ROOM, 2),
        row_axis=2,
        update="ring",
        slots=SLOTS,
        initial=0.5,
    ),
    "rolled": StateTensor(
        name="rows", input="rows.in", output="rows.out", shape=(B, M, 2), row_axis=1, update="rolled"
    ),
    "sum": StateTensor(
        name="sum", input="sum.in", output="sum.out", shape=(2, B), batch_axis=1, update="replace", initial=7.0
    ),
}


class Simulated:
    """One sequence, as lists."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        self.sum = 7.0

    def feed(self, values: np.ndarray) -> None:
        self.rows = [*self.rows, *([v, -v] for v in values.tolist())][-M:]
        self.sum += float(values.sum())


class Engine:
    """Runs the program in NumPy; notes how many sequences it was given."""

    description, least_rows = "NumPy", 1

    def __init__(self) -> None:
        self.rows: list[int] = []

    def bind(self, program: Program, inputs: dict[str, Any], outputs: dict[str, Any]) -> Callable[[], None]:
        def call() -> None:
            values, valid = inputs["x"], inputs["valid"]
            self.rows.append(len(values))
            outputs["y"][...] = 0
            for row, count in enumerate(valid.tolist()):
                new = np.stack([values[row], -values[row]], axis=1)
                if program.update == "ring":
                    head = inputs["head"][row]
                    assert inputs["rows.in"].ctypes.data == outputs["rows.out"].ctypes.data
                    outputs["rows.out"][row, 0, head : head + L] = new  # padding too: nobody looks there
                else:
                    outputs["rows.out"][row] = np.concatenate([inputs["rows.in"][row], new[:count]])[count:]
                if "sum.in" in inputs:
                    outputs["sum.out"][:, row] = inputs["sum.in"][:, row] + values[row, :count].sum()
                    outputs["y"][row] = outputs["sum.out"][0, row]

        return call

    def kept(self, program: Program) -> tuple[str, ...]:
        return ()


def opened(mixture: str, open_batch: bool, streams: str = "independent") -> tuple[HostLoop, Engine]:
    states = tuple(STATES[name] for name in MIXTURES[mixture])
    rule = states[0].update
    table = [Input(name="x", dtype="float32", shape=("B", "L"), role="feature")]
    table += [Input(name=name, dtype="int32", shape=("B",), role=name) for name in ("valid", "fill")]
    table += [Input(name="head", dtype="int32", shape=("B",), role="head")] if rule == "ring" else []
    outputs = (Output(name="y", dtype="float32", shape=("B",)),)

    def specs(entries: Any, side: str) -> tuple[TensorSpec, ...]:
        own = (TensorSpec(name=e.name, dtype=e.dtype, shape=e.sizes(B, L)) for e in entries)
        return (*own, *(TensorSpec(name=getattr(s, side), dtype=s.dtype, shape=s.shape) for s in states))

    program = Program(
        name="step-3",
        kind="step",
        segment_length=L,
        update=rule,
        file="f",
        open_batch=open_batch,
        inputs=specs(table, "input"),
        outputs=specs(outputs, "output"),
    )
    manifest: Any = SimpleNamespace(
        batch_size=B,
        memory_length=M,
        fresh_fill=0,
        counters={"fill": Counter(start=0, most=M)},
        inputs=tuple(table),
        outputs=outputs,
        interface=(*table, *outputs),
        given=tuple(table[:1]),
        states_of=lambda r: tuple(s for s in states if s.update in (r, "replace")),
        lengths="valid",
        commits="rows",
        segment_lengths=(L,),
        updates=("ring", "rolled"),
        streams=streams,
        logprobs=None,
        model_id="0" * 64,
        programs=(program,),
        vocab_size=0,
        can=SimpleNamespace(count_rows=True, run_apart=streams == "independent", run_fewer=True),
    )
    engine: Any = Engine()
    initial = {state.name: np.asarray(state.initial or 0, np.float32) for state in states}
    return HostLoop(manifest, engine, rule, [program], initial), engine


def assert_same(loop: HostLoop, expected: list[Simulated]) -> None:
    for row, sequence in enumerate(expected):
        found = loop.take(row)
        assert found.fill == len(sequence.rows)
        rows = found.tensors["rows"].reshape(found.fill, 2)
        np.testing.assert_allclose(rows, np.array(sequence.rows, np.float32).reshape(-1, 2), rtol=1e-6)
        if "sum" in found.tensors:
            np.testing.assert_allclose(found.tensors["sum"], [sequence.sum] * 2, rtol=1e-5)


@pytest.mark.parametrize("open_batch", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("seed", range(3))
def test_every_mixture_is_what_lists_of_rows_are(mixture, open_batch, seed):
    loop, engine = opened(mixture, open_batch)
    other, _ = opened(mixture, not open_batch)
    expected, draws = [Simulated() for _ in range(B)], np.random.default_rng(seed)
    for _ in range(60):
        counts = (draws.integers(0, L + 1, B) * (draws.random(B) < 0.7)).astype(np.int32)
        values = draws.normal(size=(B, L)).astype(np.float32)
        commit = draws.random() < 0.8
        result = loop.run({"x": values}, counts, commit=commit)
        later = not commit and draws.random() < 0.5
        if later:
            loop.commit()
            loop.commit()  # a second time it does nothing
        if commit or later:
            for row, count in enumerate(counts.tolist()):
                expected[row].feed(values[row, :count])
            if "sum" in STATES and len(MIXTURES[mixture]) > 1 and counts.any():
                live = np.flatnonzero(counts)
                np.testing.assert_allclose(result.outputs()["y"][live], [expected[r].sum for r in live], rtol=1e-5)
        if open_batch and counts.any():
            assert engine.rows[-1] == np.flatnonzero(counts)[-1] + 1
        change = draws.random()
        if change < 0.1:
            rows = np.flatnonzero(draws.random(B) < 0.5)
            loop.clear(rows)
            for row in rows:
                expected[row] = Simulated()
        elif change < 0.2:
            order = draws.integers(0, B, int(draws.integers(1, B + 1)))
            loop.reorder(order)
            kept = [(list(expected[row].rows), expected[row].sum) for row in order]
            expected = [Simulated() for _ in range(B)]
            for sequence, (rows, total) in zip(expected, kept, strict=False):
                sequence.rows, sequence.sum = rows, total
        elif change < 0.3:
            row, to = draws.integers(0, B, 2)
            other.clear(np.array([to]))
            other.put(int(to), loop.take(int(row)))
            loop.clear(np.array([to]))
            loop.put(int(to), other.take(int(to)))
            expected[to].rows, expected[to].sum = list(expected[row].rows), expected[row].sum
        assert_same(loop, expected)


@pytest.mark.parametrize("open_batch", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize("mixture", ["ring", "ring and replaced"])
@pytest.mark.parametrize(("rows", "length"), [(M, L), (1, 4), (2, 7), (7, 2), (4, 1), (3, 3)])
def test_a_part_of_a_segment_is_what_lists_of_rows_are(mixture, open_batch, rows, length, monkeypatch):
    """Every number of rows, over many laps of rings of several sizes; a mixture runs once more, a ring does not."""
    for name, value in {"M": rows, "L": length, "SLOTS": rows + length, "ROOM": rows + 2 * length}.items():
        monkeypatch.setitem(globals(), name, value)
    room = replace_shape("ring", (B, 1, ROOM, 2), SLOTS)
    monkeypatch.setitem(STATES, "ring", room)
    loop, engine = opened(mixture, open_batch)
    expected, draws = [Simulated() for _ in range(B)], np.random.default_rng(rows)
    for _ in range(60):
        ran = (draws.integers(0, L + 1, B) * (draws.random(B) < 0.8)).astype(np.int32)
        counts, values = draws.integers(0, ran + 1).astype(np.int32), draws.integers(1, 9, (B, L)).astype(np.float32)
        values *= np.arange(L) < ran[:, None]  # whole numbers, whose sums are exact
        loop.run({"x": values}, ran, commit=False)
        assert_same(loop, expected)
        before = len(engine.rows)
        loop.commit(counts)
        again = len(MIXTURES[mixture]) > 1 and counts.any() and bool((counts != ran).any())
        assert len(engine.rows) - before == again
        for row, count in enumerate(counts.tolist()):
            expected[row].feed(values[row, :count])
        loop.commit()
        loop.commit(ran)
        assert_same(loop, expected)


def replace_shape(name: str, shape: tuple[int, ...], slots: int) -> StateTensor:
    return msgspec.structs.replace(STATES[name], shape=shape, slots=slots)


@pytest.mark.parametrize("mixture", ["rolled", "rolled and replaced"])
def test_a_part_of_what_is_rolled_is_refused(mixture):
    loop, _ = opened(mixture, True)
    loop.run({"x": np.ones((B, L), np.float32)}, np.array([L, 1, 0, 0], np.int32), commit=False)
    with pytest.raises(UsageError, match=r"\[2, 1, 0, 0\] positions of \[3, 1, 0, 0\] .* rolled, .* expected a ring"):
        loop.commit(np.array([2, 1, 0, 0], np.int32))
    assert_same(loop, [Simulated() for _ in range(B)])
    loop.commit(np.array([L, 1, 0, 0], np.int32))
    assert loop.fill.tolist() == [L, 1, 0, 0]


def test_sequences_that_a_stream_does_not_have_advance_with_the_others_in_lockstep():
    loop, _ = opened("ring", False, "lockstep")
    loop.run({"x": np.ones((2, L), np.float32)}, np.array([3, 3], np.int32), commit=False)
    with pytest.raises(UsageError, match=r"\[2, 1\] positions of \[3, 3\] .* lockstep, expected the same number"):
        loop.commit(np.array([2, 1], np.int32))
    loop.commit(np.array([2, 2], np.int32))
    assert loop.fill.tolist() == [2] * B


def test_a_part_of_a_mixture_that_fails_leaves_the_state_before_the_segment(monkeypatch):
    loop, engine = opened("ring and replaced", True)
    ones, expected = {"x": np.ones((B, L), np.float32)}, [Simulated() for _ in range(B)]
    for _ in range(4):
        loop.run(ones, np.full(B, L, np.int32))
        for sequence in expected:
            sequence.feed(np.ones(L))
    loop.run(ones, np.full(B, L, np.int32), commit=False)
    monkeypatch.setattr(engine, "rows", None)
    with pytest.raises(AttributeError):
        loop.commit(np.array([1, 2, 0, 3], np.int32))
    assert_same(loop, expected)
    loop.commit()
    assert_same(loop, expected)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_state_that_was_written_is_seen_before_it_is_committed(mixture):
    loop, _ = opened(mixture, True)
    loop.run({"x": np.ones((B, L), np.float32)}, np.array([L, 1, 0, 0], np.int32), commit=False)
    whole = [state.name for state in (STATES[name] for name in MIXTURES[mixture]) if state.update == "replace"]
    written = {state.name: array for state, array in loop.written()}
    assert list(written) == whole, "memory rows are not shown"
    assert all(array[:, :2].tolist() == [[7 + L, 8]] * 2 for array in written.values())
    assert_same(loop, [Simulated() for _ in range(B)])
    loop.run({"x": np.ones((B, L), np.float32)}, np.zeros(B, np.int32), commit=False)
    assert list(loop.written()) == [], "of a segment in which nothing counts, nothing was written"
    loop.commit()
    assert_same(loop, [Simulated() for _ in range(B)])


@pytest.mark.parametrize(("streams", "valid"), [("independent", [2, 1, 0, 0]), ("lockstep", [2, 1, 2, 2])])
def test_sequences_that_a_stream_does_not_have_are_idle_but_run_with_the_others_in_lockstep(streams, valid):
    loop, _ = opened("rolled and replaced", False, streams)
    loop.run({"x": np.ones((B, L), np.float32)}, np.full(B, L, np.int32))
    loop.run({"x": np.ones((2, L), np.float32)}, np.array([2, 1], np.int32))
    assert loop.counters.valid.tolist() == valid


CHANGES: dict[str, Callable[[HostLoop], None]] = {
    "cleared": lambda loop: loop.clear(np.array([1])),
    "moved": lambda loop: loop.reorder(np.array([1, 0, 2, 3])),
    "put in": lambda loop: loop.put(1, loop.take(1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_segment_from_another_state_is_not_committed(mixture, change):
    loop, _ = opened(mixture, True)
    ones = {"x": np.ones((B, L), np.float32)}
    loop.run(ones, np.array([L, 1, 0, 0], np.int32))
    loop.run(ones, np.array([1, L, 0, 0], np.int32), commit=False)
    CHANGES[change](loop)
    before = [loop.take(row) for row in range(B)]
    assert list(loop.written()) == []
    loop.commit()
    for row, held in enumerate(before):
        found = loop.take(row)
        assert (found.fill, found.head, bits(found.tensors)) == (held.fill, held.head, bits(held.tensors))


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_commit_that_is_interrupted_and_tried_again_happens_once_at_most(mixture):
    loop, _ = opened(mixture, True)
    once, number, interrupted = [], 0, True
    while interrupted:
        number += 1
        loop.clear(np.arange(B))
        loop.run({"x": np.ones((B, L), np.float32)}, np.array([1, 1, 0, 0], np.int32), commit=False)
        interrupted = interrupted_at(loop.commit, number)
        loop.commit()
        once.append(loop.take(0).fill)
    assert {*once} <= {0, 1}
    assert number > 20


@pytest.mark.parametrize("mixture", ["ring", "ring and replaced"])
def test_a_commit_of_a_part_that_is_interrupted_happens_whole_or_not(mixture):
    """Afterwards the segment may still be there, and can be committed: as a whole, or not at all."""
    loop, _ = opened(mixture, True)
    part, seen, number, interrupted = np.array([2, 0, 1, 0], np.int32), set(), 0, True
    start, ran = np.array([L, L - 1, 1, 0], np.int32), np.array([L, 2, 1, 0], np.int32)
    values = np.random.default_rng(0).normal(size=(B, L)).astype(np.float32) * (np.arange(L) < ran[:, None])
    while interrupted:
        number += 1 if mixture == "ring" else 7
        loop.clear(np.arange(B))
        for _ in range(2):
            loop.run({"x": np.ones((B, L), np.float32)}, start)
        loop.run({"x": values}, ran, commit=False)
        interrupted = interrupted_at(lambda: loop.commit(part), number)
        expected, done = [Simulated() for _ in range(B)], loop.take(0).fill == min(M, 2 * L + 2) and moved(loop, values)
        for row, sequence in enumerate(expected):
            for _ in range(2):
                sequence.feed(np.ones(start[row]))
            sequence.feed(values[row, : part[row] if done else 0])
        assert_same(loop, expected)
        loop.commit()
        later = not done and loop.take(2).fill > 2
        for row, sequence in enumerate(expected):
            sequence.feed(values[row, : ran[row] if later else 0])
        assert_same(loop, expected)  # as it was, or with all that ran
        seen.add((done, later))
    assert {(True, False), (False, False), (False, True)} == seen
    assert number > 60


def moved(loop: HostLoop, values: np.ndarray) -> bool:
    """Return whether the newest row of sequence 0 is the part's last."""
    rows = loop.take(0).tensors["rows"].reshape(-1, 2)
    return bool(rows[-1, 0] == values[0, 1])


def carried(mixture: str) -> CarriedState:
    """Return the carried state of a mixture: sequences that have two, five and no rows."""
    loop, _ = opened(mixture, True)
    for counts in ([2, L, 0, 1], [0, L, 0, 0]):
        values = np.random.default_rng(sum(counts)).normal(size=(B, L)).astype(np.float32)
        loop.run({"x": values}, np.array(counts, np.int32))
    return CarriedState(loop._manifest, loop, MIXTURES[mixture][0], B)


def bits(tensors: Any) -> dict[str, Any]:
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in tensors.items()}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_snapshot_of_a_mixture_has_rows_and_whole_tensors_and_is_restored_from_a_file(mixture, tmp_path):
    stream, fresh = carried(mixture), CarriedState(*_of(opened(mixture, True)[0], mixture))
    taken, mixed = stream.snapshot(), len(MIXTURES[mixture]) > 1
    assert list(taken.memory) == ["rows"]
    assert taken.memory["rows"].shape[:2] == (B, M)
    assert (None if taken.states is None else {name: array.shape for name, array in taken.states.items()}) == (
        {"sum": (2, B)} if mixed else None
    )
    taken.save(tmp_path / "a.state")
    again = StreamState.load(tmp_path / "a.state")
    assert bits(again.memory) == bits(taken.memory)
    assert bits(again.states or {}) == bits(taken.states or {})
    parts = list(parted(again, stream._states))
    assert [len(part.tensors["rows"]) for part in parts] == [part.fill for part in parts] == [2, M, 0, 1]
    before = bits(fresh.state())
    fresh.restore(again)
    assert fresh.fill.tolist() == [2, M, 0, 1]
    assert bits(fresh.state()) == bits(stream.state()) != before
    assert set(fresh.state()) == {"rows", *(["sum"] if mixed else [])}
    wrong = replace(taken, states=None if mixed else {"sum": np.zeros((2, B), np.float32)})
    form = r"the state holds .*, this model carries .*; restore a state of the same form"
    with pytest.raises(UsageError, match=form):
        fresh.restore(wrong)
    if mixed:
        for change in ({"sum": np.zeros((2, B + 1), np.float32)}, {}, {**taken.states, "rows": taken.memory["rows"]}):
            with pytest.raises(
                UsageError, match=r"the state's sum is .*, expected float32 \[2, 4\]|the state has rows"
            ):
                fresh.restore(replace(taken, states=change))
    assert bits(fresh.state()) == bits(stream.state())


@pytest.mark.parametrize("mixture", MIXTURES)
def test_one_sequence_of_a_mixture_goes_through_a_file_of_a_session(mixture):
    stream, other = carried(mixture), CarriedState(*_of(opened(mixture, True)[0], mixture))
    manifest, table = stream._manifest, stream._states
    for row in range(B):
        taken = stream.take(row)
        assert sum(tensor.nbytes for tensor in taken.tensors.values()) <= largest_state(manifest, table)
        session = SessionState.from_bytes(SessionState.of(taken, manifest, table, None, 3).to_bytes())
        other.put(row, session.row(manifest, table))
    assert bits(other.state()) == bits(stream.state())
    assert other.fill.tolist() == stream.fill.tolist()


def _of(loop: HostLoop, mixture: str) -> tuple[Any, HostLoop, str, int]:
    return loop._manifest, loop, MIXTURES[mixture][0], B
