"""The streaming sample: chunks of any size, in streams that begin and end when they like, are the whole utterance."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import package
from torch import Tensor, nn
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

pytestmark = pytest.mark.slow(keep=9)

FOLDER = Path(__file__).parents[2] / "samples" / "streaming"
FILES = ("tones", "ears", "target_tone", "listen")
TINY = {"WIDTH": 8, "HEADS": 2, "LAYERS": 2, "LEFT": 5, "BANK": 3}
STREAMS = 3
WITHOUT_TORCH = """
import runpy, sys
sys.modules |= dict.fromkeys(["torch", "txl_export"])
sys.path.insert(0, sys.argv.pop(1))
runpy.run_path(sys.path[0] + "/listen.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def sample() -> Iterator[Any]:
    """All files of the sample, imported as its scripts import each other; with a tiny model, for this module alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        files = {name: importlib.import_module(name) for name in FILES}
        for name, value in TINY.items():
            patch.setattr(files["target_tone"], name, value)
        yield SimpleNamespace(**files)
        for name in FILES:
            del sys.modules[name]


@pytest.fixture(scope="module")
def bundle(sample: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported with random weights, for three streams."""
    path = tmp_path_factory.mktemp("streaming") / "tone.txl"
    torch.manual_seed(7)
    txl_export.export(sample.target_tone.build(None), path, batch_size=STREAMS, segment_length=8, verify=False)
    return path


@pytest.fixture(scope="module")
def model(bundle: Path) -> txl_runtime.Model:
    return txl_runtime.load(bundle, "cpu")


def test_streams_are_independent_and_of_fixed_size(model: txl_runtime.Model) -> None:
    assert model.manifest.streams == "independent"
    assert all(state.rows is None for state in model.manifest.states)


def test_the_bundle_is_the_module_through_a_long_stream(sample: Any, model: txl_runtime.Model) -> None:
    torch.manual_seed(7)
    module, states = sample.target_tone.Detector().eval(), sample.target_tone.initial(STREAMS)
    frames = np.stack([sample.tones.simulate(120 + 4, seed)[0] for seed in range(STREAMS)])
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
def test_chunks_of_any_size_are_the_whole_utterance(
    sample: Any, model: txl_runtime.Model, conversation: list[tuple[int, int, bool]], together: bool
) -> None:
    """But for the last bits, which depend on how many streams are computed together."""
    converse(sample, model, conversation, together, sample.listen.ROUNDING)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(0, 31), min_size=1, max_size=12))
def test_chunks_of_a_stream_that_runs_alone_give_every_bit(
    sample: Any, model: txl_runtime.Model, sizes: list[int]
) -> None:
    converse(sample, model, [*((0, size, False) for size in sizes), (0, 3, True)], False, 0)


def converse(
    sample: Any, model: txl_runtime.Model, conversation: list[tuple[int, int, bool]], together: bool, atol: float
) -> None:
    ears, random = sample.ears.Ears(model), np.random.default_rng(0)
    said: dict[int, list[Any]] = {row: [] for row in range(STREAMS)}
    heard: dict[int, list[Any]] = {row: [] for row in range(STREAMS)}
    pending: dict[int, Any] = {}
    for row, size, ends in conversation:
        chunk = random.standard_normal((size, sample.tones.BANDS)).astype(np.float32)
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
                np.testing.assert_allclose(scores, sample.listen.whole(ears, frames), rtol=0, atol=atol)
            said[row], heard[row] = [], []
    assert not any(len(frames) for frames in ears.waiting)
    assert not any(state.any() for state in ears.stream.state().values()), "all begin anew"


def test_a_frame_waits_for_its_segment_and_what_lies_ahead(sample: Any, model: txl_runtime.Model) -> None:
    ears, frame = sample.ears.Ears(model), np.ones((1, 8), np.float32)
    counts = [len(ears.hear({1: frame})[1]) for _ in range(30)]
    assert counts == [8 if number in (12, 20, 28) else 0 for number in range(1, 31)]
    assert len(ears.hear({}, [1])[1]) == 30 - 24


def test_the_past_and_what_lies_ahead_both_reach_the_scores(sample: Any, model: txl_runtime.Model) -> None:
    frames = sample.tones.simulate(60, 3)[0]
    ears = sample.ears.Ears(model)
    exact = sample.listen.whole(ears, frames)
    for blind in ({"ahead": False}, {"past": False}):
        assert not np.array_equal(sample.listen.whole(ears, frames, **blind), exact)


