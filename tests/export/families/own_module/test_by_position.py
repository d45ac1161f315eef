"""Segments of steps of one position: exported, proven and run, and why some are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import small_graphs
import torch
import txl_export
from onnx import helper
from stand_ins.small_steps import cell, window
from torch import Tensor, nn
from txl_export.families.own_module.by_position import by_position, lifting
from txl_export.families.own_module.capture import capture
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.network import StepNetwork
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.sizes import fresh_states
from txl_export.families.own_module.spec import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_runtime import load
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent

B, LENGTH = 3, 8


class Mixer(nn.Module):
    """Token ids of which the last is kept, a window of three rows and a layer that fades; states stand in a stack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.read, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)

    def forward(self, token: Tensor, window: Tensor, layers: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        last, held = layers.unbind(0)
        now = self.embed(token)
        rows = torch.cat((window[:, 1:], now[:, None]), 1)
        held = torch.sigmoid(self.read(rows.mean(1) + last)) * held + now
        logits = self.out(held) + steps[:, None] * 0.01
        return logits, rows, torch.stack((now, held)), steps + 1


def mixer() -> StepSpec:
    states = [
        StateSpec("window", ("B", 3, 4)),
        StateSpec("layers", (2, "B", 4), initial=0.5),
        StateSpec("steps", ("B",), dtype="int64"),
    ]
    return StepSpec(Mixer(), [InputSpec("token", ("B",), tokens=9)], states, [OutputSpec("scores", role="logits")])


def positions_of(spec: StepSpec, tokens: np.ndarray, resets: dict[int, int]) -> np.ndarray:
    """Run a module on [B, T] position by position; the states of a row are fresh at its position in `resets`."""
    eager, found = Eager(spec), []
    states = dict(fresh_states(spec, len(tokens)))
    for position in range(tokens.shape[1]):
        for row in [row for row, at in resets.items() if at == position]:
            for name, value in fresh_states(spec, len(tokens)).items():
                axis = next(entry.axes.batch for entry in spec.states if entry.name == name)
                states[name] = states[name].index_copy(axis, torch.tensor([row]), value.narrow(axis, row, 1))
        outputs, states = eager({spec.inputs[0].name: torch.from_numpy(tokens[:, position])}, states)
        found.append(torch.log_softmax(outputs["scores"], -1).numpy())
    return np.stack(found, 1)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lifted") / "mixer.txl"
    txl_export.export(mixer(), place, segment_length=[LENGTH, 1], batch_size=B, verify=False)
    return place


def test_segments_are_the_steps_with_sequences_reset_on_the_way(bundle: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, (B, 3 * LENGTH + 2)).astype(np.int32)
    stream = load(bundle, "cpu").stream()
    parts = [stream.step(tokens[:, :LENGTH])]
    stream.reset([1])
    parts += [stream.step(tokens[:, at : at + LENGTH]) for at in (LENGTH, 2 * LENGTH)]
    parts += [stream.step(tokens[:, at : at + 1]) for at in (3 * LENGTH, 3 * LENGTH + 1)]
    wanted = positions_of(mixer(), tokens, {1: LENGTH})
    assert np.abs(np.concatenate(parts, 1) - wanted).max() < 1e-5


def test_the_tables_have_positions_behind_sequences_and_the_graphs_any_batch(bundle: Path) -> None:
    manifest = load(bundle, "cpu").manifest
    assert [entry.shape for entry in manifest.inputs] == [("B", "L"), ("B",)]
    assert [entry.shape for entry in manifest.outputs] == [("B", "L", 9)]
    assert [(one.segment_length, one.open_batch) for one in manifest.programs] == [(LENGTH, True), (1, True)]
    assert manifest.lengths == "exact"
    assert manifest.stepwise == LENGTH


def test_a_state_in_an_attribute_runs_through_a_segment() -> None:
    spec = by_position(cell(), (4, 1))
    x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    outputs, after = Eager(spec)({"x": x}, fresh_states(spec, 2))
    states, step = dict(fresh_states(spec, 2)), Eager(cell())
    for position in range(4):
        one, states = step({"x": x[:, position]}, states)
        assert torch.allclose(outputs["scores"][:, position], one["scores"])
    assert torch.allclose(after["h"], states["h"])


def test_samples_become_positions_of_one_sequence() -> None:
    rows = np.arange(5, dtype=np.int32)
    (found,) = by_position(replace(mixer(), samples={"token": rows}), (8, 1)).samples.values()
    assert found.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


def test_steps_that_take_segments_and_single_positions_stay_as_they_are() -> None:
    spec = mixer()
    assert by_position(spec, ()) is by_position(spec, (1,)) is spec
    taking = window()
    assert by_position(taking, (8, 1)) is taking


def with_state(**facts: Any) -> StepSpec:
    return replace(mixer(), states=[StateSpec("window", **{"shape": ("B", 3, 4), **facts})])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (with_state(grows=1), "state window grows"),
        (with_state(initial=None), "state window is absent at first"),
        (with_state(shape=(3, 4)), "state window is shared by all sequences"),
        (replace(mixer(), inputs=[InputSpec("token", (1,), tokens=9)]), "input token is shared by all sequences"),
        (replace(mixer(), lengths=True), "the module takes valid"),
    ],
)
def test_what_cannot_be_lifted_is_refused_in_one_line(spec: StepSpec, said: str) -> None:
    with pytest.raises(UsageError, match=f"segments of several positions .* step of one: {said}; .*--segment-length 1"):
        by_position(spec, (8, 1))


