"""The user's module as the reference: in double precision, each sequence by itself, however it wants to be called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import small_steps
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from txl_export.families.own_module.plan import Plan, make_plan
from txl_export.families.own_module.reference import ModuleReference
from txl_export.families.own_module.sizes import random_inputs
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent

B = 3


def planned(spec: StepSpec, lengths: tuple[int, ...] = (4, 1)) -> Plan:
    return make_plan(spec, B, lengths, Silent())


def run(reference: ModuleReference, x: np.ndarray, segments: int = 3) -> tuple[Any, Any]:
    """Outputs and states of the last of some segments from the start."""
    name = reference._plan.spec.inputs[0].name
    states, outputs = reference.fresh(x.shape[0]), {}
    for _ in range(segments):
        outputs, states = reference.step({name: x}, states, None)
    return outputs, states


def test_it_computes_in_float64_and_each_sequence_as_in_a_batch():
    reference = ModuleReference(planned(small_steps.policy()))
    assert reference.in_double
    assert reference.described == "computed in float64"
    assert reference.small
    x = np.random.default_rng(0).normal(size=(B, 4, 6)).astype(np.float32)
    together, after = run(reference, x)
    assert together["action"].dtype == after["h"].dtype == np.float64
    for row in range(B):
        alone, own = run(reference, x[row : row + 1])
        np.testing.assert_allclose(alone["action"][0], together["action"][row], rtol=1e-12)
        np.testing.assert_allclose(own["h"][:, 0], after["h"][:, row], rtol=1e-12)


def test_logits_are_log_probabilities_as_in_the_bundle():
    reference = ModuleReference(planned(small_steps.cell(), ()))
    outputs, _ = run(reference, np.zeros((2, 4), np.float32))
    np.testing.assert_allclose(np.exp(outputs["scores"]).sum(-1), 1, rtol=1e-12)


class Single(nn.Module):
    """Computes a part in single precision, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.table = nn.Linear(4, 4), torch.eye(4)
        self.hidden = [torch.eye(4)]

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.within(x) + h @ self.hidden[0].float())
        return h * 2, h


def step_of(module: nn.Module) -> StepSpec:
    return StepSpec(module, [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"])


def test_a_module_that_does_not_run_in_float64_is_taken_in_float32_and_that_is_said():
    reference = ModuleReference(planned(step_of(Single()), ()))
    assert not reference.in_double
    assert reference.described.startswith("computed in float32 (it does not run in float64")
    outputs, _ = run(reference, np.ones((1, 4), np.float32))
    assert outputs["y"].dtype == np.float32


class WholeBatch(nn.Module):
    """Has the batch size written into it."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h.reshape(B, 4))
        return h * 2, h


def test_a_module_that_takes_its_own_batch_alone_is_given_copies_of_the_one_sequence():
    reference = ModuleReference(planned(step_of(WholeBatch()), ()))
    x = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
    outputs, states = run(reference, x, 1)
    np.testing.assert_allclose(outputs["y"], 2 * np.tanh(x), rtol=1e-6)
    assert outputs["y"].shape == states["h"].shape == (1, 4)


class AnotherAlone(nn.Module):
    """Computes something else where the batch is one."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h)
        return h * (2 if x.shape[0] == 1 else 3), h


def test_a_module_that_computes_something_else_alone_is_asked_in_its_own_batch():
    reference = ModuleReference(planned(step_of(AnotherAlone()), ()))
    x = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
    outputs, _ = run(reference, x, 1)
    np.testing.assert_allclose(outputs["y"], 3 * np.tanh(x), rtol=1e-6)


def test_what_capture_left_in_a_place_outside_the_module_is_refused_in_one_line():
    left: list[Tensor] = [torch.ones(())]

    class Elsewhere(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return x / left[0], torch.tanh(x + h)

    reference = ModuleReference(planned(step_of(Elsewhere()), ()))
    with FakeTensorMode(allow_non_fake_inputs=True):
        left[0] = torch.ones(())
    with pytest.raises(UsageError, match="depends on a tensor that was left by a capture"):
        run(reference, np.ones((1, 4), np.float32), 1)


@pytest.mark.parametrize("name", ["window", "absent"])
def test_sequences_in_lockstep_run_together_from_states_that_are_not_there(name):
    plan = planned(getattr(small_steps, name)(), (4, 1) if name == "window" else ())
    assert plan.streams == "lockstep"
    reference = ModuleReference(plan)
    fresh = reference.fresh(B)
    assert [value is None or value.size == 0 for value in fresh.values()] == [True]
    (entry,) = plan.spec.inputs
    x = np.zeros([{"B": B, "L": 4}.get(str(size), size) for size in entry.shape], np.float32)
    x = x.astype(np.int32) if entry.tokens is not None else x
    _, after = reference.step({entry.name: x}, fresh, None)
    assert all(value.size for value in after.values())


def test_the_step_that_is_compared_is_the_users_and_not_a_copy_of_the_bundles():
    spec = small_steps.policy()
    other = replace(spec, module=small_steps.Policy())
    x = np.ones((1, 4, 6), np.float32)
    one, two = (run(ModuleReference(planned(step)), x)[0]["action"] for step in (spec, other))
    assert np.abs(one - two).max() > 1e-3


class Table(nn.Module):
    """Looks a row up, and perhaps computes an exponential of its number."""

    def __init__(self, rows: int, steep: float) -> None:
        super().__init__()
        self.table, self.steep = nn.Embedding(rows, 4), steep

    def forward(self, kind: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.table(kind) + h)
        return h * torch.exp(self.steep * kind[:, None]), h


@pytest.mark.parametrize(("rows", "steep", "below"), [(64, 0.0, 64), (63, 0.0, 8), (7, 0.0, 2), (64, 10.0, 8)])
def test_whole_numbers_are_drawn_from_the_widest_range_that_the_module_takes(rows: int, steep: float, below: int):
    spec = StepSpec(Table(rows, steep), [InputSpec("kind", ("B",), "int32")], [StateSpec("h", ("B", 4))], ["y"])
    assert ModuleReference(planned(spec, ())).below == {"kind": below}
    given = replace(spec, samples={"kind": np.zeros(9, np.int32)})
    assert ModuleReference(planned(given, ())).below == {}


class Masked(nn.Module):
    """A mean of what a mask leaves, from where a flag says."""

    def forward(self, x: Tensor, begin: Tensor, mask: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.where(begin[:, None], 0, h) / 2 + (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return h * 2, h


def test_a_flag_has_a_value_for_long_with_which_there_are_numbers_and_more_depends_on_the_state():
    flags = [InputSpec("begin", ("B",), "bool"), InputSpec("mask", ("B", "L"), "bool")]
    spec = StepSpec(Masked(), [InputSpec("x", ("B", "L", 4)), *flags], [StateSpec("h", ("B", 4))], ["y"])
    assert ModuleReference(planned(spec, (16,))).flags == {"begin": False, "mask": True}


def test_a_sample_of_one_number_is_given_as_one():
    rate = InputSpec("rate", ())
    spec = StepSpec(nn.Identity(), [rate], [], ["y"], samples={"rate": np.float32(3)})
    drawn = random_inputs(spec, 1, 1, np.random.default_rng(0), spec.samples)
    assert drawn["rate"].shape == ()
