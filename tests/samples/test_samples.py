"""The samples do what they say, on a model that is really trained (for a few seconds)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from support import cli
from txl_export.checkpoints import read_checkpoint
from txl_export.families.transformer_xl.building import reference_for
from txl_export.families.transformer_xl.weights import check_weights
from txl_runtime.bundle.transformer_xl import Dialect

pytestmark = pytest.mark.slow(keep=9)

SAMPLES = Path(__file__).parents[2] / "samples"
TINY = "--layers 2 --d-model 32 --heads 2 --d-inner 64 --segment 32 --memory 24 --streams 4 --learning-rate 0.004"
SHORT = "--steps 60 --heldout-bytes 16384 --eval-bytes 4096 --no-bfloat16"


def run_sample(name: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(SAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=240, check=False)


def import_sample(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    result = run_sample("train_char_lm.py", "--out", folder, *TINY.split(), *SHORT.split())
    assert result.returncode == 0, result.stderr.decode()
    return folder


@pytest.fixture(scope="module")
def bundle(trained: Path) -> Path:
    txl_export.export(trained / "model.pt", trained / "model.txl", text=trained / "heldout.txt", segment_length=(16, 1))
    return trained / "model.txl"


def test_training_writes_plain_tensors_a_vocabulary_and_text_it_never_saw(trained: Path) -> None:
    checkpoint = torch.load(trained / "model.pt", weights_only=True)
    assert checkpoint["vocabulary"] == json.loads((trained / "vocabulary.json").read_bytes()) == {"kind": "bytes"}
    assert len((trained / "heldout.txt").read_bytes()) == 16384
    bits = checkpoint["training"]["heldout_bits_per_byte"]
    assert {int(memory) for memory in bits} == {0, 24, 96}
    assert all(0 < value < 8 for value in bits.values()), "even a minute of training beats guessing"


def test_training_refuses_to_overwrite(trained: Path) -> None:
    result = run_sample("train_char_lm.py", "--out", trained, "--steps", 1)
    assert result.returncode == 2
    assert len(result.stderr.decode().strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["SIGINT", "SIGTERM"]
)
def test_training_ends_where_python_dropped_what_a_signal_raised(tmp_path: Path, number: int, raised: type) -> None:
    """A signal may come while something is cleaned up; the exception is lost then, and the next step ends the run."""
    sample = import_sample("train_char_lm")
    sample.told.append(number)
    options = sample.Options(layers=1, d_model=8, heads=1, d_inner=8, segment=8, memory=8, steps=3)
    with pytest.raises(raised):
        sample.train(tmp_path / "demo", options)
    assert list((tmp_path / "demo").iterdir()) == []


def test_the_trainer_and_the_reference_are_the_same_model(trained: Path) -> None:
    """Two independent writings of the paper, one trained with, one exported from."""
    sample = import_sample("train_char_lm")
    checkpoint = torch.load(trained / "model.pt", weights_only=True)
    imported, _ = read_checkpoint(trained / "model.pt")
    state = check_weights(imported.config, imported.weights, "model.pt")
    reference = reference_for(imported.config, Dialect(), 24, state)
    bits = checkpoint["training"]["heldout_bits_per_byte"]
    text = np.frombuffer((trained / "heldout.txt").read_bytes(), np.uint8)[:4096]
    streams = torch.from_numpy(text.reshape(sample.EVALUATION_STREAMS, -1).astype(np.int64))
    memory, total, count = reference.initial_memory(len(streams)), 0.0, 0
    for first in range(0, streams.shape[1] - 1, sample.EVALUATION_SEGMENT):
        piece = streams[:, first : first + sample.EVALUATION_SEGMENT + 1]
        logprobs, memory = reference(piece[:, :-1], memory)
        total -= float(logprobs.gather(2, piece[:, 1:, None]).sum())
        count += piece[:, 1:].numel()
    assert total / count / np.log(2) == pytest.approx(bits.get("24", bits.get(24)), abs=2e-5)


def test_score_on_heldout_text_equals_pytorch(trained: Path, bundle: Path) -> None:
    report = json.loads((bundle / "report.json").read_bytes())["text"]
    assert abs(report["runtime_nll"] - report["reference_nll"]) / np.log(2) <= 1e-5
    compared = trained / "compared.txt"
    compared.write_bytes((trained / "heldout.txt").read_bytes()[: report["tokens"]])
    scored = json.loads(cli("score", bundle, compared, "--json").stdout)
    assert scored["bits_per_byte"] == pytest.approx(report["reference_nll"] / np.log(2), abs=1e-5)


def test_the_embedding_sample_continues_and_remembers(bundle: Path, tmp_path: Path) -> None:
    state = tmp_path / "memory.safetensors"
    first = run_sample("embed.py", bundle, "def main(", "--tokens", 8, "--state", state)
    assert first.returncode == 0, first.stderr.decode()
    assert len(first.stdout) >= 8
    assert b"17 of 24 rows" in first.stderr, "9 prompt bytes and 8 drawn"
    second = run_sample("embed.py", bundle, "x", "--tokens", 8, "--state", state)
    assert b"24 of 24 rows" in second.stderr, "the memory of the first run was carried on"
    assert txl_runtime.StreamState.load(state).fill.tolist() == [24]


def chat(bundle: Path, *options: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(SAMPLES / "chat.py"), str(bundle), "--temperature", "0", *map(str, options)]
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    return subprocess.Popen(command, **ends, encoding="utf-8", errors="surrogateescape", env=strict)


def held(model: txl_runtime.Model, state: txl_runtime.StreamState) -> list[bytes]:
    """Return a state's memory, bit for bit."""
    stream = model.stream(1)
    stream.restore(state)
    return [stream.fill.tobytes(), *(rows.tobytes() for rows in stream.memory().values())]


