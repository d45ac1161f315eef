"""The shapes that states take on the way from the start."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from stand_ins import small_steps
from torch import nn
from txl_export.families.own_module import plan as planning
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.own_code import OwnCodeError
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.sizes import fresh_states, initial_value
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_export.families.own_module.stages import reached
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent


def summary(spec, lengths, batch=2):
    return [
        (one.stage.number, one.length, one.after.number, one.after.shapes)
        for one in reached(Eager(spec), batch, lengths)
    ]


def test_a_state_that_keeps_its_shape_has_one_stage():
    shapes = {"h": (2, 3, 8), "c": (2, 3, 8)}
    assert summary(small_steps.policy(), (4, 1), 3) == [(0, 4, 0, shapes), (0, 1, 0, shapes)]


def test_a_growing_state_has_a_stage_for_every_number_of_rows_that_is_reached():
    found = summary(small_steps.window(), (4,))
    rows = [(stage, after, shapes["rows"][0]) for stage, _, after, shapes in found]
    assert rows == [(0, 1, 4), (1, 2, 6), (2, 2, 6)]


def test_segments_of_several_lengths_reach_more():
    found = summary(small_steps.window(), (4, 3))
    stages = {number: shapes["rows"][0] for _, _, number, shapes in found}
    assert sorted(stages.values()) == [3, 4, 6]
    assert len(found) == 2 * 4


def test_a_state_that_is_absent_at_first_exists_from_the_second_step_on():
    first, second = reached(Eager(small_steps.absent()), 2, (1,))
    assert (first.stage.shapes, first.after.shapes) == ({"h": None}, {"h": (2, 4)})
    assert second.stage == second.after == first.after


def test_more_graphs_than_anyone_wants_are_refused():
    with pytest.raises(UsageError, match=r"segments of 1 lead rows through more than 64 sizes, expected fewer"):
        reached(Eager(small_steps.window(100)), 1, (1,))


def test_one_graph_for_any_number_of_rows_may_take_more(monkeypatch):
    plan = make_plan(small_steps.window(100), 1, (1,), Silent())
    assert len(plan.transitions) == 101
    assert "more than 64 sizes" in plan.too_many
    assert make_plan(small_steps.window(), 1, (1,), Silent()).too_many == ""
    monkeypatch.setattr(planning, "MOST_TRANSITIONS", 100)
    with pytest.raises(UsageError, match="more than 100 sizes"):
        make_plan(small_steps.window(100), 1, (1,), Silent())


def test_states_that_were_looked_at_are_let_go():
    """A stage may hold many rows, and there may be thousands of stages."""
    alive = weakref.WeakSet()

    def noted(*given):
        outputs, after = Eager.__call__(*given)
        alive.update(after.values())
        assert len(alive) <= 4
        return outputs, after

    class Noted(Eager):
        __call__ = noted

    assert len(reached(Noted(small_steps.window(40)), 1, (1,))) == 41


def test_a_length_that_the_module_cannot_take_is_named_with_the_line():
    spec = replace(small_steps.ahead(), inputs=[InputSpec("frames", ("B", "L", 3))])
    with pytest.raises(OwnCodeError, match=r"with a segment of 1: .*small_steps\.py:\d+: new = self\.mix"):
        reached(Eager(spec), 1, (3, 1))


def carrying(state):
    return StepSpec(nn.Identity(), [InputSpec("x", ("B",))], [state], ["y"])


@pytest.mark.parametrize(
    ("dtype", "initial", "said"),
    [
        ("int32", 1.5, "1.5, expected what int32"),
        ("int64", 2**40, "holds, as a bundle has it"),
        ("bool", 2, "what bool"),
    ],
)
def test_a_start_that_a_bundle_cannot_hold_is_refused(dtype, initial, said):
    with pytest.raises(UsageError, match=said):
        fresh_states(carrying(StateSpec("n", ("B",), dtype=dtype, initial=initial)), 2)


def test_numbers_that_json_or_float32_lose_start_states_as_they_are():
    spec = carrying(StateSpec("least", ("B", 2), initial=float("-inf")))
    assert isinstance(initial_value(spec, spec.states[0]), torch.Tensor)
    assert fresh_states(spec, 3, torch.float32)["least"].tolist() == [[float("-inf")] * 2] * 3
    count = carrying(StateSpec("n", ("B",), dtype="int32", initial=16777217))
    assert fresh_states(count, 2, torch.float32)["n"].tolist() == [16777217] * 2
