"""A graph of a step has to load, run and compute what the module computes before it counts."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
import txl_export
from torch import nn
from torch.nn import functional as F
from txl_export.families.own_module.capture import capture
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.own_code import OwnCodeError
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.rehearsal import RehearsalError, examples_for, rehearse
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.listener import Silent

ROW = ("B", 16)


class Cell(nn.Module):
    """A recurrence; what is done before its result leaves is a case's own."""

    def __init__(self, change=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mask", torch.arange(16) % 4 == 2)
        self.register_buffer("frequencies", torch.rand(4))
        self.change = change
        self.tables = {}

    def forward(self, x, h):
        h = torch.tanh(self.linear(x) + h)
        if self.change is not None:
            h = self.change(self, x, h)
        return h * 1, h


def reads_constants(cell, x, h):
    lengths = torch.tensor([16] * x.shape[0])
    assert x.size(1) == lengths.max().item()
    assert (lengths.numpy() == 16).all()
    for pair in torch.tensor([[1, 3], [3, 1]]).tolist():
        h = h * (pair[0] / pair[1])
    later = cell.tables.setdefault("later", torch.ones(16, 16).triu(1).bool())
    h = h.masked_fill(later[3], 0.1) if later.any() else h
    return h.masked_fill(cell.mask, 0.5) if float(cell.frequencies.sum()) > 0 else h


def decides_by_a_value(cell, x, h):
    hops = 0
    while float(h.abs().mean()) > 0.3 and hops < 20:
        h, hops = h * 0.7, hops + 1
    return h


def multiplies_whole_numbers(cell, x, h):
    positions = torch.arange(4)
    return h + torch.einsum("i,j->ij", positions, cell.frequencies).flatten().sin()


def keeps_a_table(cell, x, h):
    if "table" not in cell.tables:
        cell.tables["table"] = torch.arange(16).float() * 0.1
    return h + cell.tables["table"]


def masks_frequencies(cell, x, h):
    louder = torch.fft.irfft(torch.fft.rfft(h) * torch.sigmoid(x[:, :9]), 16)
    return louder + torch.fft.ifft2(torch.fft.fft(x.view(-1, 4, 4), dim=1)).real.flatten(1)


def looks_at_frames(cell, x, h):
    wave, window = torch.cat([h, x], 1), torch.hann_window(16)
    rows = [torch.stft(wave, 16, 4, window=window, center=on, return_complex=True).abs().mean(2) for on in (0, 1)]
    return h + torch.cat(rows, 1)[:, :16]


def makes_a_wave_of_frames(cell, x, h):
    frames = torch.stft(torch.cat([h, x], 1), 16, 4, return_complex=True, window=torch.hann_window(16))
    return torch.istft(frames * 0.5, 16, 4, window=torch.hann_window(16))[:, :16] + x


def plan_of(module, spec=None):
    step = spec or StepSpec(module, [InputSpec("x", ROW)], [StateSpec("h", ROW)], ["y"])
    return make_plan(step, 2, (), Silent())


def captured(module):
    plan = plan_of(module)
    network = StepNetwork(plan, plan.transitions[0])
    return capture(network, "step-1", examples_for(plan, plan.transitions[0], network))


@pytest.mark.parametrize(
    ("change", "route"),
    [
        (None, "export"),
        (keeps_a_table, "export"),
        (multiplies_whole_numbers, "decomposed"),
        (reads_constants, "export"),
        (masks_frequencies, "export"),
        (looks_at_frames, "export"),
        pytest.param(makes_a_wave_of_frames, "decomposed", marks=pytest.mark.slow),
    ],
)
def test_the_first_route_whose_graph_runs_is_taken(change, route, capfd):
    found = captured(Cell(change))
    assert found.route == route
    assert capfd.readouterr() == ("", ""), "torch says nothing to the user"
    graph = found.model.graph
    assert [value.name for value in graph.inputs] == ["x", "valid", "state.h.in"]
    assert [value.name for value in graph.outputs] == ["y", "state.h.out"]
    assert all(output.shape is not None and output.dtype is not None for node in graph for output in node.outputs)


def test_constants_that_are_nearly_0_or_1_stay_in_the_graph_and_exact_ones_leave_it():
    def divides(cell, x, h):
        return (x / (x.square().sum(1, keepdim=True) + 1e-8) + 0) * 1.000001

    graph = captured(Cell(divides)).model.graph
    kinds = [node.op_type for node in graph]
    assert (kinds.count("Add"), kinds.count("Mul")) == (1, 1)


def test_a_cache_on_the_module_holds_no_traced_tensor_afterwards():
    module = Cell(keeps_a_table)
    captured(module)
    assert type(module.tables.get("table", torch.zeros(1))) is torch.Tensor
    result, _ = module(torch.ones(2, 16), torch.zeros(2, 16))
    assert type(result.detach()) is torch.Tensor


def writes_over_a_constant(cell, x, h):
    table = torch.zeros(4, 16)
    table[1].copy_(h[0])
    return h * 0 if table.sum() > 50 else h


def reads_through_numpy(cell, x, h):
    return h * float(x.mean().numpy())


def by_a_list(cell, x, h):
    return h * 0 if max(map(max, (x > 50).tolist())) else h


def by_an_array(cell, x, h):
    return h * 0 if x.numpy().max() > 50 else h


def by_asarray(cell, x, h):
    return h * 0 if np.asarray(x).max() > 50 else h


def by_a_number_of_places(cell, x, h):
    return h * 0 if (x > 50).nonzero().shape[0] else h


def by_a_masked_length(cell, x, h):
    return h * 0 if len(x[x > 50]) else h


def by_different_values(cell, x, h):
    return h * 0 if len(torch.unique(x > 50)) > 1 else h


READS = [
    *(decides_by_a_value, writes_over_a_constant, reads_through_numpy, by_a_list, by_an_array, by_asarray),
    *(by_a_number_of_places, by_a_masked_length, by_different_values),
]


@pytest.mark.parametrize("change", READS)
def test_python_that_decides_by_a_value_in_any_way_is_refused_with_its_line_and_what_to_write(change):
    with pytest.raises(
        UsageError, match=r"depends on values \(test_capture\.py:\d+: .*\); write torch\.where"
    ) as refused:
        captured(Cell(change))
    assert "\n" not in str(refused.value)
    (line,) = re.findall(r"test_capture\.py:(\d+)", str(refused.value))
    first = change.__code__.co_firstlineno
    assert first < int(line) <= first + 4


def test_a_step_that_does_something_else_while_it_is_captured_fails_the_proof(tmp_path):
    def unless_captured(cell, x, h):
        return h if torch.compiler.is_compiling() or x.max() < 50 else h * 0

    spec = StepSpec(Cell(unless_captured), [InputSpec("x", ROW)], [StateSpec("h", ROW)], ["y"])
    with pytest.raises(CheckError, match=r"large and zero inputs .*with x 100 times as large as usual, output y is"):
        txl_export.export(spec, tmp_path / "a.txl", batch_size=2)


def leaves_when_captured(cell, x, h):
    if torch.compiler.is_compiling():
        sys.exit(0)
    return h


def test_a_module_that_ends_the_program_is_an_error_of_its_own_with_its_place():
    with pytest.raises(OwnCodeError, match=r"the module failed.*: SystemExit: 0 \(test_capture.py:"):
        captured(Cell(leaves_when_captured))


def uniform(x, h):
    return torch.rand_like(h)


def normal(x, h):
    return torch.randn(h.shape)


def dropped(x, h):
    return F.dropout(h, 0.5, True)


def tossed(x, h):
    return torch.bernoulli(h.sigmoid())


@pytest.mark.parametrize("noise", [uniform, normal, dropped, tossed])
def test_random_numbers_in_a_graph_are_refused_where_they_count_only_sometimes(noise):
    with pytest.raises(UsageError, match="it draws random numbers"):
        captured(Cell(lambda cell, x, h: torch.where(x > 1e6, noise(x, h), h)))


def test_what_no_python_decides_by_is_no_read():
    def harmless(cell, x, h):
        print(x)
        rows = F.one_hot((x > 0).sum(1), 17)[:, :16]
        return torch.where(x > 0, h, h * 0.5).masked_fill(x > 50, 0)[:, torch.arange(16)] + rows + torch.zeros_like(x)

    assert captured(Cell(harmless)).route == "export"


def test_a_value_that_torch_export_keeps_in_the_graph_may_be_read():
    def slices(cell, x, h):
        start = (h.sum() > 0).long().item()
        torch._check(start >= 0)
        torch._check(start <= 1)
        return torch.cat([h, h], 1).index_select(1, torch.arange(16) + start) + x

    assert captured(Cell(slices)).route == "export"


def test_a_value_taken_for_a_constant_shows_in_the_trial():
    plan = plan_of(Cell())
    network = StepNetwork(plan, plan.transitions[0])
    examples = examples_for(plan, plan.transitions[0], network)
    model = capture(network, "step-1", examples).model
    state = next(value for value in model.graph.inputs if value.name == "state.h.in")
    baked = network(*examples[0].given)
    assert torch.equal(baked[0], examples[0].wanted[0])
    rehearse(model, network, examples)
    tanh = next(node for node in model.graph if node.op_type == "Tanh")
    add = tanh.inputs[0].producer()
    add.replace_input_with([*add.inputs].index(state), next(v for v in model.graph.inputs if v.name == "x"))
    with pytest.raises(RehearsalError, match=r"y is .* away from the module's"):
        rehearse(model, network, examples)


def test_examples_start_from_states_that_steps_have_led_to():
    plan = plan_of(Cell())
    examples = examples_for(plan, plan.transitions[0], StepNetwork(plan, plan.transitions[0]))
    states = [example.given[2] for example in examples]
    assert all(state.abs().max() > 0 for state in states)
    assert not torch.equal(states[0], states[1])
    idle = [example for example in examples if int(example.given[1][-1]) == 0]
    assert idle
    assert all(torch.equal(example.wanted[1][-1], example.given[2][-1]) for example in idle)


def test_outputs_that_are_inputs_and_truth_values_become_nodes_of_their_own():
    def step(module, inputs, states):
        seen = states["seen"] | (inputs["x"][:, 0] > 0)
        return {"y": inputs["x"], "z": inputs["x"]}, {"h": states["h"], "seen": seen}

    states = [StateSpec("h", ROW, initial=torch.ones(16)), StateSpec("seen", ("B",), "bool", initial=False)]
    spec = StepSpec(nn.Identity(), [InputSpec("x", ROW)], states, ["y", "z"], step=step)
    plan = plan_of(spec.module, spec)
    network = StepNetwork(plan, plan.transitions[0])
    graph = capture(network, "step-1", examples_for(plan, plan.transitions[0], network)).model.graph
    assert len({value.name for value in graph.outputs}) == 4
    assert all(value.producer() is not None for value in graph.outputs)
    assert all(value.dtype != 9 for node in graph if node.op_type == "Where" for value in node.outputs)


def test_state_in_attributes_of_every_kind_is_captured():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("copied", torch.zeros(2, 16))
            self.count = torch.zeros(2, dtype=torch.long)
            self.listed = [torch.zeros(2, 16)]

        def forward(self, x):
            self.copied.copy_(torch.tanh(self.linear(x) + self.copied))
            self.count = self.count + 1
            self.listed[0] = self.listed[0] * 0.9 + self.copied
            return self.copied + self.count[:, None] + self.listed[0]

    module = Keeps()
    states = [
        StateSpec("copied", ROW, attribute="copied"),
        StateSpec("count", ("B",), "int64", attribute="count"),
        StateSpec("listed", ROW, attribute="listed.0"),
    ]
    plan = plan_of(module, StepSpec(module, [InputSpec("x", ROW)], states, ["y"]))
    network = StepNetwork(plan, plan.transitions[0])
    found = capture(network, "step-1", examples_for(plan, plan.transitions[0], network))
    assert [value.name for value in found.model.graph.inputs][2:] == [
        "state.copied.in",
        "state.count.in",
        "state.listed.in",
    ]
    assert type(module.copied) is torch.Tensor
    assert not module.copied.any()
