"""The streaming sample: chunks of any size, in streams that begin and end when they like, are the whole utterance."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import cli

FOLDER = Path(__file__).parents[2] / "samples" / "streaming"
SAMPLE = FOLDER / "target_tone.py"
TINY = {"WIDTH": 8, "HEADS": 2, "LAYERS": 2, "LEFT": 5, "BANK": 3}
STREAMS = 3


@pytest.fixture(scope="module")
def sample() -> Any:
    """The sample with a tiny model, for this module's tests alone."""
    spec = importlib.util.spec_from_file_location("target_tone", SAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["target_tone"] = module
    spec.loader.exec_module(module)
    for name, value in TINY.items():
        assert hasattr(module, name)
        setattr(module, name, value)
    yield module
    del sys.modules["target_tone"]


@pytest.fixture(scope="module")
def model(sample: Any, tmp_path_factory: pytest.TempPathFactory) -> txl_runtime.Model:
    """Exported with random weights, for three streams."""
    path = tmp_path_factory.mktemp("streaming") / "tone.txl"
    torch.manual_seed(7)
    txl_export.export(sample.build(None), path, batch_size=STREAMS, segment_length=8, verify=False)
    return txl_runtime.load(path, "cpu")


def test_streams_are_independent_and_of_fixed_size(model: txl_runtime.Model) -> None:
    assert model.manifest.streams == "independent"
    assert all(state.rows is None for state in model.manifest.states)


def test_the_bundle_is_the_module_through_a_long_stream(sample: Any, model: txl_runtime.Model) -> None:
    torch.manual_seed(7)
    module, states = sample.Detector().eval(), sample.initial(STREAMS)
    frames = np.stack([sample.simulate(120 + 4, seed)[0] for seed in range(STREAMS)])
    found = model.stream().feed({"frames": frames})["scores"]
    for first in range(0, 120, 8):
        with torch.no_grad():
            scores, *states = module(torch.from_numpy(frames[:, first : first + 12]), *states)
        np.testing.assert_allclose(found[:, first : first + 8], scores.numpy(), atol=1e-5)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """Chunks (stream, frames, whether it ends there) in the order in which they come; every stream ends at last."""
    size = st.one_of(st.integers(0, 13), st.sampled_from([7, 8, 9, 12, 31]))
    chunk = st.tuples(st.integers(0, STREAMS - 1), size, st.booleans())
    return [*draw(st.lists(chunk, min_size=1, max_size=25)), *((row, draw(size), True) for row in range(STREAMS))]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversation=conversations(), together=st.booleans())
def test_chunks_of_any_size_give_every_bit_of_the_whole_utterance(
    sample: Any, model: txl_runtime.Model, conversation: list[tuple[int, int, bool]], together: bool
) -> None:
    ears, random = sample.Ears(model), np.random.default_rng(0)
    said: dict[int, list[Any]] = {row: [] for row in range(STREAMS)}
    heard: dict[int, list[Any]] = {row: [] for row in range(STREAMS)}
    pending: dict[int, Any] = {}
    for row, size, ends in conversation:
        chunk = random.standard_normal((size, sample.BANDS)).astype(np.float32)
        said[row].append(chunk)
        pending[row] = np.concatenate([pending.get(row, chunk[:0]), chunk])
        if together and not ends:  # several streams in one call
            continue
        for other, scores in ears.hear(pending, [row] if ends else []).items():
            heard[other].append(scores)
        pending = {}
        if ends:
            frames, scores = np.concatenate(said[row]), np.concatenate(heard[row])
            assert scores.shape == (len(frames),)
            if len(frames):
                np.testing.assert_array_equal(scores, sample.whole(model, frames))
            said[row], heard[row] = [], []
    assert not any(len(frames) for frames in ears.waiting)
    assert not any(state.any() for state in ears.stream.state().values()), "all begin anew"


def test_a_frame_waits_for_its_segment_and_what_lies_ahead(sample: Any, model: txl_runtime.Model) -> None:
    ears, frame = sample.Ears(model), np.ones((1, 8), np.float32)
    counts = [len(ears.hear({1: frame})[1]) for _ in range(30)]
    assert counts == [8 if number in (12, 20, 28) else 0 for number in range(1, 31)]
    assert len(ears.hear({}, [1])[1]) == 30 - 24


def test_the_past_and_what_lies_ahead_both_reach_the_scores(sample: Any, model: txl_runtime.Model) -> None:
    frames = sample.simulate(60, 3)[0]
    exact = sample.whole(model, frames)
    for blind in ({"ahead": False}, {"past": False}):
        assert not np.array_equal(sample.whole(model, frames, **blind), exact)


def test_the_sample_trains_and_its_weights_are_read_again(sample: Any, tmp_path: Path) -> None:
    trained = sample.train(0.2)
    torch.save(trained.state_dict(), tmp_path / "tone.pt")
    read = sample.build(str(tmp_path / "tone.pt")).module.state_dict()
    assert all(torch.equal(read[key], value) for key, value in trained.state_dict().items())


def commands(text: str) -> list[list[str]]:
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^    (?:\$ )?((?:python|txl-deploy) .*)$", joined, re.MULTILINE)
    return [line.split() for line in lines]


def test_the_readme_has_the_commands_of_the_file() -> None:
    own, told = commands(SAMPLE.read_text().split('"""')[1]), commands((FOLDER / "README.md").read_text())
    assert len(own) == 3
    assert told[:3] == own


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sample_of_full_size_is_trained_exported_and_listens(tmp_path: Path) -> None:
    command = [sys.executable, str(SAMPLE)]
    subprocess.run([*command, "--train", "tone.pt", "--seconds", "25"], check=True, cwd=tmp_path, timeout=120)
    lengths = ["--segment-length", "8", "--batch-size", "4"]
    made = cli("export", f"{SAMPLE}:build", "--weights", "tone.pt", "-o", "tone.txl", *lengths, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    told = subprocess.run([*command, "--run", "tone.txl"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "every bit as from the whole utterance" in told.stdout
    found, _, forgetful = (int(share) for share in re.findall(r": (\d+)%", told.stdout))
    assert found >= forgetful + 20, told.stdout