def others(name: str) -> StepSpec:
    """Return a step that has neither the sample's names nor its sizes."""
    torch.manual_seed(1)
    if name == "torchaudio":
        sizes = {"input_dim": 6, "num_heads": 2, "ffn_dim": 12, "num_layers": 2, "segment_length": 5}
        return txl_export.adapt(
            "emformer", package("torchaudio.models").Emformer(**sizes, right_context_length=2, left_context_length=7)
        )

    class Sums(nn.Module):
        def forward(self, features: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
            sums = total[:, None] + features[:, :4].cumsum(1)
            return (sums + features[:, 3:].amax((1, 2, 3), keepdim=True)).flatten(2), sums[:, -1]

    features, total = InputSpec("features", ("B", "L", 3, 2), lookahead=3), StateSpec("total", ("B", 3, 2))
    return StepSpec(Sums(), [features], [total], [OutputSpec("encoded", ("B", "L", 6))], segment_lengths=[4])


@pytest.mark.parametrize(("name", "length", "frame", "ahead"), [("own", 4, (3, 2), 3), ("torchaudio", 5, (6,), 2)])
def test_the_buffer_knows_no_model(
    name: str, length: int, frame: tuple[int, ...], ahead: int, sample: Any, tmp_path: Path
) -> None:
    made = txl_export.export(others(name), tmp_path / "o.txl", batch_size=2, segment_length=length, verify=False)
    ears, random = sample.ears.Ears(txl_runtime.load(made.path, "cpu")), np.random.default_rng(0)
    assert (ears.input, ears.output, ears.segment, ears.ahead) == ("features", "encoded", length, ahead)
    said = random.standard_normal((2, 27, *frame)).astype(np.float32)
    heard: list[list[Any]] = [[], []]
    for place in range(27):  # the second stream begins nine frames later, and both end in chunks of several frames
        chunks = {0: said[0, place : place + 1]} if place < 9 else {}
        chunks |= {0: said[0, 9:], 1: said[1, :20]} if place == 9 else {}
        chunks |= {1: said[1, place : place + 1]} if place >= 20 else {}
        for row, results in ears.hear(chunks, [0] if place == 9 else [1] if place == 26 else []).items():
            heard[row].append(results)
    for row in range(2):
        np.testing.assert_array_equal(np.concatenate(heard[row]), sample.listen.whole(ears, said[row]))
    with pytest.raises(txl_runtime.UsageError, match=r"a chunk has shape \[3, 99\], expected \['T', "):
        ears.hear({0: np.zeros((3, 99), np.float32)})


def test_a_bundle_that_the_buffer_does_not_fit_is_refused(sample: Any, tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, -x, total + x.sum((1, 2))

    spec = StepSpec(Two(), [InputSpec("x", ("B", "L", 2))], [StateSpec("total", ("B",))], ["one", "other"])
    made = txl_export.export(spec, tmp_path / "two.txl", batch_size=2, segment_length=4, verify=False)
    with pytest.raises(txl_runtime.UsageError, match=r"one \[.*other \[.*write a buffer of your own"):
        sample.ears.Ears(txl_runtime.load(made.path, "cpu"))


def test_the_sample_trains_and_its_weights_are_read_again(
    sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["target_tone.py", str(tmp_path / "tone.pt"), "--updates", "2"])
    sample.target_tone.main()
    assert re.fullmatch(r"found: \d+% \(F1\) after 2 updates in \d+ s\n", capsys.readouterr().out)
    read, again = sample.target_tone.build(str(tmp_path / "tone.pt")).module, sample.target_tone.train(2)
    assert all(torch.equal(read.state_dict()[key], value) for key, value in again.state_dict().items())


def test_listening_needs_no_torch(bundle: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(FOLDER)]
    told = subprocess.run([*command, str(bundle)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert ": as from the whole utterance, at most " in told.stdout
    missing = subprocess.run([*command, str(bundle / "none")], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert re.fullmatch(r"error: .*none: .*\n", missing.stderr)


def commands(text: str) -> list[list[str]]:
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^    (?:\$ )?((?:python|txl-deploy) .*)$", joined, re.MULTILINE)
    return [line.split() for line in lines]


def test_the_readme_has_the_commands_of_the_file() -> None:
    own = commands((FOLDER / "target_tone.py").read_text().split('"""')[1])
    assert len(own) == 3
    assert commands((FOLDER / "README.md").read_text())[:3] == own
    assert all((FOLDER.parents[1] / command[1]).is_file() for command in own if command[0] == "python")