class Norm(nn.Module):
    """Takes the mean of its batch out: sequences depend on one another."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * h + x
        return h - h.mean(0), h


class Fixed(nn.Module):
    """Takes three sequences alone."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * h + x.reshape(B, 4)
        return h, h


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Norm(), "the sequences run all or none"),
        (Fixed(), r"positions become sequences, and it does not take 16, L · \(B \+ 1\): "),
    ],
)
def test_steps_whose_sequences_are_no_rows_are_refused(module: nn.Module, said: str) -> None:
    spec = StepSpec(module, [InputSpec("x", ("B", 4))], [StateSpec("h", ("B", 4))], ["y"])
    plan = make_plan(by_position(spec, (4, 1)), B, (4, 1), Silent())
    with pytest.raises(UsageError, match=f"^segments of several positions .* step of one: {said}"):
        lifting(plan, lambda _: capture)(StepNetwork(plan, plan.transitions[0]), "step-4", [])


def test_a_file_of_one_position_has_segments_too(tmp_path: Path) -> None:
    """y = h' = tanh(x + h) of x [b, 4]."""
    nodes = [helper.make_node("Add", ["x", "h"], ["sum"]), helper.make_node("Tanh", ["sum"], ["y"])]
    nodes.append(helper.make_node("Identity", ["y"], ["h_out"]))
    sides = [[small_graphs.value(name, ("b", 4)) for name in names] for names in (("x", "h"), ("y", "h_out"))]
    onnx.save(small_graphs.model(nodes, *sides), tmp_path / "step.onnx")
    bundle, x = tmp_path / "step.txl", np.random.default_rng(0).standard_normal((2, LENGTH, 4), np.float32)
    txl_export.export(tmp_path / "step.onnx", bundle, segment_length=[LENGTH, 1], batch_size=2, verify=False)
    found, held = load(bundle, "cpu").stream().run({"x": x})["y"], np.zeros((2, 4), np.float32)
    for position in range(LENGTH):
        held = np.tanh(x[:, position] + held)
        assert np.abs(found[:, position] - held).max() < 1e-5


def test_a_file_of_tokens_says_that_its_segments_are_steps(tmp_path: Path) -> None:
    """y = h' @ w with h' = tanh(table[token] + h); the segments that `stepwise` speaks of are run, too."""
    draws = np.random.default_rng(0)
    table, out = (draws.standard_normal(size, np.float32) for size in ((9, 4), (4, 9)))
    nodes = [
        helper.make_node("Gather", ["table", "token"], ["row"]),
        helper.make_node("Add", ["row", "h"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["h_out"]),
        helper.make_node("MatMul", ["h_out", "w"], ["y"]),
    ]
    given = [small_graphs.value("token", ("b",), onnx.TensorProto.INT64), small_graphs.value("h", ("b", 4))]
    made = [small_graphs.value("y", ("b", 9)), small_graphs.value("h_out", ("b", 4))]
    tables = [onnx.numpy_helper.from_array(one, name) for one, name in ((table, "table"), (out, "w"))]
    graph = small_graphs.model(nodes, given, made, tables)
    onnx.save(graph, tmp_path / "words.onnx")
    bundle = tmp_path / "words.txl"
    txl_export.export(tmp_path / "words.onnx", bundle, segment_length=[5, 4, 3, 2, 1], batch_size=1, verify=False)
    model, tokens = load(bundle, "cpu"), draws.integers(0, 9, (1, 5))
    assert model.manifest.stepwise == 5
    segment, steps = model.stream().step(tokens), model.stream()
    single = np.concatenate([steps.step(tokens[:, at, None]) for at in range(5)], 1)
    assert np.abs(segment - single).max() < 1e-5
