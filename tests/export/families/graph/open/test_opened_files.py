"""Files that forget, from the file to the bundle: a loop over the bundle returns what their module does."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import txl_export
import txl_runtime
from txl_export.families.graph.family import planned, take
from txl_export.families.graph.find.stepping import Choices
from txl_export.families.graph.take.reading import read_foreign
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent


def saved(module: torch.nn.Module, given: dict[str, torch.Tensor], path: Path, free=None, returned=("y",)) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), tuple(given.values()), path, input_names=[*given], output_names=[*returned],
            opset_version=17, dynamic_axes=free, dynamo=False,
        )  # fmt: skip
    return path


class Policy(torch.nn.Module):
    """One observation a call, whose LSTM begins anew in the file."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.memory, self.actor = torch.nn.LSTM(12, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 12] → [1, 4]."""
        return self.actor(self.memory(x[None])[0][0])


def test_a_policy_of_one_position_a_call_equals_its_module_over_300_steps(tmp_path):
    policy = Policy()
    path = saved(policy, {"x": torch.randn(1, 12)}, tmp_path / "p.onnx")
    txl_export.export(path, tmp_path / "b", open=True)
    stream, x, held, found, wanted = (
        txl_runtime.load(tmp_path / "b", "cpu").stream(),
        torch.randn(300, 1, 12),
        None,
        [],
        [],
    )
    for each in x:
        rows, held = policy.memory(each[None], held)
        wanted.append(policy.actor(rows[0]).detach().numpy())
        found.append(stream.run({"x": each.numpy()})["y"])
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-5)
    with pytest.raises(
        UsageError,
        match=r"a call of the file is one position, and it takes 1 sequence: segments of several",
    ):
        txl_export.export(path, tmp_path / "c", open=True, segment_length=4)


def test_a_stream_begins_with_what_the_user_says_in_place_of_the_file_s_own_numbers(tmp_path):
    """A tracer leaves what its own runs left in the memory as a constant in the file."""

    class Leftover(Policy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left = torch.full((1, 1, 16), 0.5)
            return self.actor(self.memory(x[None], (left, left))[0][0])

    policy = Leftover()
    path = saved(policy, {"x": torch.randn(1, 12)}, tmp_path / "p.onnx")
    zeros = {f"LSTM_memory_LSTM.{kind}": np.zeros((1, 1, 16), np.float32) for kind in "hc"}
    with pytest.raises(UsageError, match="expected states") as refused:
        txl_export.export(path, tmp_path / "b", open=True, initial={"nobody": zeros})
    names = re.findall(r"[\w.]+\.[hc]\b", str(refused.value))
    txl_export.export(path, tmp_path / "b", open=True, initial=dict(zip(names, zeros.values(), strict=True)))
    x = torch.randn(1, 12)
    found = txl_runtime.load(tmp_path / "b", "cpu").stream().run({"x": x.numpy()})["y"]
    np.testing.assert_allclose(found, Policy().forward(x).detach().numpy(), atol=1e-5)


class Denoiser(torch.nn.Module):
    """A cumulative norm, a convolution, and a transposed one whose results overlap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = torch.nn.Conv1d(1, 8, 8, 4), torch.nn.ConvTranspose1d(8, 1, 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 1, L] → [1, 1, L]."""
        y = torch.relu(self.into(torch.nn.functional.pad(x, (4, 0))))
        count = torch.arange(1, y.shape[2] + 1, dtype=torch.float32) * 8
        y = y / ((y.sum(1).cumsum(1) / count) + 0.1)[:, None]
        return self.out(y)[:, :, : x.shape[2]]


@pytest.mark.slow
def test_sums_over_positions_and_overlapping_results_equal_the_module_over_the_whole(tmp_path):
    model, axes = Denoiser(), {"x": {2: "time"}, "y": {2: "time"}}
    path = saved(model, {"x": torch.randn(1, 1, 64)}, tmp_path / "d.onnx", axes)
    manifest = txl_export.export(path, tmp_path / "b", open=True, segment_length=8, states={"x": ""}).manifest
    assert sorted(state.name.rpartition("_")[2] for state in manifest.states) == ["count", "sum", "tail", "window"]
    stream, x = txl_runtime.load(tmp_path / "b", "cpu").stream(), torch.randn(1, 1, 400)
    found = np.concatenate([stream.run({"x": part.numpy()})["y"] for part in x.split(8, 2)], 2)
    np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-5)


class Cached(torch.nn.Module):
    """Attention over a cache that grows by the new rows."""

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, 1, 6] and [1, P, 6] → [1, 1, 6] and [1, P + 1, 6]."""
        rows = torch.cat([past, x], 1)
        return torch.softmax(x @ rows.transpose(1, 2), -1) @ rows, rows


def test_a_cache_that_grows_is_cut_to_a_window_and_held_against_the_file_with_its_cache_cut_by_hand(tmp_path):
    given = {"x": torch.randn(1, 1, 6), "past": torch.zeros(1, 3, 6)}
    path = saved(Cached(), given, tmp_path / "c.onnx", {"past": {1: "P"}, "present": {1: "Q"}}, ("y", "present"))
    with pytest.raises(UsageError, match="past is longer after each call"):
        take(read_foreign(path), Choices({"x": ""}, {}, False, {}, {}), Silent())
    taken = take(read_foreign(path), Choices({"x": ""}, {}, False, {}, {}, windows={"past": 5}), Silent())
    plan = planned(taken, taken.spec, (1,), (), Silent())
    assert [(state.name, state.shape) for state in plan.states] == [("past", (1, 5, 6))]
    session = onnxruntime.InferenceSession(ir.to_proto(taken.graph).SerializeToString())
    eager, states, held = Eager(taken.spec), fresh_states(taken.spec, 1), np.zeros((1, 5, 6), np.float32)
    for x in torch.randn(8, 1, 1, 6):
        outputs, states = eager({"x": x}, states)  # the file
        y, held = session.run(["y", "present"], {"x": x.numpy(), "past": held})  # the cut graph
        np.testing.assert_allclose(outputs["y"].numpy(), y, atol=1e-6)
        np.testing.assert_array_equal(states["past"].numpy(), held)
    assert held.any(2).all()
