"""The trained bundle of the samples: it can be loaded, is what it was, writes what looks like code, and stays small."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from txl_runtime.selftest import run_selftest

SAMPLES = Path(__file__).parents[2] / "samples"
TINY = SAMPLES / "tiny.txl"
MOST_BYTES = 1_000_000


@pytest.fixture(scope="module")
def model() -> txl_runtime.Model:
    return txl_runtime.load(TINY, threads=1)


def test_its_self_test_passes(model: txl_runtime.Model) -> None:
    assert run_selftest(model).passed


def test_it_has_learnt_what_code_looks_like_and_its_memory_helps(model: txl_runtime.Model) -> None:
    assert model.vocabulary is not None
    ids = model.vocabulary.encode((SAMPLES / "embed.py").read_bytes())[None]
    stream = model.stream(1)
    with_memory = float(stream.score(ids).mean()) / np.log(2)
    parts = []
    for first in range(0, ids.shape[1] - 1, 16):
        stream.reset()
        parts.append(stream.score(ids[:, first : first + 17]))
    without = float(np.concatenate(parts, axis=1).mean()) / np.log(2)
    assert with_memory < 3 < 8, "bits per byte; whoever knows nothing needs 8"
    assert with_memory < without - 0.3


def test_it_writes_lines_of_code(model: txl_runtime.Model) -> None:
    assert model.vocabulary is not None
    prompt = model.vocabulary.encode(b"def main(")
    drawn = model.stream(1).generate(prompt, 300, temperature=0.9, top_p=0.95, seed=1)
    text = model.vocabulary.decode(np.concatenate(list(drawn))).decode("ascii")
    assert text.count("\n") >= 5
    assert {"self", "def", "if"} & set(text.replace(".", " ").split())


def test_the_product_on_one_screen_draws_the_runtimes_tokens() -> None:
    rolled = txl_runtime.load(TINY, "cpu", threads=1, update="rolled")
    path = SAMPLES / "minimal.py"
    assert len(path.read_text().splitlines()) <= 120
    sample = runpy.run_path(str(path))
    for seed in (0, 1, 3):
        drawn = rolled.stream(1).generate("def main(", 200, temperature=0.8, seed=seed)
        tokens = [int(token[0]) for token in drawn]
        assert list(sample["draw"](sample["Minimal"](TINY), b"def main(", 200, 0.8, seed)) == tokens
        if seed == 1:
            run = subprocess.run(
                [sys.executable, path, TINY, "def main("], capture_output=True, check=True, timeout=240
            )
            assert run.stdout == bytes(tokens) + b"\n"


def test_the_screen_says_what_it_cannot_run(tmp_path: Path) -> None:
    bundles = SAMPLES.parent / "conformance" / "bundles"
    for folder in (bundles / "ring", bundles / "policy-1", tmp_path):
        run = subprocess.run([sys.executable, SAMPLES / "minimal.py", folder, "a"], capture_output=True, check=False)
        assert run.returncode == 1
        assert run.stderr.startswith(f"{folder}: expected".encode())


def test_it_is_small_and_git_leaves_its_bytes_alone() -> None:
    files = [path for path in TINY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    if shutil.which("git") is None or not (SAMPLES.parent / ".git").exists():
        pytest.skip("no git, or no checkout of it")
    command = ["git", "check-attr", "text", "--", *map(str, files)]
    said = subprocess.run(command, cwd=TINY, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == len(files)
    assert [line for line in said if not line.endswith(": text: unset")] == []
