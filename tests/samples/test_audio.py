"""The sample of real-time audio: a WAV file played by the program in C is what the module makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import txl_export
from own_loops import Stepped
from plain_c import build, need, run

from txl_deploy.plain_c.package import package_c
from txl_deploy.plain_c.rendering import FLAGS

FOLDER = Path(__file__).parents[2] / "samples" / "audio"
sys.path.insert(0, str(FOLDER))
import nam  # noqa: E402
import random_nam  # noqa: E402

ALLOWED = {"memcpy", "memset", "memmove", "tanhf", "expf", "fabsf"}
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler of C (cc)")


def write_wav(path: Path, samples: np.ndarray, bits: int = 16, rate: int = 48000, channels: int = 1) -> np.ndarray:
    """Write samples of -1 … 1 as PCM; return them as they were rounded."""
    whole = np.round(samples * (2 ** (bits - 1) - 1)).astype(np.int64)
    data = (whole << 64 - bits).astype("<i8").view(np.uint8).reshape(-1, 8)[:, 8 - bits // 8 :]
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, bits // 8, rate, len(samples) // channels, "NONE", ""))
        file.writeframes(data.tobytes())
    return (whole / 2 ** (bits - 1)).astype(np.float32)


@pytest.fixture(scope="module", params=["wavenet", "lstm"])
def amp(request, tmp_path_factory) -> tuple[Path, Path]:
    """A `.nam` file with random weights, and the program that plays through it."""
    folder = tmp_path_factory.mktemp("amp")
    made = random_nam.lstm(2, 6) if request.param == "lstm" else random_nam.wavenet((4, 2), ([1, 2], [40]))
    (folder / "amp.nam").write_text(json.dumps(made))
    txl_export.export(nam.build(str(folder / "amp.nam")), folder / "amp.txl", batch_size=1, verify=False)
    package = package_c(folder / "amp.txl", folder / "amp", name="amp", lengths=(64, 8, 1)).folder
    flags = f"{FLAGS} -Wall -Wextra -Werror"
    return folder / "amp.nam", build(package, folder / "play", FOLDER / "play.c", package / "amp.c", flags=flags)


@pytest.mark.slow
def test_what_is_played_is_what_the_module_makes_of_it_in_blocks_of_any_size(amp, tmp_path):
    file, program = amp
    draws = np.random.default_rng(0)
    for bits, block in ((16, 0), (24, 0), (32, 1), (16, 64), (16, 512)):
        samples = write_wav(tmp_path / "in.wav", draws.uniform(-1, 1, 5000), bits)
        said = run(program, tmp_path / "in.wav", tmp_path / "out.wav", block)
        assert said.startswith("5000 samples in "), said
        assert said.endswith("; 0 samples late\n"), said
        content = (tmp_path / "out.wav").read_bytes()
        found = np.frombuffer(content[44:], "<f4")
        assert int.from_bytes(content[4:8], "little") == len(content) - 8
        wanted = Stepped(nam.build(str(file)), 1).run({"input": samples[None]})["output"][0]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_model_allocates_nothing_and_asks_the_system_nothing(amp, tmp_path):
    need("nm")
    package = amp[0].parent / "amp"
    compiled = build(package, tmp_path / "amp.o", "-c", package / "amp.c", flags=FLAGS)
    listed = [line.split()[-2:] for line in run(Path("/usr/bin/env"), "nm", compiled).splitlines()]
    assert {name for sort, name in listed if sort == "U"} <= ALLOWED
    assert {name for sort, name in listed if sort in "TDBC"} == {"amp_init", "amp_feed", "amp_step", "amp_reset"}


@pytest.mark.slow
def test_a_file_that_does_not_fit_is_refused(amp, tmp_path):
    _, program = amp
    write_wav(tmp_path / "two.wav", np.zeros(100), channels=2)
    write_wav(tmp_path / "slow.wav", np.zeros(100), rate=44100)
    write_wav(tmp_path / "right.wav", np.zeros(100))
    (tmp_path / "text.wav").write_text("no sound")
    (tmp_path / "cut.wav").write_bytes((tmp_path / "right.wav").read_bytes()[:-10])
    for name, said in {
        "two": "expected a WAV file of one channel",
        "text": "expected a WAV file of one channel",
        "slow": "has 44100 samples a second, the model expects 48000",
        "cut": "ends before its samples do",
        "none": "cannot be opened",
    }.items():
        done = subprocess.run(
            [program, tmp_path / f"{name}.wav", tmp_path / "out.wav"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
