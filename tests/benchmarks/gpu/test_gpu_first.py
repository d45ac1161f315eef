"""The first contact with a GPU: one command whose steps cannot hurt each other, and which is rehearsed whole."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_check
import gpu_costs
import gpu_items
import gpu_page
import gpu_worker
import numpy as np
import pytest
from gpu_items import Item
from gpu_journal import Found, Journal
from stand_ins.cuda import open_built
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device
from txl_engines import given_weights, rounded_weights
from txl_runtime import load
from txl_runtime.bundle.engines.files import bundle_engines, find_engines
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import choosing
from txl_runtime.device.engines import fitting
from txl_runtime.device.gpu import gpu_name
from txl_runtime.selftest import run_selftest

pytestmark = pytest.mark.device

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks" / "gpu"
BUNDLES = sorted((FOLDER / "bundles").glob("*.txl"))
SCRIPT = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
from gpu_journal import Journal
folder = Path(sys.argv[sys.argv.index("--out") + 1])
journal = Journal(Path(__file__).stem, folder)
if sys.argv[1] == "nothing":
    sys.exit(0)
journal.run("first", lambda: {{"page": (folder.parents[1] / "gpu_check.md").read_text().count("| first | ok |")}})
if sys.argv[1] == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if sys.argv[1] in ("hang", "leave"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "child").write_text(str(child.pid))
if sys.argv[1] == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
if sys.argv[1] == "interrupt":
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
sys.exit(9 if sys.argv[1] == "nine" else 0)
"""
"""A program that notes a step, with how many such steps the page had by then, and then behaves as it is told."""


@pytest.fixture
def contact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any], str, Path]]:
    """Run the check with programs that behave as named, as if there were a GPU."""
    (tmp_path / "program.py").write_text(SCRIPT.format(folder=str(FOLDER)))
    monkeypatch.setattr(gpu_items, "HERE", tmp_path)
    monkeypatch.setattr(gpu_items, "PATIENCE", 0.3)
    for module in (gpu_items, gpu_page):
        monkeypatch.setattr(module, "gpu_name", lambda: "Fake RTX, SM 86")
    monkeypatch.setattr(gpu_page, "FACTS", (("no-such-program",),))

    def run(*items: Item | str, options: Sequence[str] = ()) -> tuple[int, dict[str, Any], str, Path]:
        made = [program(item) if isinstance(item, str) else item for item in items]
        monkeypatch.setattr(gpu_items, "_first_contact", lambda _: list(made))
        out = tmp_path / "out"
        code = gpu_check.main(["--out", str(out), *options])
        document = json.loads((out / "gpu_check.json").read_text())["results"]
        found = {item["name"]: {step["name"]: step for step in item["steps"]} for item in document["programs"]}
        return code, found, (out / "gpu_check.md").read_text(), tmp_path / "out.tar.gz"

    return run