def test_the_chat_remembers_what_both_said_and_saves_and_loads_it(bundle: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    lines = [f"/load {tmp_path / 'none'}", "h€", f"/save {first}", "x", f"/load {first}", "🎉\udcff", f"/save {second}"]
    with chat(bundle, "--tokens", 5) as process:
        _, told = process.communicate("\n".join(lines), timeout=240)
    assert process.returncode == 0
    assert told.startswith("error: "), "a file that is not there does not end the chat"
    assert told.count("[5 tokens, mean log-probability -") == 3
    model = txl_runtime.load(bundle)
    stream = model.stream(1)
    for saved, line in ((first, "h€\n"), (second, "🎉\udcff\n")):
        assert len(list(stream.generate(line, 5, temperature=0, feed_last=True))) == 5
        assert held(model, txl_runtime.StreamState.load(saved)) == held(model, stream.snapshot())


def test_ctrl_c_ends_a_reply_of_the_chat_and_memory_holds_the_tokens_that_came(bundle: Path, tmp_path: Path) -> None:
    with chat(bundle, "--tokens", 10**6) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("def f(é):\n")
        process.stdin.flush()
        assert process.stdout.read(len("> ") + 40).startswith("> "), "it is in the middle of a reply"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(f"/save {tmp_path / 'saved'}\n", timeout=240)
    assert process.returncode == 0
    count = int(told.split()[0].strip("["))
    assert 40 <= count < 10**6
    model = txl_runtime.load(bundle)
    stream = model.stream(1)
    assert len(list(stream.generate("def f(é):\n", count, temperature=0, feed_last=True))) == count
    assert held(model, txl_runtime.StreamState.load(tmp_path / "saved")) == held(model, stream.snapshot())


def test_a_stop_text_ends_a_reply_of_the_chat(bundle: Path) -> None:
    (texts,) = zip(*txl_runtime.load(bundle).stream(1).generate("x\n", 9, temperature=0).texts(), strict=True)
    stop = "".join(texts)[3:5]
    with chat(bundle, "--tokens", 9, "--stop", stop) as process:
        said, told = process.communicate("x\n", timeout=240)
    expected = "".join(texts).partition(stop)[0]
    assert said == f"> {expected}\n> \n"
    assert told.startswith(f"[{len((expected + stop).encode())} tokens")


def test_the_embedding_sample_tells_its_errors_in_one_line(tmp_path: Path) -> None:
    result = run_sample("embed.py", tmp_path / "nothing.txl", "text")
    assert result.returncode == 2
    assert result.stderr.startswith(b"error: ")
    assert result.stderr.count(b"\n") == 1
