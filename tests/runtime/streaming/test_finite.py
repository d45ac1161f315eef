"""`run(..., require_finite=True)`: NaN and infinity are refused by name, and the segment did not happen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import step_models
import txl_runtime
from frozen import frozen
from step_models import FEATURES, B, Graph, StepModel
from txl_runtime.bundle.tables import Input, Output
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.streaming import finite


def _sums(hide: bool) -> StepModel:
    """A state that is divided by an input; the output shows it, or not."""
    model = StepModel(
        inputs=(Input(name="by", dtype="float32", shape=("B", 2), role="feature"),),
        outputs=(Output(name="y", dtype="float32", shape=("B", 2)),),
        states=(step_models.state("s", (2, B), 1, initial=1.0),),
        streams="lockstep",
    )
    graph = Graph()
    turned = graph.add("Transpose", ["by"], perm=[1, 0])
    graph.add("Div", ["state.s.in", turned], "state.s.out")
    graph.add("Transpose", [turned if hide else "state.s.out"], "y", perm=[1, 0])
    model.add("step-1", 1, graph)
    return model


@pytest.fixture(params=[False, True], ids=["shown", "in a state alone"])
def case(request, tmp_path):
    """A stream after one segment, and whether its state is hidden."""
    stream = txl_runtime.load(_sums(request.param).write(tmp_path / "b.txl"), threads=1).stream()
    stream.run({"by": np.full((B, 2), 2, np.float32)})
    return stream, request.param


def test_what_is_finite_runs_as_without(case):
    stream, usual = case[0], np.full((B, 2), 2, np.float32)
    before = stream.snapshot()
    expected = stream.run({"by": usual})["y"]
    after = stream.state()["s"]
    stream.restore(before)
    np.testing.assert_array_equal(stream.run({"by": usual}, require_finite=True, commit=False)["y"], expected)
    np.testing.assert_array_equal(stream.run({"by": usual}, require_finite=True)["y"], expected)
    np.testing.assert_array_equal(stream.state()["s"], after)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_input_is_refused_before_anything_runs(case, value):
    stream, _ = case
    given, before = np.ones((B, 2), np.float32), stream.state()["s"]
    given[2, 1] = value
    with pytest.raises(UsageError, match=rf"input by of sequence 2 holds {value} at \[2, 1\], expected a finite"):
        stream.run({"by": given}, require_finite=True)
    np.testing.assert_array_equal(stream.state()["s"], before)
    stream.run({"by": given})  # as ever without it


@pytest.mark.parametrize("commit", [True, False])
def test_an_output_or_a_state_is_refused_and_the_state_is_what_it_was(case, commit):
    stream, hidden = case
    usual, held = np.full((B, 2), 2, np.float32), stream.state()
    held["s"][1, 2] = 0
    stream.restore(replace(stream.snapshot(), states=held))
    given = usual.copy()
    given[2, 1] = 0  # 0 / 0
    what, place = (r"state s", r"\[1, 2\]") if hidden else (r"output y", r"\[2, 1\]")
    with pytest.raises(BackendError, match=rf"{what} of sequence 2 holds nan at {place}, expected a finite number"):
        stream.run({"by": given}, require_finite=True, commit=commit)
    stream.commit()  # nothing is left of the segment
    np.testing.assert_array_equal(stream.state()["s"], held["s"])
    assert np.isfinite(stream.run({"by": usual}, require_finite=True)["y"]).all()
    np.testing.assert_array_equal(stream.state()["s"], held["s"] / 2)


def test_an_interrupt_leaves_nothing_to_commit(tmp_path, monkeypatch):
    stream = txl_runtime.load(_sums(True).write(tmp_path / "b.txl"), threads=1).stream()
    before = stream.state()["s"]
    monkeypatch.setattr(finite, "_refuse", interrupting(after=2))
    with pytest.raises(KeyboardInterrupt):
        stream.run({"by": np.full((B, 2), 2, np.float32)}, require_finite=True)
    stream.commit()
    np.testing.assert_array_equal(stream.state()["s"], before)


def interrupting(after: int):
    """Return a check that raises KeyboardInterrupt in its call number `after`."""
    calls = iter(range(after))

    def check(*_: object) -> None:
        if next(calls) == after - 1:
            raise KeyboardInterrupt

    return check


def test_an_idle_sequence_is_not_looked_at(tmp_path):
    stream = txl_runtime.load(step_models.recurrent().write(tmp_path / "b.txl"), threads=1).stream()
    state = stream.take(1)
    state.tensors["h"][:] = np.nan
    stream.put(1, state)
    inputs = {"obs": np.ones((B, 4, FEATURES), np.float32), "starts": np.zeros(B, np.bool_)}
    found = stream.run(inputs, [4, 0, 4], require_finite=True)
    assert np.isfinite(found["best"]).all()
    with pytest.raises(UsageError, match="require_finite is 'yes', expected True or False"):
        stream.run(inputs, require_finite="yes")


def test_memory_rows_are_changed_once_and_only_if_all_is_finite():
    model = txl_runtime.load(frozen("ring"), threads=1)
    plain, careful = model.stream(), model.stream()
    tokens = np.arange(4 * B, dtype=np.int32).reshape(B, 4)
    for _ in range(2):
        (expected,) = plain.run({"tokens": tokens}).values()
        (found,) = careful.run({"tokens": tokens}, require_finite=True).values()
        np.testing.assert_array_equal(found, expected)
    assert careful.fill.tolist() == plain.fill.tolist()
    state = careful.take(0)
    for rows in state.tensors.values():
        rows[:] = np.nan
    careful.put(0, state)
    before = careful.fill.tolist()
    with pytest.raises(BackendError, match=r"output \w+ of sequence 0 holds nan at \[0, 0, 0\]"):
        careful.run({"tokens": tokens}, require_finite=True)
    assert careful.fill.tolist() == before