def program(how: str, limit: float | None = None, *, needs: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> Item:
    return Item("program", "", "", 2, Path("none.txl"), how, (*before, "program.py", how), limit, needs)


def test_its_order_is_that_of_what_it_tells_and_its_limits_fit_ten_minutes() -> None:
    given = gpu_check.parsed([])
    items = gpu_items.plan(given)
    assert [item.name for item in items] == [
        *("smoke", "exercise", "exercise-fp16", "sanitizer", "host", "nodes"),
        *("export-fp32-b1", "rtx-fp32-b1", "rtx-alone-fp32-b1", "cuda-fp32-b1"),
        *("torch-fp32-b1", "torch-compiled-fp32-b1"),
    ]
    assert [item.name for item in items if item.behind] == ["export-fp32-b1"]
    assert sum(item.limit or 0 for item in items) < given.budget - 60, "PyTorch compiled has a minute in any case"
    assert given.budget + 2 * gpu_items.PATIENCE + 20 <= 600
    assert [item.name for item in items if item.limit is None] == ["torch-compiled-fp32-b1"]
    scripts = {word for item in items for word in item.command if word.endswith(".py")}
    assert all((FOLDER / name).is_file() for name in scripts)


def test_a_crash_a_hang_and_a_status_are_each_one_s_own(contact: Callable[..., Any]) -> None:
    items = ("good", "leave", "crash", program("hang", 1.5), "nothing", "nine")
    started = time.monotonic()
    code, found, page, archive = contact(*items)
    assert code == 1
    assert time.monotonic() - started < 50, "the hanging one sleeps for so long"
    assert {name: [step["state"] for step in steps.values()] for name, steps in found.items()} == {
        "good": ["ok"],
        "leave": ["ok"],
        "crash": ["ok", "FAILED"],
        "hang": ["ok", "ended"],
        "nothing": ["FAILED"],
        "nine": ["ok", "FAILED"],
    }
    assert [steps["first"]["figures"]["page"] for steps in found.values() if "first" in steps] == [0, 1, 2, 3, 4]
    assert found["crash"]["crash"]["reason"] == "the process ended with signal SIGSEGV"
    assert found["hang"]["hang"]["reason"] == "stopped: it took longer than 1.5 s"
    assert found["nine"]["nine"]["reason"] == "the process ended with code 9"
    assert "hang: hang ended: stopped: it took longer than 1.5 s" in page
    for name in ("hang", "leave"):
        child = int((archive.parent / "out" / "steps" / name / "child").read_text())
        state = Path(f"/proc/{child}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z", "what it started is ended as well"


def test_what_is_missing_is_said_and_the_rest_runs(
    contact: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_items, "SANITIZERS", "/nonexistent")
    checked = program("checked", before=(gpu_items.SANITIZER, "--error-exitcode", "9"))
    code, found, page, _ = contact(program("odd", needs=("numpy", "no_such_package")), checked, "good")
    assert code == 0
    assert list(found) == ["good"]
    assert "* odd: not run: it needs no-such-package; put what is missing into --site" in page
    assert "* checked: not run: compute-sanitizer is neither on PATH" in page


def test_a_python_without_any_package_is_told_so_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", FOLDER / "gpu_check.py", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("gpu_check.py: error: numpy, msgspec missing, expected here or in")


def test_ctrl_c_and_the_budget_end_it_with_what_there_is(
    contact: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(gpu_items, "WORKER", tmp_path / "worker.py")
    (tmp_path / "worker.py").write_text("import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    behind = Item("export", "", "fp32", 1, tmp_path / "m.txl", behind=True)
    try:
        code, found, page, archive = contact("good", "interrupt", behind, "late")
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == gpu_check.INTERRUPTED
    assert found["good"]["first"]["state"] == "ok"
    assert found["interrupt"]["interrupt"]["reason"] == "interrupted"
    assert "late: not run: interrupted" in page
    assert archive.exists()
    said = (tmp_path / "out" / "steps" / "export-fp32-b1.log").read_text()
    assert not said or not Path(f"/proc/{said.strip()}").exists(), "what ran behind is ended"
    code, found, page, _ = contact(program("hang"), "late", options=("--budget", "2"))
    assert code == 1
    assert found["hang"]["hang"]["reason"] == "stopped: the budget of 2 s was spent"
    assert "late: not run: the budget of 2 s was spent" in page


def test_a_failing_export_costs_nothing_else(contact: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu_items, "WORKER", tmp_path / "worker.py")
    (tmp_path / "worker.py").write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\nfrom pathlib import Path\nfrom gpu_journal import Journal\n"
        "kind, given = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "journal = Journal(given['--name'], Path(given['--out']))\n"
        "if kind == 'export': journal.run('export', lambda: {}['no such operator'])\n"
        "else: [journal.run(name, dict) for name in ('open', 'decode', 'draw', 'score')]\n"
    )
    large = [Item(kind, engine, "fp32", 1, tmp_path / "m.txl") for kind, engine in (("export", ""), ("torch", "torch"))]
    code, found, page, archive = contact(*large, "good")
    assert code == 1
    assert found["good"]["first"]["state"] == "ok"
    assert "export-fp32-b1: export FAILED: KeyError: 'no such operator'" in page
    assert "| 1 | fp32 | torch | – | ok |" in page
    with tarfile.open(archive) as tar:
        assert {"out/gpu_check.md", "out/gpu_check.json", "out/machine.txt"} <= set(tar.getnames())
        assert "out/steps/good/program.jsonl" in tar.getnames()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_plan_for_a_machine_without_a_network_fits_what_such_a_machine_gives() -> None:
    """900 seconds with 90 of its start, 600 a command, and 64 MiB a call with the checkout, all as the page says."""
    page = (ROOT / "docs" / "gpu-check.md").read_text()
    (plan,) = re.findall(r"^## A machine without a network\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    budgets = [int(seconds) for seconds in re.findall(r"--budget (\d+)", plan)]
    assert budgets == [300, 210]
    assert 90 + sum(budgets) + 3 * 30 + 150 <= 900, "each call may take half a minute more, and something fails"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tree = sum((ROOT / name).lstat().st_size for name in listed.split("\0") if (ROOT / name).exists())
    (mib,) = re.findall(r"choices=range\(1, 1025\).*default=(\d+)", (FOLDER / "carry.py").read_text())
    assert tree + int(mib) * 2**20 + 2**20 < 64 * 2**20


def test_the_archive_has_results_only_and_of_a_long_file_its_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "steps" / "one").mkdir(parents=True)
    (out / "bundles" / "m.txl").mkdir(parents=True)
    (out / "bundles" / "m.txl" / "weights.safetensors").touch()
    (out / "gpu_check.md").write_text("page")
    (out / "steps" / "one" / "a.jsonl").write_text("{}")
    (out / "steps" / "one.log").write_text("x" * 2**20 + "the end")
    with tarfile.open(gpu_page.pack(out)) as tar:
        assert tar.getnames() == ["out/gpu_check.md", "out/steps/one/a.jsonl", "out/steps/one.log"]
        log = tar.extractfile("out/steps/one.log")
        assert log is not None
        data = log.read()
    assert len(data) == gpu_page.LARGEST
    assert data.endswith(b"the end")


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.name)
def test_the_carried_bundles_are_whole_and_pass_their_self_test(path: Path) -> None:
    model = load(path, backend="cpu", threads=1)
    result = run_selftest(model)
    result.require()
    assert ("rows" in result.limits) == (model.manifest.precision == "fp16"), "made before the self-test judged rows"
    assert {"ring", "rolled"} <= set(model.manifest.updates)


def test_the_host_s_cost_is_that_of_copies_and_records_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_costs, "CALLS", 5)
    for update in ("ring", "rolled"):
        for recordable, said in ((True, "recorded"), (False, "by the engine")):
            driver = FakeDriver(seed=0)
            monkeypatch.setattr(gpu_costs, "open_cuda", lambda driver=driver: open_fake_device(driver))
            found = gpu_costs.host(BUNDLES[0], update, recordable, 0.0)
            assert found["µs"] > 0
            assert said in found["recorded"]
            assert (driver.replayed > 5) == recordable
            driver.check()


def test_a_node_costs_the_difference_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, seen = FakeDriver(seed=0), list[int]()
    monkeypatch.setattr(gpu_costs, "open_cuda", lambda: open_fake_device(driver))

    def median(work: Callable[[], object]) -> float:
        before = len(driver.log)
        work()
        seen.append(len(driver.log) - before)
        return 7.0 + 2.0 * seen[-1]

    monkeypatch.setattr(gpu_costs, "median_us", median)
    found = gpu_costs.nodes()
    assert seen == list(gpu_costs.NODES), "every memset is a node, and is done"
    assert found["µs per node"] == 2.0
    assert found["123 nodes µs"] == 253.0
    driver.check()


def timed(path: Path, folder: Path, engine: str) -> dict[str, Found]:
    """Return the worker's steps of an engine in a first contact."""
    given = argparse.Namespace(bundle=path, engine=engine, update="none", segments=0, seconds=0.01)
    journal = Journal(engine, folder)
    gpu_worker.engine(journal, given)
    found = {step.name: step for step in journal.found}
    assert {name: step.reason for name, step in found.items() if step.state != "ok"} == {
        "verify": f"--engine {engine.partition('-')[0]} does, alone"
    }
    return found


def test_rtx_is_timed_with_records_of_the_loop_and_its_own_and_with_weights_shared_and_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform")
    monkeypatch.setattr(given_weights, "LEAST_BYTES", 256)
    monkeypatch.setattr(fitting, "gpu_name", lambda: "Fake RTX, SM 86")
    shared: list[bool] = []

    def open_device(_: str, bundle: Any, rule: str | None) -> Any:
        shared.append(any(engine.sidecar.identity.given for engine in find_engines(bundle, "rtx")))
        return open_built(bundle.path, update=rule)[0]

    monkeypatch.setattr(choosing, "open_device", open_device)
    path = Path(shutil.copytree(BUNDLES[0], tmp_path / "a.txl"))
    monkeypatch.setattr(rounded_weights, "LEAST", 256)
    engines = ("rtx", "rtx-alone", "rtx-own", "rtx-int8")
    said = [set(timed(path, tmp_path, engine)["score"].figures["recorded"].values()) for engine in engines]
    assert said == [{"recorded"}, {"by the engine"}, {"recorded"}, {"recorded"}]
    assert shared == [True, True, False, True]
    assert {sidecar.identity.rounding for _, sidecar in bundle_engines(open_bundle(path))} == {"int8"}


@pytest.mark.filterwarnings("ignore")  # the compiler's own deprecations
def test_pytorch_runs_a_model_that_could_not_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_competitors

    from benchmarks.shared.models import shape

    monkeypatch.setattr(gpu_competitors, "weights_of_bundle", gpu_competitors.weights_of_bundle)  # put back afterwards
    monkeypatch.setattr(gpu_worker, "large", lambda vocabulary: shape(2, 16, 2, 8, 32, vocabulary))
    monkeypatch.setattr(gpu_worker, "LENGTH", 4)
    bundle = gpu_worker.unexported(argparse.Namespace(vocabulary=60, batch=2, memory=8))
    tokens = np.zeros((bundle.manifest.batch_size, bundle.manifest.segment_lengths[0] + 1), np.int32)
    forms = (gpu_competitors.EAGER, gpu_competitors.RELEASED)
    rivals = [gpu_competitors.TorchOnGpu(bundle, form, "cpu") for form in forms]
    assert gpu_competitors.compare(*rivals, tokens)["max_abs"] < 1e-4
    assert np.isfinite(rivals[0].score(tokens)).all()


PACKAGES = """torch torchgen functorch numpy numpy.libs msgspec typing_extensions.py sympy mpmath filelock jinja2
markupsafe networkx fsspec onnx onnxruntime safetensors ml_dtypes google flatbuffers packaging"""
"""The packages that PyTorch brings, and those that interpret and compare programs; nothing that exports."""


@pytest.mark.slow
@pytest.mark.skipif(not (Path(sys.base_prefix) / "bin" / "python3").exists(), reason="no Python without packages here")
def test_the_first_contact_is_rehearsed_on_the_stand_in(tmp_path: Path) -> None:
    image, hook, elsewhere = (tmp_path / name for name in ("image", "hook", "elsewhere"))
    for folder in (image, hook, elsewhere):
        folder.mkdir()
    for name in PACKAGES.split():
        found = Path(np.__file__).parents[1] / name
        if found.exists():
            (image / name).symlink_to(found)
    own = [str(ROOT / "tests"), str(FOLDER), *map(str, gpu_check.OWN)]
    lines = ["import sys", f"sys.path += {own!r}", "from stand_ins.rehearsing import stand_in", "stand_in()"]
    (hook / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    sanitizer = hook / gpu_items.SANITIZER
    sanitizer.write_text('#!/bin/sh\nshift 2\n"$@" || exit 9\necho "========= ERROR SUMMARY: 0 errors"\n')
    sanitizer.chmod(0o755)
    alone = ["unshare", "-n"] if shutil.which("unshare") else []
    if alone and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        alone = []  # only root may leave the network, on some systems
    environment = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    environment |= {"PATH": f"{hook}:{os.environ['PATH']}", "PYTHONPATH": f"{hook}:{image}", "OMP_NUM_THREADS": "1"}
    command = [*alone, str(Path(sys.base_prefix) / "bin" / "python3"), str(FOLDER / "gpu_check.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, cwd=elsewhere, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(elsewhere / "gpu-check.tar.gz") as tar:
        tar.extractall(tmp_path / "home", filter="data")
    results = json.loads((tmp_path / "home" / "gpu-check" / "gpu_check.json").read_text())["results"]
    assert results["finished"]
    states = {item["name"]: {step["state"] for step in item["steps"]} for item in results["programs"]}
    assert states == {"smoke": {"ok", "not run"}} | {
        name: {"ok"} for name in ("exercise", "exercise-fp16", "sanitizer", "host", "nodes")
    }
    absent = "-fp32-b1: not run: it needs onnx-ir, onnxscript; put what is missing into --site"
    assert results["left_out"] == [
        "smoke: PyTorch's device not run: PyTorch was built without CUDA",
        f"export{absent}",
        *(f"{name}-fp32-b1: not run: its bundle was not exported" for name in ("rtx", "rtx-alone", "cuda")),
        f"torch{absent}",
        f"torch-compiled{absent}",
    ]
    assert (elsewhere / "gpu-check.tar.gz").stat().st_size < 2**20
    assert not list((FOLDER / "bundles").rglob("*.engine")), "engines are built into copies"


@pytest.mark.slow
@pytest.mark.skipif(gpu_name() is not None, reason="there is a GPU here")
@pytest.mark.skipif(not (Path(sys.base_prefix) / "bin" / "python3").exists(), reason="no Python without packages here")
def test_the_page_s_commands_do_what_they_say_as_typed(tmp_path: Path) -> None:
    """In a folder elsewhere, without packages that serve or are a command line, as far as it goes without a GPU."""
    home, tools, elsewhere = (tmp_path / name for name in ("home", "tools", "elsewhere"))
    for folder in (home, tools, elsewhere / "wheels"):
        folder.mkdir(parents=True)
    (home / "txl-deploy").symlink_to(ROOT)
    packages, base = Path(np.__file__).parents[1], Path(sys.base_prefix) / "bin" / "python3"
    for name in ("httpx2", "starlette", "uvicorn", "prometheus_client", "typer", "rich"):
        (tools / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name={name!r})\n")
    (tools / "python3").write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tools}:{packages}" exec {base} "$@"\n')
    (tools / "python3").chmod(0o755)
    (elsewhere / "wheels" / "own").write_text("instead of what is downloaded")
    (home / "site").mkdir()  # what pip makes at home
    page = (ROOT / "docs" / "gpu-check.md").read_text()
    lines = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    typed = [line for line in lines if "-m pip" not in line and "--prepare" not in line]
    assert len(lines) - len(typed) == 3
    assert all(line.startswith(("python3 $TXL/", "python3 -m pytest", "export ")) for line in typed)
    script = "\n".join(f"{line}\necho done: $?" for line in typed)
    environment = {"HOME": str(home), "PATH": f"{tools}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=280, check=False, cwd=elsewhere, env=environment
    )
    assert done.stdout.count("done: 0") == len(typed) == done.stdout.count("done: "), done.stdout + done.stderr
    assert (home / "site" / "own").is_file()
    assert {path.name for path in elsewhere.glob("*.tar.gz")} == {
        f"{name}.tar.gz" for name in ("gpu-check", "first", "cuda", "batch-1", "half")
    }
    assert " skipped" in done.stdout
    assert "error" not in done.stdout.lower(), done.stdout
