"""The wheel: builds, installs into empty environments without torch, with and without the command line, and runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from importlib.metadata import version
from pathlib import Path

import pytest
from frozen import frozen
from packaging.requirements import Requirement

from txl_deploy.page import STATIC, files

ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints.txt"
BASE = {"numpy", "msgspec", "safetensors"}
VERBS = ("inspect", "export", "build", "verify", "selftest", "generate", "score", "bench")


def run(*command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    # A random model writes any byte.
    options = {"capture_output": True, "text": True, "errors": "replace", "timeout": 280}
    result: subprocess.CompletedProcess[str] = subprocess.run([*map(str, command)], check=False, **options)
    assert not check or result.returncode == 0, result.stderr + result.stdout
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def requirements(wheel: Path) -> dict[str, dict[str, str]]:
    """Per extra ("" for none): what it adds, with the versions that are declared."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    found: dict[str, dict[str, str]] = {"": {}} | {name: {} for name in metadata.get_all("Provides-Extra", [])}
    for line in metadata.get_all("Requires-Dist", []):
        need = Requirement(line)
        asked = [extra for extra in found if need.marker is None or need.marker.evaluate({"extra": extra})]
        for extra in asked:
            if extra == "" or need.marker is not None:
                found[extra][need.name] = str(need.specifier)
    return found


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """The bin folder of an environment with one extra and nothing else."""
    venv.create(folder, with_pip=True)
    run(
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        PINS,
        f"txl-deploy[{extra}] @ file://{wheel}",
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def embedder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of an application that embeds the runtime: the runtime's dependencies and one engine."""
    return environment(tmp_path_factory.mktemp("embedder"), wheel, "cpu")


@pytest.fixture(scope="module")
def runtime_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command line where bundles only run."""
    return environment(tmp_path_factory.mktemp("runtime"), wheel, "cpu,cli")


def test_the_wheel_holds_the_four_packages_typed_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"txl_deploy", "txl_engines", "txl_export", "txl_report", "txl_runtime"}
    for package in packages:
        assert f"{package}/py.typed" in names
    others = {name for name in names if ".dist-info" not in name and not name.endswith((".py", "/py.typed"))}
    pages = {f"txl_deploy/page/static/{path.name}" for path in STATIC.iterdir()}
    pages |= {f"txl_report/templates/{path.name}" for path in (ROOT / "export/txl_report/templates").iterdir()}
    pages.add("txl_deploy/serve/front_page.html")
    plain_c = {
        f"txl_deploy/plain_c/templates/{path.name}" for path in (ROOT / "txl_deploy/plain_c/templates").iterdir()
    }
    native = {
        f"txl_runtime/native/source/{path.name}" for path in (ROOT / "runtime/txl_runtime/native/source").iterdir()
    }
    web, runtime = {"txl_deploy/web/unpack.js"}, ROOT / "runtime/js"
    web |= {
        f"txl_deploy/web/runtime/{path.relative_to(runtime)}" for path in (runtime / "index.js", *runtime.glob("src/*"))
    }
    assert others == pages | plain_c | native | web, "what pages, packages and the compiled step are made of"
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_playground_is_served_from_an_installed_package(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = "from txl_deploy.serve.playground import pages; print(pages.__file__, *pages.OPEN, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    file, *found = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert {Path(name).name for name in found} == {path.name for path in files()} - {"page.html"}


def test_an_embedder_needs_three_packages_and_an_engine(requirements: dict[str, dict[str, str]]) -> None:
    assert set(requirements[""]) == BASE
    assert set(requirements["cpu"]) == {"onnxruntime"}


def test_whoever_works_on_the_command_line_gets_it(requirements: dict[str, dict[str, str]]) -> None:
    assert set(requirements["cli"]) == {"typer", "rich"}
    without = {name for name, needs in requirements.items() if not {"typer", "rich"} <= set(needs)}
    assert without == {"", "cpu"}


def test_the_lowest_command_line_is_one_that_works(requirements: dict[str, dict[str, str]]) -> None:
    """typer 0.15 … 0.18 end every command with "Type not yet supported: typing.Literal"."""
    assert requirements["cli"] == {"typer": ">=0.19", "rich": ">=13"}


@pytest.mark.slow
def test_the_lowest_command_line_helps_with_every_verb(
    wheel: Path, requirements: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    venv.create(tmp_path, with_pip=True)
    pip = (tmp_path / "bin" / "python", "-m", "pip", "install", "--quiet")
    lowest = [f"{name}{declared.replace('>=', '==')}" for name, declared in requirements["cli"].items()]
    found = run(*pip, *lowest, *BASE, check=False)
    if found.returncode != 0:
        pytest.skip(f"no package index: {found.stderr.strip().splitlines()[-1]}")
    run(*pip, "--no-deps", wheel)
    listed = run(tmp_path / "bin" / "txl-deploy", "--help").stdout
    for verb in VERBS:
        assert f" {verb} " in listed
        assert "--json" in run(tmp_path / "bin" / "txl-deploy", verb, "--help").stdout
    wrong = run(tmp_path / "bin" / "txl-deploy", "build", tmp_path, "--target", "tpu", check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr


@pytest.mark.slow
def test_the_console_script_runs_without_torch(runtime_only: Path, tmp_path: Path) -> None:
    assert run(runtime_only / "txl-deploy", "--version").stdout.strip() == version("txl-deploy")
    assert run(runtime_only / "python", "-c", "import torch", check=False).returncode == 1
    refused = run(runtime_only / "txl-deploy", "export", tmp_path / "model.pt", check=False)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.endswith(".whl[export]'\n")


@pytest.mark.slow
def test_the_console_script_tests_a_bundle_where_there_is_no_torch(runtime_only: Path) -> None:
    run(runtime_only / "txl-deploy", "selftest", frozen("clusters"))


@pytest.mark.slow
@pytest.mark.parametrize("command", [("txl-deploy",), ("python", "-m", "txl_deploy")], ids=" ".join)
def test_the_console_script_says_what_it_lacks(embedder: Path, command: tuple[str, ...]) -> None:
    lacking = run(embedder / command[0], *command[1:], "--version", check=False)
    assert (lacking.returncode, lacking.stdout, lacking.stderr.count("\n")) == (2, "", 1)
    assert lacking.stderr.startswith("error: the command line needs typer and rich, not installed here; ")
    assert ".whl[cli]', with export in place of cli" in lacking.stderr


@pytest.mark.slow
def test_a_bundle_streams_where_there_is_only_the_runtime(embedder: Path, tmp_path: Path) -> None:
    for name in ("torch", "onnx", "typer", "rich"):
        assert run(embedder / "python", "-c", f"import {name}", check=False).returncode == 1
    state = tmp_path / "state.safetensors"
    embedded = run(
        embedder / "python", ROOT / "samples" / "embed.py", frozen("clusters"), "a", "--tokens", 3, "--state", state
    )
    assert "4 of 6 rows" in embedded.stderr
    assert state.is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_installed_sources_compile_with_a_package_alone_and_with_the_systems_compiler(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`build --target native` of an environment that has nothing on its PATH, by ziglang; then by gcc, where it is."""
    venv.create(tmp_path / "venv", with_pip=True)
    folder, path, gcc = tmp_path / "venv" / "bin", os.environ["PATH"], shutil.which("gcc")
    needed = f"txl-deploy[cpu,native] @ file://{wheel}"
    found = run(folder / "python", "-m", "pip", "install", "--quiet", "-c", PINS, needed, check=False)
    if found.returncode != 0:
        pytest.skip(f"no package index: {found.stderr.strip().splitlines()[-1]}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name, command, places in (("clang", "", str(folder)), ("gcc", "gcc", path))[: 2 if gcc else 1]:
        monkeypatch.setenv("PATH", places)
        monkeypatch.setenv("CC", command)
        bundle = shutil.copytree(frozen("int8"), tmp_path / f"{name}.txl")
        built = json.loads(run(folder / "txl-deploy", "build", bundle, "--target", "native", "--json").stdout)
        assert name in built["compiler"].lower(), built["compiler"]
        assert "a step in C" in run(folder / "txl-deploy", "selftest", bundle, "--backend", "native", "--json").stdout
        assert "backend auto takes it" in " ".join(run(folder / "txl-deploy", "inspect", bundle).stdout.split())
