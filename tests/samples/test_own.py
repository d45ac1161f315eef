"""The samples of own models: trained for a moment, at tiny sizes, exported, and streamed as their files say."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from txl_export import StepSpec

pytestmark = pytest.mark.slow(keep=9)

OWN = Path(__file__).parents[2] / "samples" / "own"
TINY: dict[str, dict[str, int]] = {
    "recurrent_policy": {"WIDTH": 8},
    "changed_transformer_xl": {"LAYERS": 1, "WIDTH": 16, "HEADS": 2, "MEMORY": 40},
    "selective_state": {"LAYERS": 1, "WIDTH": 16, "HEADS": 2, "PER_HEAD": 4, "STATE": 4, "INNER": 8, "MIXED": 16},
    "streaming_frames": {"WIDTH": 16, "HEADS": 2, "BANK": 3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "recurrent_policy": {"batch_size": 3},
    "changed_transformer_xl": {"batch_size": 2, "segment_length": (8, 1)},
    "selective_state": {"batch_size": 2, "segment_length": (8, 1)},
    "streaming_frames": {"batch_size": 2, "segment_length": 8},
}
NAMES = tuple(TINY)


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a sample and makes its model tiny."""

    def imported(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, OWN / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        for constant, value in TINY[name].items():
            assert hasattr(module, constant)
            monkeypatch.setattr(module, constant, value)
        return module

    return imported


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[StepSpec, str], txl_runtime.Model]:
    """Exports each sample once, without verification."""
    folder, made = tmp_path_factory.mktemp("own-samples"), dict[str, txl_runtime.Model]()

    def exported(spec: StepSpec, name: str) -> txl_runtime.Model:
        if name not in made:
            torch.manual_seed(1)
            txl_export.export(spec, folder / f"{name}.txl", verify=False, **OPTIONS[name])
            made[name] = txl_runtime.load(folder / f"{name}.txl")
        return made[name]

    return exported


@pytest.fixture
def tiny(
    sample: Callable[[str], ModuleType], bundles: Callable[[StepSpec, str], txl_runtime.Model]
) -> Callable[[str], tuple[StepSpec, txl_runtime.Model]]:
    def of(name: str) -> tuple[StepSpec, txl_runtime.Model]:
        torch.manual_seed(7)
        spec = sample(name).build(None)
        return spec, bundles(spec, name)

    return of


def segments(spec: StepSpec, batch_size: int, lengths: list[int]) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    found = []
    for length in lengths:
        inputs = {}
        for entry in spec.inputs:
            known = {"B": batch_size, "L": length + entry.lookahead}
            shape = [known.get(size, size) for size in entry.shape]
            inputs[entry.name] = (
                random.integers(0, entry.tokens, shape) if entry.tokens else random.normal(size=shape)
            ).astype(np.int32 if entry.tokens else np.float32)
        found.append(inputs)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_trains_and_its_weights_are_read_again(name: str, sample: Callable[..., Any], tmp_path: Path) -> None:
    module = sample(name)
    trained = module.train(2 if name == "recurrent_policy" else 0.5)  # updates, or seconds
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    read = module.build(str(tmp_path / "weights.pt")).module.state_dict()
    assert all(torch.equal(read[key], value) for key, value in trained.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_streams_as_its_module_computes(name: str, tiny: Callable[..., Any]) -> None:
    """Past full memory, with one sequence reset in between; the module itself begins that sequence anew."""
    spec, model = tiny(name)
    batch = model.batch_size
    lengths = [8] * 4 + [1] * 3 + [8] * 4 if 1 in model.segment_lengths and 8 in model.segment_lengths else [8] * 9
    stream = model.stream()
    states = {
        entry.name: torch.zeros(
            [batch if size == "B" else size for size in entry.shape], dtype=getattr(torch, entry.dtype)
        )
        for entry in spec.states
    }
    for number, inputs in enumerate(segments(spec, batch, lengths)):
        if number == 5:
            stream.reset([0])
            for entry in spec.states:
                states[entry.name].select(entry.shape.index("B"), 0).zero_()
        given = [
            torch.from_numpy(values.astype(np.int64 if entry.tokens else np.float32))
            for entry, values in zip(spec.inputs, inputs.values(), strict=True)
        ]
        valid = [torch.full((batch,), lengths[number], dtype=torch.int32)] if spec.lengths else []
        with torch.no_grad():
            results = [tensor.clone() for tensor in spec.module(*given, *states.values(), *valid)]
        found = stream.run(inputs)
        for entry, expected in zip(model.manifest.outputs, results, strict=False):
            wanted = expected.log_softmax(-1) if entry.role == "logprobs" else expected
            np.testing.assert_allclose(found[entry.name], wanted.numpy(), atol=1e-4)
        states = dict(zip(states, results[len(found) :], strict=True))
        for key, values in stream.state().items():
            np.testing.assert_allclose(values, states[key].numpy(), atol=1e-4)


def test_the_policy_needs_its_memory(sample: Callable[..., Any]) -> None:
    """The sample's corridors: the sign is seen at the door alone, and the expert is always right."""
    module = sample("recurrent_policy")
    corridors = module.Corridors(50, seed=0)
    signs = []
    for _ in range(40):
        signs.append(np.where(corridors.place > 0, corridors.observe()[:, 0], 0))
        left, won = corridors.act(corridors.right_action())
        assert (left == won).all()
    assert not np.any(signs)


def test_frames_are_cut_into_windows_with_what_lies_ahead(tiny: Callable[..., Any], sample: Callable[..., Any]) -> None:
    _, model = tiny("streaming_frames")
    frames, labels = sample("streaming_frames").simulate(2, 44, seed=5)
    assert set(np.unique(labels)) == {0, 1, 2}
    single = model.stream()
    parts = [single.run({"frames": frames[:, first : first + 12]})["labels"] for first in range(0, 40, 8)]
    np.testing.assert_array_equal(model.stream().feed({"frames": frames})["labels"], np.concatenate(parts, 1))
    with pytest.raises(txl_runtime.UsageError, match="score"):
        model.stream().score([[1, 2]])


@pytest.mark.parametrize("name", NAMES)
def test_the_first_lines_of_a_sample_are_commands(name: str) -> None:
    lines = (OWN / f"{name}.py").read_text().split('"""')[1].replace("\\\n", " ").splitlines()
    commands = [line.split() for line in lines if line.startswith("    ")]
    assert [words[0] for words in commands] == ["python", "txl-deploy", commands[2][0]]
    assert commands[0][:3] == ["python", f"samples/own/{name}.py", "--train"]
    weights = commands[0][3]
    assert commands[1][1:5] == ["export", f"samples/own/{name}.py:build", "--weights", weights]


def test_the_selective_state_is_exported_at_the_lengths_of_its_command(
    sample: Callable[..., Any], tmp_path: Path
) -> None:
    """Its mask of 32 × 32 truth values is as large as what other constants are moved out of the graph for."""
    path = tmp_path / "ssm.txl"
    txl_export.export(sample("selective_state").build(None), path, segment_length=(32, 1), verify=False)
    assert txl_runtime.load(path).manifest.segment_lengths == (32, 1)
