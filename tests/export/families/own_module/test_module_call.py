"""One step of the user's module in eager mode, whichever way it is called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from stand_ins import small_steps
from torch import nn
from txl_export.families.own_module.attributes import untouched
from txl_export.families.own_module.module_call import Eager, in_float64
from txl_export.families.own_module.own_code import OwnCodeError
from txl_export.families.own_module.sizes import fresh_states, random_inputs
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_export.families.own_module.spec_checks import check_spec
from txl_runtime.errors import UsageError


def run(spec, batch=2, length=3, segments=2, eager=None):
    eager = eager or Eager(spec)
    states, draws = fresh_states(spec, batch, eager.dtype), np.random.default_rng(0)
    for _ in range(segments):
        valid = torch.full((batch,), length, dtype=torch.int32)
        inputs = random_inputs(spec, batch, length if spec.has_length else 1, draws)
        outputs, states = eager(inputs, states, valid)
    return outputs, states


def linear(change=lambda *results: results, **options):
    class Sum(nn.Module):
        def forward(self, x, *held):
            return change(x + sum(held), *(one + x for one in held))

    return StepSpec(Sum(), [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"], **options)


@pytest.mark.parametrize("name", small_steps.EVERY)
def test_every_way_of_keeping_state_runs_and_gives_what_was_declared(name):
    spec = small_steps.EVERY[name]()
    outputs, states = run(spec)
    assert list(states) == [entry.name for entry in spec.states]
    assert all(torch.isfinite(tensor).all() for tensor in outputs.values())


def test_a_module_that_keeps_its_state_itself_is_what_it_was_afterwards():
    spec = small_steps.cell()
    before = spec.module.memory["first"].rows[0]
    outputs, states = run(spec)
    assert spec.module.memory["first"].rows[0] is before
    spec.module.memory["first"].rows[0] = torch.full((2, 5), 0.25)
    with torch.no_grad():
        draws = np.random.default_rng(0)
        for _ in range(2):
            expected = spec.module(random_inputs(spec, 2, 1, draws)["x"])
    torch.testing.assert_close(outputs["scores"], expected, rtol=0, atol=0)
    torch.testing.assert_close(states["h"], spec.module.memory["first"].rows[0], rtol=0, atol=0)


def test_buffers_that_are_copied_into_and_buffers_that_are_set_anew_are_states_alike():
    class Kept(nn.Module):
        def __init__(self, copies):
            super().__init__()
            self.copies = copies
            self.register_buffer("h", torch.ones(2, 4))

        def forward(self, x):
            if self.copies:
                self.h.copy_(self.h * 2 + x)
            else:
                self.h = self.h * 2 + x
            return self.h.sum(1)

    found = []
    for copies in (True, False):
        state = StateSpec("h", ("B", 4), attribute="h")
        spec = StepSpec(Kept(copies), [InputSpec("x", ("B", 4))], [state], ["y"])
        found.append(run(spec)[1]["h"])
        assert torch.equal(spec.module.h, torch.ones(2, 4))
    assert torch.equal(*found)
    assert bool(found[0].any())


def test_a_step_function_takes_and_returns_names():
    spec = small_steps.policy()

    def step(module, inputs, states):
        action, value, h, c = module(inputs["obs"], states["h"], states["c"])
        return {"value": value, "action": action}, {"c": c, "h": h}

    plain, named = run(spec), run(replace(spec, step=step))
    for one, other in zip(plain, named, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_int64_is_int32_outside_the_module():
    seen = []

    class Counter(nn.Module):
        def forward(self, tokens, count):
            seen.append((tokens.dtype, count.dtype))
            return tokens * 2, count + 1

    state = StateSpec("count", ("B",), dtype="int64", initial=3)
    spec = StepSpec(Counter(), [InputSpec("tokens", ("B", "L"), tokens=9)], [state], ["twice"])
    outputs, states = run(spec)
    assert set(seen) == {(torch.int64, torch.int64)}
    assert (outputs["twice"].dtype, states["count"].dtype) == (torch.int32, torch.int32)
    assert states["count"].tolist() == [5, 5]


def test_a_whole_number_that_int32_cannot_hold_is_refused():
    class Large(nn.Module):
        def forward(self, x):
            return (x * 0).long() + 2**40

    with pytest.raises(UsageError, match=f"y holds {2**40}, expected what fits int32"):
        run(StepSpec(Large(), [InputSpec("x", ("B", 4))], [], ["y"]))


def test_results_share_no_memory_with_what_was_given():
    spec = linear(lambda y, h: (y, h))
    spec = replace(spec, step=lambda module, inputs, states: ({"y": inputs["x"]}, {"h": states["h"]}))
    inputs, states = random_inputs(spec, 2, 1, np.random.default_rng(0)), fresh_states(spec, 2)
    outputs, after = Eager(spec)(inputs, states)
    outputs["y"].zero_()
    after["h"].fill_(1)
    assert bool(inputs["x"].any())
    assert not bool(states["h"].any())


def test_initial_values_are_numbers_tensors_and_parameters():
    spec = small_steps.ahead()
    states = fresh_states(spec, 3)
    assert torch.equal(states["bank"], spec.module.start.expand(3, 1, 4))
    spec = replace(
        spec, states=[StateSpec("m", (2, "B", 3), initial=torch.arange(3.0)), StateSpec("n", (2,), initial=1.5)]
    )
    states = fresh_states(spec, 4)
    assert torch.equal(states["m"], torch.arange(3.0).expand(2, 4, 3))
    assert states["n"].tolist() == [1.5, 1.5]


def keeping(held, shape, dtype="float32", **said):
    """A state of a module that keeps `held` in an attribute."""
    module = nn.Identity()
    module.kept = held
    inputs = [InputSpec("x", ("B", 3))]
    return StepSpec(module, inputs, [StateSpec("kept", shape, dtype, attribute="kept", **said)], ["y"])


KEPT = torch.tensor([[1.0, 2.0, 3.0]])


@pytest.mark.parametrize(
    ("held", "shape", "dtype", "starts"),
    [
        (KEPT, ("B", 3), "float32", KEPT[0]),
        (KEPT.double().repeat(8, 1), ("B", 3), "float32", KEPT[0]),
        (KEPT[0], (2, "B", 3), "float32", KEPT.expand(2, 3)),
        (KEPT.T.long(), (3, "B"), "int64", KEPT[0].int()),
        (torch.tensor(True), ("B",), "bool", torch.tensor(True)),
        (5, ("B", 1), "int32", torch.tensor([5], dtype=torch.int32)),
        (torch.zeros(5, 0), ("B", 3), "float32", torch.zeros(3)),
        (None, ("B", 3), "float32", torch.zeros(3)),
    ],
)
def test_a_state_starts_as_its_attribute_holds_it_unless_initial_says_otherwise(held, shape, dtype, starts):
    for spec, expected in (
        (keeping(held, shape, dtype), starts),
        (keeping(held, shape, dtype, initial=0.0), torch.zeros_like(starts)),
        (keeping(held, shape, dtype, initial=1), torch.ones_like(starts)),
    ):
        check_spec(spec, 4, ())
        fresh = fresh_states(spec, 4)["kept"]
        assert torch.equal(fresh, expected.unsqueeze(shape.index("B")).expand_as(fresh))


@pytest.mark.parametrize(
    ("held", "said", "message"),
    [
        (torch.eye(3), {}, r"its attribute kept, different values for 3 sequences, .*; give another initial="),
        (torch.ones(4), {}, r"starts as its attribute kept, a tensor of 4, expected one that broadcasts over 3"),
        (KEPT, {"grows": 1}, r"a tensor of 1 × 3, expected zeros, because it grows from no rows"),
        (KEPT + 0.5, {"dtype": "int32"}, r"a tensor of 1 × 3, expected what int32 holds, as a bundle has it; give"),
        (KEPT.long() << 40, {"dtype": "int64"}, r"expected what int32 holds"),
    ],
)
def test_an_attribute_that_no_sequence_can_start_as_is_refused(held, said, message):
    with pytest.raises(UsageError, match=message):
        fresh_states(keeping(held, ("B", 3), **said), 2)


@pytest.mark.parametrize("name", small_steps.EVERY)
def test_double_precision_runs_on_a_copy(name):
    spec = small_steps.EVERY[name]()
    length = 3 if spec.has_length else 1
    double = in_float64(spec, 2, length)
    assert double is not None
    assert {parameter.dtype for parameter in spec.module.parameters()} == {torch.float32}
    single, exact = run(spec, length=length), run(spec, length=length, eager=double)
    for one, other in zip(single, exact, strict=True):
        assert any(tensor.dtype == torch.float64 for tensor in other.values())
        for key in one:
            torch.testing.assert_close(one[key], other[key].to(one[key].dtype), rtol=1e-4, atol=1e-5)


def test_a_module_that_insists_on_float32_has_no_double():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, h):
            return self.linear(x.float()), h

    spec = StepSpec(Single(), [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"])
    assert in_float64(spec, 2, 1) is None


MISTAKES = [
    (linear(lambda y, h: y), "returned one tensor, expected 2 tensors: y, h"),
    (linear(lambda y, h: (y, h, h)), "returned a tuple of 3, expected 2 tensors"),
    (linear(lambda y, h: {"y": y}), "returned a dict, expected 2 tensors"),
    (linear(lambda y, h: (y, (h, h))), "state h for B = 2 and L = 1 is a tuple, expected a tensor"),
    (linear(lambda y, h: (None, h)), "is a NoneType, expected a tensor"),
    (
        linear(lambda y, h: (y, h[:, :2])),
        "state h for B = 2 and L = 1 comes back as float32 2 × 2, expected float32 2 × 4",
    ),
    (linear(lambda y, h: (y, h.double())), "comes back as float64 2 × 4, expected float32 2 × 4"),
    (
        linear(lambda y, h: (y.half(), h)),
        "comes back as float16 2 × 4, expected bool or float32 or int32 or int64 2 × 4",
    ),
    (linear(step=lambda module, inputs, states: None), "step returned a NoneType, expected two dictionaries"),
    (linear(step=lambda module, inputs, states: ({}, states)), "the outputs of step are none, expected y; return or"),
    (
        linear(step=lambda module, inputs, states: ({"y": states["h"]}, {"h": states["h"], "g": 1})),
        "the states of step are h, g, expected h",
    ),
    (
        replace(linear(), outputs=[OutputSpec("y", ("B", 5))]),
        "output y for B = 2 and L = 1 comes back as float32 2 × 4, expected float32 2 × 5",
    ),
]


@pytest.mark.parametrize(("spec", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_what_comes_back_is_what_was_declared(spec, message):
    with pytest.raises(UsageError, match=message) as caught:
        run(spec)
    assert "\n" not in str(caught.value)


def test_more_rows_than_declared_are_refused():
    spec = small_steps.window()
    spec.module.most = 9
    with pytest.raises(
        UsageError,
        match=r"state rows .* comes back as float32 9 × 2 × 4, expected float32 6 × 2 × 4 with at most 6 on axis 0",
    ):
        run(spec, segments=3)


def test_an_exception_in_the_module_names_the_segment_and_the_users_line():
    class Fixed(nn.Module):
        def forward(self, x):
            return x + torch.zeros(2, 5, 4)  # takes segments of 5

    spec = StepSpec(Fixed(), [InputSpec("x", ("B", "L", 4))], [], ["y"])
    assert run(spec, length=5)
    with pytest.raises(
        OwnCodeError, match=r"the module failed with a segment of 3: RuntimeError: .*takes seg"
    ) as caught:
        run(spec)
    assert "test_module_call.py" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.frames.count("File ") == 1


def test_a_module_that_takes_other_arguments_says_which():
    spec = replace(small_steps.policy(), states=[StateSpec("h", (2, "B", 8))])
    with pytest.raises(
        OwnCodeError, match=r"the module failed with a segment of 3: TypeError: .*'c'; a state is an argu"
    ):
        run(spec)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_part_that_torchscript_compiled_is_let_be_and_the_rest_is_put_back():
    module = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with untouched(module):
        module.cache = 1
    assert not hasattr(module, "cache")
    assert module(torch.zeros(2, 4)).shape == (2, 4)


def test_an_rms_norm_has_the_same_epsilon_in_float64() -> None:
    norm = nn.RMSNorm(4)
    spec = StepSpec(norm, [InputSpec("x", ("B", 4))], [], ["y"])
    x = torch.full((2, 4), 1e-3)
    double = in_float64(spec, 2, 1)
    assert double is not None
    torch.testing.assert_close(double({"x": x}, {})[0]["y"].float(), norm(x).detach(), rtol=1e-6, atol=0)
    assert norm.eps is None
