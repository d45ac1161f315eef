"""The samples in plain C: compiled with every warning an error, run, and held against the bundles."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import txl_export
import txl_runtime
from plain_c import build, need
from txl_export.families.own_module.sources import read_source
from txl_runtime.ladder import BISECT
from txl_runtime.types import Floats

from txl_deploy.plain_c.package import package_c
from txl_deploy.plain_c.rendering import FLAGS

SAMPLES = Path(__file__).parents[2] / "samples"
FOLDER = SAMPLES / "plain_c"
PROMPT = "class Reader:\n    def "
CORTEX = "-mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16 -O2"
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler of C (cc)")


def compiled(source: str, package: Path, folder: Path, compiler: str = "cc", flags: str = FLAGS) -> Path:
    """A sample with its package, with every warning an error."""
    need(compiler)
    sources = FOLDER / source, package / f"{package.name}.c"
    strict = f"-Wall -Wextra -Werror {flags}"
    return build(package, folder / Path(source).stem, *sources, compiler=compiler, flags=strict)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Transformer-XL, packaged."""
    return package_c(SAMPLES / "tiny.txl", tmp_path_factory.mktemp("tiny") / "tiny", lengths=(1,)).folder


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """A step of a sample as bundle and as package."""

    def make(source: str, name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        bundle = folder / "bundle.txl"
        spec, _ = read_source(f"{SAMPLES / source}:build", None)
        if name == "policy":
            spec.module.action.bias.data[0] += 1  # mostly ahead, so that mazes are longer than one step
        txl_export.export(spec, bundle, segment_length=(1,), batch_size=1, verify=False)
        return bundle, package_c(bundle, folder / name, name=name).folder

    return make


@pytest.mark.slow
def test_one_static_program_writes_as_the_model_would(tiny: Path, tmp_path: Path) -> None:
    program = compiled("generate.c", tiny, tmp_path, flags=f"{FLAGS} -static")
    text = subprocess.run([program, PROMPT, "80", "0.8", "3"], capture_output=True, check=True).stdout
    greedy = subprocess.run([program, PROMPT, "40", "0"], capture_output=True, check=True).stdout
    assert text.startswith(PROMPT.encode())
    assert len(text) == len(PROMPT) + 80 + 1
    assert len(set(text)) > 10, "a text, and not one byte again and again"
    stream = txl_runtime.load(SAMPLES / "tiny.txl", "cpu", threads=1).stream(1)
    logprobs = stream.feed(np.frombuffer(greedy[:-1], np.uint8)[None].astype(np.int32))[0]
    places = np.arange(len(PROMPT) - 1, len(greedy) - 2)
    behind = logprobs[places].max(1) - logprobs[places, np.frombuffer(greedy[:-1], np.uint8)[places + 1]]
    assert behind.max() <= BISECT["int8"], "no byte is further from the best one than rounding takes it"


@pytest.mark.slow
def test_another_processor_writes_the_same_text(tiny: Path, tmp_path: Path) -> None:
    need("qemu-aarch64")
    (tmp_path / "own").mkdir()
    own = compiled("generate.c", tiny, tmp_path / "own")
    other = compiled("generate.c", tiny, tmp_path, "aarch64-linux-gnu-gcc", "-O2 -static")
    texts = [
        subprocess.run([*command, PROMPT, "60", "0"], capture_output=True, check=True).stdout
        for command in ([own], ["qemu-aarch64", other])
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "gtrxl"])
def test_the_control_loop_acts_as_the_bundle_does(name: str, packaged, tmp_path: Path) -> None:
    bundle, package = packaged(f"policy/{name}.py", "policy")
    program = compiled("control.c", package, tmp_path)
    done = subprocess.run([program, "30", "0", "trace"], capture_output=True, text=True, check=True)
    rows: Floats = np.array([line.split() for line in done.stdout.splitlines()], np.float32)
    stream = txl_runtime.load(bundle, "cpu", threads=1).stream(1)
    for step, observation, scores in zip(rows[:, 0], rows[:, 1:10], rows[:, 10:], strict=True):
        if step == 0:
            stream.reset()
        found = stream.run({"observation": observation[None, None]})["action"][0, 0]
        np.testing.assert_allclose(scores, found, rtol=0, atol=1e-5)
    assert (rows[:, 0] == 0).sum() == 30
    assert len(rows) > 60, "mazes have more than one step"
    assert "30 mazes" in done.stderr


@pytest.mark.slow
def test_a_voice_is_the_same_in_blocks_of_any_size(packaged, tmp_path: Path) -> None:
    bundle, package = packaged("plain_c/voice.py", "voice")
    program = compiled("voice.c", package, tmp_path)
    sound = np.random.default_rng(0).standard_normal((30, 160)).astype(np.float32) / 10
    texts = [
        subprocess.run([program, size], input=sound.tobytes(), capture_output=True, check=True).stdout
        for size in ("1", "160", "333")
    ]
    assert texts[0] == texts[1] == texts[2]
    stream = txl_runtime.load(bundle, "cpu", threads=1).stream(1)
    expected = np.concatenate([np.zeros((1, 160)), *(stream.run({"x": hop[None]})["y"] for hop in sound[:-1])])
    np.testing.assert_allclose(np.frombuffer(texts[0], np.float32).reshape(30, 160), expected, rtol=0, atol=1e-6)
    wrong = subprocess.run([program, "0"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (2, "a block has 0 samples, expected 1 to 4096\n")


@pytest.mark.slow
def test_a_policy_fits_a_microcontroller(packaged, tmp_path: Path) -> None:
    need("arm-none-eabi-gcc", "arm-none-eabi-nm")
    _, package = packaged("policy/lstm.py", "policy")
    made = tmp_path / "policy.o"
    subprocess.run(
        ["arm-none-eabi-gcc", "-std=c99", *CORTEX.split(), "-c", package / "policy.c", "-o", made], check=True
    )
    said = subprocess.run(
        ["arm-none-eabi-nm", "--undefined-only", made], capture_output=True, text=True, check=True
    ).stdout
    needed = set(said.split()) - {"U"}
    assert needed <= {"expf", "tanhf", "fmaxf", "fminf", "memcpy", "memset"}, (
        "nothing that allocates, waits or asks a system"
    )
    assert {"expf", "tanhf"} <= needed
