"""Steps whose graphs leave B open: which do, which keep it and what is said then, and that few sequences are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
import txl_export
from stand_ins.small_steps import ahead, cell, counted, policy, window
from torch import nn
from txl_export.families.own_module import any_batch, building
from txl_export.families.own_module import capture as capturing
from txl_export.families.own_module.capture import capture
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.reference import ModuleReference
from txl_export.families.own_module.spec import InputSpec, StateSpec, StepSpec
from txl_export.graphs.opening import FixedBatchError
from txl_export.proof.bits import Bits
from txl_export.proof.chains import Planned, run_chain
from txl_export.proof.gates import judge
from txl_export.proof.side_by_side import Trial
from txl_runtime import load
from txl_runtime.bundle.open_batch import BATCH
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.listener import Silent
from verified_steps import Heard

B, WIDTH = 3, 8


class Step(nn.Module):
    """Adds what it holds to what a function makes of its input."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change, self.mix = change, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.change(self.mix(x), h)
        return y + h[:, None], torch.tanh(h + y.mean(1))


def by_row(x, h):
    return torch.stack([torch.tanh(row) for row in x])


def a_share(x, h):
    return x / x.shape[0]


def a_number(x, h):
    return x + (x * 3).int() * x.shape[0]


def a_part(x, h):
    return x + x[:, :, : x.shape[0]].sum(-1, keepdim=True)


def of_three(x, h):
    if len(x) > 3:
        raise ValueError("three are enough")
    return torch.relu(x)


def chosen(x, h):
    which = (x[:, :, 0].sum(1) > 0).long()
    return x + torch.stack([h, 2 * h], 1)[torch.arange(len(x)), which][:, None]


def from_zeros(x, h):
    held = torch.cat([torch.zeros(len(x), 2, WIDTH), x], 1)
    return held.unfold(1, 3, 1).sum(-1)


def step(change: Any) -> StepSpec:
    return StepSpec(Step(change), [InputSpec("x", ("B", "L", WIDTH))], [StateSpec("h", ("B", WIDTH))], ["y"])


def exported(spec: StepSpec, path: Any, batch_size: int = B, **options: Any) -> tuple[Any, list[str]]:
    """The bundle, not verified, and what was said of it."""
    heard = Heard()
    options = {"segment_length": (2,), "verify": False, "listener": heard} | options
    txl_export.export(spec, path, batch_size=batch_size, **options)
    return open_bundle(path), [text for text in heard.warnings if "segment costs" in text]


@pytest.mark.parametrize("made", [policy, cell, ahead, counted, lambda: step(from_zeros), lambda: step(chosen)])
def test_programs_leave_b_open_and_their_tables_keep_it(made, tmp_path):
    spec = made()
    lengths = {} if any("L" in entry.shape for entry in spec.inputs) else {"segment_length": ()}
    bundle, said = exported(spec, tmp_path / "a.txl", **lengths)
    assert said == []
    assert bundle.manifest.family["fixed"] == ""
    for program in bundle.manifest.programs:
        assert program.open_batch
        graph = onnx.load(bundle.file(program.file), load_external_data=False).graph
        declared = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output)}
        for tensor in (*program.inputs, *program.outputs):
            sizes = [dim.dim_param or dim.dim_value for dim in declared[tensor.name]]
            assert sizes.count(BATCH) == 1, tensor.name
            assert tuple(B if size == BATCH else size for size in sizes) == tensor.shape, "the tables have B"


EXACTLY = "the graph of step-2 works for exactly 3 sequences: "


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (by_row, EXACTLY + "the graph of 4 sequences has more operators or fewer"),
        (a_share, EXACTLY + "Div computes with a number that changes with B"),
        (a_number, EXACTLY + "Mul computes with a number that changes with B"),
        (a_part, EXACTLY + "run with fewer, the graph's y is .* away from the module's"),
        (of_three, EXACTLY + r"it cannot be captured with B \+ 1 = 4: .*three are enough"),
    ],
)
def test_what_cannot_be_opened_keeps_b_and_export_says_why_in_one_line(change, said, tmp_path):
    bundle, told = exported(step(change), tmp_path / "a.txl")
    assert not any(program.open_batch for program in bundle.manifest.programs)
    assert len(told) == 1
    assert "\n" not in told[0]
    with pytest.raises(AssertionError, match=rf"^a segment costs 3 sequences however few of them run: {said}"):
        raise AssertionError(told[0])
    assert bundle.manifest.family["fixed"] in told[0]
    stream = load(tmp_path / "a.txl", "cpu").stream(2)
    assert stream.run({"x": np.ones((2, 2, WIDTH), np.float32)})["y"].shape == (2, 2, WIDTH)


