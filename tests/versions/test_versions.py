"""The versions that are declared are true: the runtime and its commands run with the lowest and with the newest.

`make versions` installs them, each set into an environment of its own; these tests skip without.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from linear_graphs import HEADS, attention, drawn, plain
from linear_graphs import run as run_here
from ptys import BAR, CTRL_C, in_a_terminal

ROOT = Path(__file__).parents[2]
MADE = Path(os.environ.get("TXL_VERSIONS", ROOT / ".versions"))
FIXTURES = ROOT / "tests" / "fixtures"
OLD = FIXTURES / "release_0_8"
BUNDLES = sorted(path.parent for path in OLD.glob("*/manifest.json"))
PLAIN = ("streaming/test_sampling.py", "streaming/test_best_words.py", "bundle/test_weight_header.py", "test_ladder.py")
"""Tests of the runtime that need neither PyTorch nor a bundle made with it."""
BUILD = """
import sys, tempfile
from pathlib import Path
from txl_engines.building import BuildRequest, _run
from txl_engines.checking import Graph
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.listener import Silent

bundle = open_bundle(sys.argv[1])
program = bundle.manifest.programs[0]
request = BuildRequest(target="rtx", size=1, file="", program=program, gpus=(), scatters=0)
graph = Graph(b"x", bundle.path / "a.onnx", "", {}, (), 0, 0)
with tempfile.TemporaryFile() as said:
    outcome = _run(request, graph, Path("absent"), Silent(), said)
