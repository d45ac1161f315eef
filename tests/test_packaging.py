"""The wheel: builds, installs into an empty environment without torch, and runs there."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    options = {
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "timeout": 280,
    }  # a random model writes any byte
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
def runtime_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the runtime's dependencies and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    pins = ROOT / "constraints.txt"
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", pins, f"txl-deploy[cpu] @ file://{wheel}")
    return folder / "bin"


def test_the_wheel_holds_the_three_packages_typed_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"txl_deploy", "txl_export", "txl_runtime"}
    for package in packages:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_console_script_runs_without_torch(runtime_only: Path, tmp_path: Path) -> None:
    assert run(runtime_only / "txl-deploy", "--version").stdout.strip() == version("txl-deploy")
    assert run(runtime_only / "python", "-c", "import torch", check=False).returncode == 1
    refused = run(runtime_only / "txl-deploy", "export", tmp_path / "model.pt", check=False)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "pip install 'txl-deploy[export]'" in refused.stderr


@pytest.mark.slow
def test_a_bundle_streams_where_there_is_no_torch(
    runtime_only: Path, make_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = make_bundle(config={"vocab_size": 256}, vocabulary=True)
    run(runtime_only / "txl-deploy", "selftest", bundle)
    state = tmp_path / "state.safetensors"
    embedded = run(runtime_only / "python", ROOT / "samples" / "embed.py", bundle, "a", "--tokens", 3, "--state", state)
    assert "4 of 7 rows" in embedded.stderr
    assert state.is_file()