def test_one_program_of_one_b_keeps_it_for_all(tmp_path, monkeypatch):
    """A loop computes as many sequences in every segment, whichever program runs."""
    real = any_batch._tried

    def tried(plan: Any, found: Any) -> Any:
        if found.network.length == 1:
            raise FixedBatchError("for a reason")
        return real(plan, found)

    monkeypatch.setattr(any_batch, "_tried", tried)
    bundle, told = exported(policy(), tmp_path / "a.txl", segment_length=(2, 1))
    why = EXACTLY.replace("step-2", "step-1") + "for a reason"
    assert told == [f"a segment costs 3 sequences however few of them run: {why}"]
    assert not any(program.open_batch for program in bundle.manifest.programs)
    assert len(bundle.manifest.programs) == 2


def test_one_sequence_and_those_that_run_all_or_none_keep_b_without_a_word(tmp_path):
    for name, spec, batch_size in (("one", policy(), 1), ("window", window(), 2)):
        bundle, told = exported(spec, tmp_path / f"{name}.txl", batch_size)
        assert told == []
        assert not any(program.open_batch for program in bundle.manifest.programs)


def test_a_graph_of_decomposed_operators_can_be_opened_too(monkeypatch):
    monkeypatch.setattr(capturing, "ROUTES", ("decomposed",))
    graphs = building._staged(make_plan(policy(), B, (2,), Silent()), Silent(), capture)
    assert (graphs.fixed, graphs.routes) == ("", {"step-2": "decomposed"})
    assert graphs.programs[0].open_batch


def test_a_graph_that_computes_something_else_for_few_sequences_is_not_taken(monkeypatch):
    """The fault is put where two captures cannot show it."""
    real, plan = any_batch.open_batch, make_plan(policy(), B, (2,), Silent())

    def wrong(model: Any, other: Any, size: int) -> None:
        real(model, other, size)
        for node in model.graph:
            if node.op_type == "LSTM":  # the second layer starts from the first one's state
                node.replace_input_with(5, next(one for one in model.graph if one.op_type == "LSTM").inputs[5])

    monkeypatch.setattr(any_batch, "open_batch", wrong)
    assert "run with fewer, the graph's" in building._staged(plan, Silent(), capture).fixed


@pytest.mark.parametrize("size", [2, 3, 8, 9, 20, 64])
def test_few_sequences_are_tried_and_many_and_all(size):
    tried = any_batch._counts(size)
    assert {1, 2, size - 1, size} <= {*tried}
    assert max(tried) == size
    assert len(tried) <= 12
    assert size > 8 or tried == [*range(1, size + 1)]


def test_the_chain_of_all_operations_computes_each_number_of_sequences(tmp_path):
    spec = policy()
    exported(spec, tmp_path / "a.txl", 4, segment_length=(2, 1))
    model, computed = load(tmp_path / "a.txl", "cpu", threads=1), list[int]()
    backend: Any = model.backend
    bind = backend.engine.bind

    def noted(program: Any, inputs: Any, outputs: Any) -> Any:
        call = bind(program, inputs, outputs)
        return lambda: (computed.append(len(inputs["valid"])), call())[1]

    backend.engine.bind = noted
    reference = ModuleReference(make_plan(spec, 4, (2, 1), Silent()))
    trial = Trial(model, reference, None, Bits(), tmp_path, Silent())
    found = run_chain(trial, Planned("all operations", 4, (2,) * 64, mixed="operations"))
    assert {*computed} == {1, 2, 3, 4}
    assert min(computed.count(size) for size in range(1, 5)) >= 5
    gates = [*judge(model.manifest, "fp32", "cpu", [found], trial.bits, False)]
    assert [gate.name for gate in gates if gate.passed is False and "(bits)" not in gate.name] == []
