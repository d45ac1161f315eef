"""A specification that cannot be meant is refused in one line: when it is made, or before its module runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_ins import small_steps
from torch import nn
from txl_export.families.own_module.family import with_data
from txl_export.families.own_module.loading import load_spec
from txl_export.families.own_module.own_code import OwnCodeError
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_export.options import ExportOptions
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.listener import Silent

X, H = InputSpec("x", ("B", 4)), StateSpec("h", ("B", 4))


class Never(nn.Module):
    """Has a parameter `weight`, and must not be run."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x, h):
        raise AssertionError


def refusal(make):
    with pytest.raises(UsageError) as caught:
        make()
    assert not isinstance(caught.value, OwnCodeError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


ENTRIES = [
    (lambda: InputSpec("my input", ()), "InputSpec('my input'): name is 'my input', expected letters, digits, _ and ."),
    (lambda: InputSpec("x", 3), "InputSpec('x'): shape is 3, expected a tuple of whole numbers from 1 (int), 'B' and"),
    (lambda: InputSpec("x", ("B", "T")), "shape is ('B', 'T'), expected"),
    (lambda: InputSpec("x", ("B", "B")), "expected 'B' and 'L' once at most"),
    (lambda: InputSpec("x", ("B", 4), dtype="float64"), "dtype is 'float64', expected float32, int32, int64 or bool"),
    (lambda: InputSpec("x", ("B",), tokens=0), "tokens is 0, expected V, the number of token ids"),
    (lambda: InputSpec("x", ("B",), "bool", tokens=9), "dtype is 'bool', expected int32 or int64 for token ids"),
    (lambda: InputSpec("x", ("B", 4), lookahead=2), "lookahead is 2, expected 0, or 'L' in its shape"),
    (lambda: StateSpec("h", ("B", "L")), "StateSpec('h'): shape is ('B', 'L'), expected"),
    (lambda: StateSpec("h", ("B", 4), grows=0), "grows is 0, expected an axis of its shape that is not 'B'"),
    (lambda: StateSpec("h", ("B", 4), attribute=torch.zeros(2)), "expected a path such as layers.0.memory"),
    (lambda: OutputSpec("y", role=""), "OutputSpec('y'): role is '', expected a word such as logits or value"),
]
STEPS = [
    ({"segment_lengths": 64}, "StepSpec: segment_lengths is 64, expected a list of whole numbers from 1"),
    ({"inputs": []}, "inputs is [], expected a list of one or more InputSpec"),
    ({"inputs": [("x", ("B", 4))]}, "inputs is [('x', ('B', 4))], expected"),
    ({"outputs": "y"}, "outputs is 'y', expected a list of one or more OutputSpec or str"),
    ({"outputs": ["x"]}, "the list of inputs and outputs is ['x', 'x'], expected each once"),
    ({"outputs": ["state.y"]}, "['x', 'state.y'], expected each once, and none of valid (lengths=True gives it), fill"),
    ({"states": [H, StateSpec("h.a", ("B",))]}, "the list of states is ['h', 'h.a'], expected"),
    (
        {"outputs": [OutputSpec("y", role="logits"), OutputSpec("z", role="logprobs")]},
        "['y', 'z'], expected one output",
    ),
    ({"outputs": [OutputSpec("y", ("B", "L"))]}, "expected one with 'L' in its shape, because an output has it"),
    ({"step": 3}, "step is 3, expected a function of (module, inputs, states)"),
    ({"vocabulary": 3}, "vocabulary is 3, expected the path of a file, or a dictionary such as {'kind': 'bytes'}"),
    ({"samples": [1]}, "samples is [1], expected a dictionary of arrays by input name"),
    ({"module": None}, "module is a NoneType, expected a torch.nn.Module"),
    ({"samples": {"x": np.ones(4)}}, "the samples of x have the shape (4,), expected ('B', 4)"),
    (
        {"inputs": [InputSpec("x", ("B",), tokens=9)], "samples": {"x": np.array([0, 9])}},
        "the samples of x hold ids from 0 to 9, expected 0 … 8",
    ),
    (
        {"states": [replace(H, initial="start")]},
        "starts as 'start', expected a number, a tensor, a parameter's name or",
    ),
    ({"states": [replace(H, initial=[1])]}, "starts as [1], expected a number"),
    ({"states": [replace(H, initial=torch.zeros(3))]}, "starts as a tensor of 3, expected one that broadcasts over 4"),
    ({"states": [replace(H, attribute="cell.h")]}, "kept in cell.h (cell.h leads nowhere: there is no cell), expected"),
    ({"states": [replace(H, attribute="weight")]}, "kept in weight (Parameter), expected an attribute that can be set"),
]


@pytest.mark.parametrize(("make", "message"), ENTRIES, ids=[message for _, message in ENTRIES])
def test_an_entry_that_cannot_be_meant_is_refused_when_it_is_made(make, message):
    assert message in refusal(make)


@pytest.mark.parametrize(("change", "message"), STEPS, ids=[message for _, message in STEPS])
def test_a_step_that_cannot_be_meant_is_refused_before_its_module_runs(change, message):
    def make():
        make_plan(replace(StepSpec(Never(), [X], [H], ["y"]), **change), 2, (), Silent())

    assert message in refusal(make)


def test_a_batch_and_lengths_that_no_shape_has_are_refused():
    spec = small_steps.cell()

    def told(spec, batch=2, lengths=()):
        return refusal(lambda: make_plan(spec, batch, lengths, Silent()))

    assert 'L is 8, expected 1: no input has "L" in its shape' in told(spec, lengths=(8,))
    assert "batch_size is 0, expected a whole number from 1" in told(spec, 0)
    assert 'B is 2, expected 1: no input has "B"' in told(replace(spec, inputs=[InputSpec("x", (1, 4))]))


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ({"kind": "byte"}, "the vocabulary: Invalid value 'byte'"),
        ({"kind": object()}, "the vocabulary: Encoding objects of type object is unsupported; expected one such as"),
        ("nowhere.txt", "nowhere.txt: No such file"),
    ],
)
def test_a_vocabulary_of_another_model_is_refused(vocabulary, message):
    spec = StepSpec(Never(), [InputSpec("x", ("B",), tokens=9)], [H], ["y"], vocabulary=vocabulary)
    with pytest.raises(TxlError) as caught:
        with_data(spec, ExportOptions())
    assert message in str(caught.value)


def test_a_file_whose_specification_cannot_be_meant_says_so_in_that_line(tmp_path: Path) -> None:
    """It is the user's own Python; no traceback of this project's is shown for it."""
    path = tmp_path / "mistaken_step.py"
    path.write_text("from txl_export import InputSpec\ndef build(weights):\n    return InputSpec('x', 3)\n")
    with pytest.raises(UsageError, match=r"^InputSpec\('x'\): shape is 3, expected a tuple") as caught:
        load_spec(f"{path}:build", None)
    assert "\n" not in str(caught.value)


def test_a_state_that_is_a_view_into_another_is_refused():
    module = nn.Module()
    module.ring = torch.zeros(1, 3, 4)
    module.oldest = module.ring[:, 0]
    states = [StateSpec("ring", ("B", 3, 4), attribute="ring"), StateSpec("oldest", ("B", 4), attribute="oldest")]
    with pytest.raises(UsageError, match="states ring and oldest share their memory, expected one state for each"):
        make_plan(StepSpec(module, [InputSpec("x", ("B", 4))], states, ["y"]), 2, (), Silent())
