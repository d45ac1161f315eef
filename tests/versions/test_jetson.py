"""The page on Jetsons, typed line by line: on Python 3.10 without PyTorch, offline, with TensorRT as a stand-in.

What only a Jetson, a network or a PC with PyTorch has is a function of the shell here: `sudo`, `scp` and the export.
The wheelhouse is for this machine's processor in place of aarch64.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stand_ins import jetpack
from support import typed
from versions.environments import OLDEST, build_wheel, pythons

ROOT = Path(__file__).parents[2]
MADE = Path(os.environ.get("TXL_VERSIONS", ROOT / ".versions")) / f"lowest-3.{OLDEST}"
SITE = Path("lib") / f"python3.{OLDEST}" / "site-packages"
BUNDLE = ROOT / "tests" / "fixtures" / "release_0_8" / "half"
PAGE = (ROOT / "docs" / "jetson.md").read_text()
PC = 'txl-deploy() {{ cp -r {bundle} model.txl; }}\nscp() {{ cp "${{@:1:$#-1}}" {jetson}; }}\n'
JETSON = "sudo() { :; }\n"


def part(heading: str) -> str:
    """Return the lines that are typed in one part of the page, as a script."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    lines = typed(text)
    assert lines
    return "\n".join(["set -eu", *lines, ""])


def bash(script: str, cwd: Path, code: int = 0, **variables: str) -> str:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_FIND", "PIP_CONS", "PYTHON"))
    }
    kept |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | variables
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=200, check=False, cwd=cwd, env=kept
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def first_on_path(*places: Path) -> str:
    return os.pathsep.join([*map(str, places), os.environ["PATH"]])


@pytest.fixture(scope="module")
def jetson(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The Jetson as the page has it before anything is built, and the variables of its user."""
    base = pythons().get(OLDEST)
    if base is None or not (MADE / SITE / "onnxruntime").exists():
        pytest.skip(f"no Python 3.{OLDEST} with the lowest versions here; make versions")
    pc, device, system = (tmp_path_factory.mktemp(name) for name in ("pc", "jetson", "system"))
    build_wheel(pc)
    on_the_pc = PC.format(bundle=BUNDLE, jetson=device) + part("On the PC").replace("aarch64", platform.machine())
    try:
        bash(on_the_pc, pc, PATH=first_on_path(Path(sys.executable).parent))
    except AssertionError as error:
        if "No matching distribution" in str(error) or "Could not find a version" in str(error):
            pytest.skip("no package index: the packages cannot be downloaded")
        raise
    # Packages of the user are seen where those of the system are: by Python itself, and with --system-site-packages.
    jetpack.place(system / SITE, MADE / SITE)
    old = system / SITE / "numpy-1.21.5.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.21.5\n")
    (system / SITE / "numpy.py").write_text("raise ImportError('the old NumPy of the system')\n")
    (system / "bin").mkdir()
    (system / "bin" / "python3").symlink_to(base)
    variables = {"PATH": first_on_path(system / "bin"), "PYTHONUSERBASE": str(system)}
    bash(JETSON + part("On the Jetson, once"), device, **variables)
    return device, variables | {jetpack.VERSION: "trt10.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("version", list(jetpack.DOCUMENTED))
def test_the_page_is_typed_as_it_stands_and_what_is_refused_says_what_to_do(
    version: str, jetson: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    device, variables = jetson
    variables = variables | {jetpack.VERSION: version}
    number = jetpack.VERSIONS[version][1]
    shutil.copytree(device / "model.txl", tmp_path / "model.txl")
    enter = f". {device}/txl/bin/activate\n"
    absent = "for name in torch onnxruntime; do if python -c 'import '$name 2>/dev/null; then exit 1; fi; done\n"
    said = bash(enter + absent + part("Build, test, stream"), tmp_path, **variables)
    assert "verdict                    passed" in said
    (application,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "application.py").write_text(application)
    told, drawn = bash(enter + "python application.py 2>/dev/null", tmp_path, **variables).splitlines()
    assert (told, len(drawn.split())) == (f"tensorrt {number} on Orin, SM 87", 20)
    for sidecar in (tmp_path / "model.txl" / "engines" / "tensorrt").glob("*.json"):
        assert any("self-test" in check for check in json.loads(sidecar.read_text())["verified_on"]), sidecar

    selftest = enter + "txl-deploy selftest model.txl --backend tensorrt"
    other = next(name for name in jetpack.DOCUMENTED if name != version)
    said = bash(selftest, tmp_path, 2, **variables | {jetpack.VERSION: other})
    assert f"was built by version {number}, the library here is {jetpack.VERSIONS[other][1]}" in said
    said = bash(selftest, tmp_path, 2, **variables, PYTHONNOUSERSITE="1")  # as without --system-site-packages
    assert "tensorrt is not installed" in said
    assert "--system-site-packages" in said
    said = bash(enter + "txl-deploy verify model.txl --backend tensorrt", tmp_path, 2, **variables)
    assert "verify needs torch" in said