assert outcome.failure in ("refused", "parse"), outcome
"""
"""Starts the process that builds an engine; where no TensorRT is, that process says so."""
SETS = sorted(path.parents[1] for path in MADE.glob("*/bin/txl-deploy"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SETS, reason="no environments with other versions here; make versions"),
    pytest.mark.parametrize("made", SETS, ids=lambda path: path.name),
]


def run(made: Path, *command: object, cwd: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    program, *arguments = map(str, command)
    done = subprocess.run(
        [made / "bin" / program, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=cwd,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_old_bundles_give_what_they_gave(made: Path) -> None:
    # ONNX Runtime 1.20 has MatMulNBits of 4 bits alone.
    able = [bundle for bundle in BUNDLES if not (made.name.startswith("lowest") and bundle.name == "int8")]
    pairs = [place for bundle in able for place in (bundle, bundle.with_name(f"{bundle.name}.npz"))]
    said = run(made, "python", Path(__file__).with_name("exercise.py"), *pairs)
    print(said)
    assert all(f"{bundle.name} r" in said for bundle in able)


def test_an_engine_that_is_too_old_for_a_bundle_says_which_one_is_not(made: Path) -> None:
    """8-bit weights need ONNX Runtime 1.22; a sample has them. A ring needs 1.25."""
    tiny = ROOT / "samples" / "tiny.txl"
    if not made.name.startswith("lowest"):
        assert "passed" in run(made, "txl-deploy", "selftest", tiny)
        return
    opened = "txl.load(sys.argv[1], update=sys.argv[2] or None)"
    code = f"import sys, txl_runtime as txl\ntry: {opened}\nexcept txl.TxlError as error: print(error)"
    said = run(made, "python", "-c", code, OLD / "tokens", "ring")
    assert "expected ONNX Runtime 1.25 or newer for opset 24, and this is 1.20.0; install that, or load with up" in said
    said = run(made, "python", "-c", code, tiny, "")
    assert "expected ONNX Runtime 1.22 or newer for 8-bit weights, and this is 1.20.0; install that" in said


def test_opset_27_is_computed_as_its_plain_form_is(made: Path, tmp_path: Path) -> None:
    """ONNX Runtime 1.32 is the first that opens it."""
    if made.name.startswith("lowest"):
        pytest.skip("its ONNX Runtime does not open opset 27")
    graph = attention("gated_delta", 2, 9, decays=1, betas=HEADS)
    feeds = drawn(graph, np.random.default_rng(6))
    onnx.save(graph, tmp_path / "27.onnx")
    np.savez(tmp_path / "feeds.npz", **feeds)
    code = "import numpy, onnxruntime; one, two = onnxruntime.InferenceSession('27.onnx').run(None, {**numpy.load"
    run(made, "python", "-c", f"{code}('feeds.npz')}}); numpy.savez('found.npz', y=one, new_s=two)", cwd=tmp_path)
    for found, wanted in zip(np.load(tmp_path / "found.npz").values(), run_here(plain(graph), feeds), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_every_command_that_only_runs_a_bundle_does(made: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    run(made, "python", "-c", f"import numpy; numpy.save({str(ids)!r}, numpy.arange(40) % 41)")
    assert json.loads(run(made, "txl-deploy", "inspect", OLD / "tokens", "--json"))["kind"] == "bundle"
    assert "passed" in run(made, "txl-deploy", "selftest", OLD / "tokens")
    drawn = json.loads(
        run(made, "txl-deploy", "generate", OLD / "tokens", "--prompt-tokens", "1,2", "--max-new-tokens", 3, "--json")
    )
    assert len(drawn["tokens"]) == 3
    assert json.loads(run(made, "txl-deploy", "score", OLD / "tokens", ids, "--json"))["tokens"] == 40
    shutil.copytree(OLD / "tokens", tmp_path / "kv")
    built = run(made, "txl-deploy", "build", tmp_path / "kv", "--target", "cuda", "--force", "--json")
    assert json.loads(built)["programs"]
    for verb in ("export", "build", "verify", "bench"):
        assert "--json" in run(made, "txl-deploy", verb, "--help")


def test_no_process_runs_what_a_bundle_holds(made: Path, plant: Callable[[Path], None], tmp_path: Path) -> None:
    """Python 3.10 imports first from the folder in which a process is started."""
    bundle, texts = tmp_path / "kv", tmp_path / "texts"
    shutil.copytree(OLD / "tokens", bundle)
    texts.mkdir()
    (tmp_path / "build.py").write_text(BUILD)
    run(made, "python", "-c", "import numpy; numpy.save('ids.npy', numpy.arange(40) % 41)", cwd=texts)
    plant(bundle)
    for place, folder in ((bundle, ROOT), (Path(), bundle)):
        run(made, "python", tmp_path / "build.py", place, cwd=folder)
        scored = run(made, "txl-deploy", "score", place, texts, "--jobs", 2, "--json", cwd=folder)
        assert json.loads(scored)["documents"] == 1


@pytest.mark.parametrize("line", ["score kv ids.npy", "score kv documents", "bench kv --against none --seconds 100"])
def test_ctrl_c_ends_what_draws_a_bar(line: str, made: Path, tmp_path: Path) -> None:
    """The bar is rich's, and each of its versions writes to streams in a way of its own."""
    ids = "import numpy, sys; numpy.save(sys.argv[1], numpy.arange(1_000_000) % 41)"
    (tmp_path / "documents").mkdir()
    for file in (tmp_path / "ids.npy", tmp_path / "documents" / "0.npy"):
        run(made, "python", "-c", ids, file)
    shutil.copytree(OLD / "tokens", tmp_path / "kv")
    left = in_a_terminal([made / "bin" / "txl-deploy", *line.split()], at=BAR, press=CTRL_C, folder=tmp_path)
    assert (left.code, left.hidden, left.torn, left.settings_kept) == (130, False, [], True)
    assert left.lines[-2:] == ["error: interrupted", ""]


def test_the_runtimes_own_tests_pass(made: Path) -> None:
    able = [ROOT / "tests" / "runtime" / name for name in PLAIN]
    options = ["-q", "-c", os.devnull, "--rootdir", ROOT, "--noconftest", "-m", "not slow", "-p", "no:cacheprovider"]
    options += ["-o", f"pythonpath={ROOT / 'tests'} {ROOT / 'tests' / 'helpers'}"]
    print(run(made, "python", "-m", "pytest", *options, "--import-mode=importlib", *able)[-200:])
