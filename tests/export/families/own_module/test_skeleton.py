"""The file that is written for an archive: it is run as it is printed, and computes what the archive computes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PACKAGES
from torch import Tensor, nn
from txl_export.checkpoints import load
from txl_export.families.own_module.loading import load_spec
from txl_export.families.own_module.sizes import fresh_states
from txl_export.families.own_module.skeleton import recognised, skeleton
from txl_export.families.own_module.spec import StepSpec
from txl_runtime.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")


class Lstm(nn.Module):
    """As unitree_rl_gym's motion.pt: 47 numbers, an LSTM of 64, layers; its state in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(64, 32), nn.ELU(), nn.Linear(32, 12))
        self.memory = nn.LSTM(47, 64)
        self.register_buffer("hidden_state", torch.rand(1, 1, 64))
        self.register_buffer("cell_state", torch.rand(1, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.memory(x.unsqueeze(0), (self.hidden_state, self.cell_state))
        self.hidden_state[:] = h
        self.cell_state[:] = c
        return self.actor(out.squeeze(0))


class Gru(nn.Module):
    """Two layers of a GRU behind a normalisation; the names of its parts are none of those above."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rnn, self.head = nn.LayerNorm(6), nn.GRU(6, 8, 2), nn.Linear(8, 3)
        self.register_buffer("h", torch.rand(2, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        out, h = self.rnn(self.norm(x).unsqueeze(0), self.h)
        self.h[:] = h
        return self.head(out.squeeze(0))


class Tokens(nn.Module):
    """An embedding and two cells, whose states are in no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.embedding = nn.Linear(8, 9, bias=False), nn.Embedding(9, 4)
        self.cells = nn.ModuleList([nn.LSTMCell(4, 8), nn.LSTMCell(8, 8)])
        self.states = [torch.zeros(1, 8)] * 4

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.embedding(x), []
        for number, cell in enumerate(self.cells):
            h, c = cell(x, (self.states[2 * number], self.states[2 * number + 1]))
            kept += [h, c]
            x = h
        self.states = kept
        return self.head(x)


def saved(module: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), path)
    return path


def spec_of(path: Path, folder: Path) -> StepSpec:
    """Return the step of an archive's skeleton, run as it is written."""
    _, loaded = load(path)
    file = folder / f"made_of_{path.stem}.py"
    file.write_text(skeleton(loaded.content, loaded.classes, path.name))
    return load_spec(f"{file}:build", str(path))


def starts(spec: StepSpec) -> list[Tensor]:
    """The states of one sequence as they begin."""
    return [state for state in fresh_states(spec, 1).values() if state is not None]


@pytest.mark.parametrize("kind", [Lstm, Gru])
def test_a_policy_computes_over_a_chain_what_its_archive_computes(kind: Any, tmp_path: Path) -> None:
    path = saved(kind(), tmp_path / "policy.pt")
    original, spec = torch.jit.load(path), spec_of(path, tmp_path)
    states = starts(spec)
    features = int(spec.inputs[0].shape[1])
    with torch.no_grad():
        for _ in range(20):
            x = torch.randn(1, features)
            found, *states = spec.module(x, *states)
            assert torch.allclose(found, original(x), atol=1e-6)
    names = ["hidden_state", "cell_state"] if kind is Lstm else ["h"]
    assert [state.name for state in spec.states] == names
    assert all(tensor.any() for tensor in starts(spec)), "the archive's own beginning, which is not zeros here"


def test_cells_over_tokens_are_one_chain_each_with_states_of_its_own(tmp_path: Path) -> None:
    path = saved(Tokens(), tmp_path / "tokens.pt")
    original, spec = torch.jit.load(path), spec_of(path, tmp_path)
    assert spec.inputs[0].tokens == 9
    assert [state.name for state in spec.states] == ["hidden", "cell", "cells_1_hidden", "cells_1_cell"]
    states = starts(spec)
    with torch.no_grad():
        for token in (3, 0, 8, 3):
            found, *states = spec.module(torch.tensor([token]), *states)
            assert torch.allclose(found, original(torch.tensor([token])), atol=1e-6)


def test_layers_that_fit_nowhere_are_left_to_do(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(5, 1), nn.Tanh())
            self.register_buffer("scale", torch.ones(7))

        def forward(self, x: Tensor) -> Tensor:
            return self.actor(x) * self.scale[0] + self.critic(torch.ones(5))

    path = saved(Both(), tmp_path / "both.pt")
    spec = spec_of(path, tmp_path)
    assert spec.module(torch.ones(1, 4)).shape == (1, 3)
    text = (tmp_path / "made_of_both.py").read_text()
    left = [line.strip() for line in text.split("# TODO: not used yet:")[1].split("return")[0].splitlines()]
    assert left == ["", "#   self.critic", "#   self.scale", ""]
    _, loaded = load(path)
    assert recognised(loaded.content, loaded.classes) == [
        ("actor", "nn.Linear(4, 3)"),
        ("critic", "nn.Sequential(nn.Linear(5, 1), nn.Tanh())"),
    ]


def test_a_list_of_layers_by_itself_is_written(tmp_path: Path) -> None:
    path = saved(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 2))), tmp_path / "list.pt")
    spec = spec_of(path, tmp_path)
    x = torch.randn(2, 4)
    assert torch.allclose(spec.module(x), torch.jit.load(path)(x))


