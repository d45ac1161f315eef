"""silero-vad, as its package has it: its ONNX made a bundle, its TorchScript's weights in a module of one's own, each
against the other.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from support import PACKAGES

DATA = PACKAGES / "silero_vad" / "data"
FIX = {"sr": "16000", "sequence": "576"}
VOICE = f"{Path(__file__).with_name('voice.py')}:build"
pytestmark = [
    pytest.mark.slow(keep=9),
    pytest.mark.skipif(not DATA.exists(), reason="make packages installs silero-vad"),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The bundle of its ONNX file."""
    path = tmp_path_factory.mktemp("silero") / "vad.txl"
    txl_export.export(DATA / "silero_vad_16k_op15.onnx", path, fix=FIX, batch_size=2)
    return path


def audio(seconds: float) -> np.ndarray:
    """Tones that come and go over noise: the network takes some of them for a voice."""
    draws, time = np.random.default_rng(0), np.arange(round(16000 * seconds)) / 16000
    voice = sum(np.sin(2 * np.pi * 120 * n * time) / n for n in range(1, 20)) * (np.sin(2 * np.pi * 0.7 * time) > 0)
    return (0.1 * voice + draws.normal(0, 0.01, time.size)).astype(np.float32)


@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated:DeprecationWarning")
def test_the_bundle_is_what_the_archive_computes_that_keeps_its_state_itself(bundle):
    archive, stream = torch.jit.load(DATA / "silero_vad.jit"), txl_runtime.load(bundle, "cpu").stream()
    samples, found = audio(4.0), []
    padded = np.concatenate([np.zeros(64, np.float32), samples])
    for at in range(0, len(samples) - 511, 512):
        wanted = archive(torch.from_numpy(samples[None, at : at + 512]), 16000).detach()
        found.append(float(stream.run({"input": np.repeat(padded[None, at : at + 576], 2, 0)})["output"][0, 0]))
        assert abs(found[-1] - float(wanted)) <= 1e-5
    assert max(found) - min(found) > 0.1, "it heard something"


@pytest.mark.slow
def test_the_file_is_its_module_with_the_weights_of_the_archive(tmp_path):
    given = tmp_path / "given.npz"
    np.savez(given, sr=np.array(16000))
    path, weights = DATA / "silero_vad_16k_op15.onnx", DATA / "silero_vad.jit"
    assert txl_export.verify(path, module=VOICE, weights=weights, inputs=given).passed
    own = tmp_path / "own.txl"
    txl_export.export(VOICE, own, weights=weights)
    assert txl_export.verify(own, checkpoint=DATA / "silero_vad.onnx", inputs=given).passed


@pytest.mark.slow
def test_the_safetensors_beside_it_are_of_another_training(bundle, tmp_path):
    from safetensors.torch import load_file, save_file

    own, other = tmp_path / "own.txl", tmp_path / "other.safetensors"
    stored = load_file(DATA / "silero_vad_16k.safetensors")
    archive = txl_export.read_weights(DATA / "silero_vad.jit")
    same_shape = {
        name: next(value for value in stored.values() if value.shape == tensor.shape)
        for name, tensor in archive.items()
        if name.startswith("_model.") and tensor.ndim > 1
    }
    save_file({name: value.clone() for name, value in {**archive, **same_shape}.items() if value.numel()}, other)
    txl_export.export(VOICE, own, weights=other)
    given = tmp_path / "given.npz"
    np.savez(given, sr=np.array(16000))
    assert not txl_export.verify(own, checkpoint=DATA / "silero_vad.onnx", inputs=given, segments=20).passed


def test_the_sample_hears_it(bundle, tmp_path, monkeypatch):
    one = tmp_path / "vad.txl"
    txl_export.export(DATA / "silero_vad_16k_op15.onnx", one, fix=FIX)
    with wave.open(str(tmp_path / "speech.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((audio(2.0) * 32767).astype(np.int16).tobytes())
    script = Path(__file__).parents[2] / "samples" / "found" / "voice.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(one), str(tmp_path / "speech.wav")])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(script))
    lines = said.getvalue().splitlines()
    assert len(lines) == 62
    assert lines[0].split()[0] == "0.03"