def test_sileros_layout_builds_with_its_weights_and_runs(tmp_path: Path) -> None:
    path = PACKAGES / "silero_vad" / "data" / "silero_vad.jit"
    if not path.exists():
        pytest.skip("silero-vad is not installed; make packages")
    spec = spec_of(path, tmp_path)
    assert [list(state.shape) for state in spec.states] == [["B", 128]] * 2
    with torch.no_grad():
        output, hidden, cell = spec.module(torch.randn(2, 129, 3), torch.zeros(2, 128), torch.zeros(2, 128))
    assert output.shape == (2, 1, 1)
    assert hidden.shape == cell.shape == (2, 128)
    original = torch.jit.load(path).state_dict()
    found = spec.module.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())


def test_a_sequence_with_a_recurrent_layer_in_it_is_called_layer_by_layer() -> None:
    tensors = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.GRUCell(3, 3)).state_dict()
    classes = {"body": "torch.nn.modules.container.Sequential", "body.1": "torch.nn.modules.activation.Tanh"}
    text = skeleton({f"body.{name}": tensor for name, tensor in tensors.items()}, classes, "policy.pt")
    assert [line.strip() for line in text.splitlines() if "self.body[" in line and "(x" in line] == [
        "x = self.body[0](x)",
        "x = self.body[1](x)",
        "hidden = self.body[2](x, hidden)",
    ]


def test_what_has_no_sizes_stays_before_the_next_layer_and_at_the_end() -> None:
    tensors = {f"{name}.weight": torch.zeros(size) for name, size in (("late", (2, 3)), ("early", (3, 5)))}
    activation = "torch.nn.modules.activation.Tanh"
    classes = {"": "Own", "late": "", "between": activation, "early": "", "end": activation}
    text = skeleton(tensors, classes, "policy.pt")
    calls = [line.strip() for line in text.splitlines() if line.startswith("        x = self.")]
    assert calls == [f"x = self.{name}(x)" for name in ("between", "early", "late", "end")]
    classes = {"": "Own", "late": "", "early": "", "other": "", "end": activation}
    text = skeleton(tensors | {"other.weight": torch.zeros(9, 9)}, classes, "policy.pt")
    assert [line.strip() for line in text.splitlines() if "#   self" in line] == ["#   self.other", "#   self.end"]


ODD = ["99999999", "import", "a b", "x=1;import os", "é", "x\nimport os", "0x", "x)"]


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_python_cannot_write_is_refused_and_never_written(name: str) -> None:
    with pytest.raises(CheckpointError, match="which is no name in Python"):
        skeleton({f"{name}.weight": torch.zeros(2, 2), "b.weight": torch.zeros(2, 2)}, {}, "policy.pt")


@pytest.mark.parametrize("name", [*ODD, "__init__", '"); import os; ("', "\u202e", "😀"])
def test_tensors_and_files_of_any_name_are_quoted(name: str) -> None:
    text = skeleton({name: torch.zeros(2), "b.weight": torch.zeros(2, 2)}, {}, f"{name}.pt")
    compile(text, "made.py", "exec")
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert code[1:4] == ["import torch", "from torch import nn", code[3]]
    assert sum("import" in line for line in code if "register_buffer" not in line) == 3
    (quoted,) = [line for line in code if "register_buffer" in line]
    assert eval(quoted.split("register_buffer(")[1].rsplit(", torch.zeros", 1)[0]) == name
