"""Somebody without rights: another user, an installation that cannot be written, no HOME, no environment at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from frozen import frozen

from txl_deploy import verbs

NOBODY = 65534
ROOT = Path(verbs.__file__).parents[1]
BUNDLE = frozen("0.8/tokens")
PLACES = [sysconfig.get_path("purelib"), *(ROOT / name for name in ("", "export", "runtime"))]
"""The folders that a system's Python, which anybody may run, imports from."""


def as_nobody(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command as a user who owns nothing, in an empty environment but for where to import from."""
    found = [f"PYTHONPATH={os.pathsep.join(map(str, PLACES))}"]
    user = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
    line = [*map(str, ["setpriv", *user, "env", "-i", *found, *command])]
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd="/")


@pytest.fixture(scope="module")
def python() -> str:
    """A Python of this version that another user may run, and that may read this project."""
    found = shutil.which(f"python3.{sys.version_info[1]}", path="/usr/bin:/usr/local/bin")
    if os.name != "posix" or os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can become another user")
    if found is None:
        pytest.skip("this version of Python is installed for one user alone")
    if as_nobody(found, "-c", "import txl_deploy, numpy").returncode:
        pytest.skip("another user may not read this checkout")
    return found


@pytest.fixture
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.arange(40, dtype=np.int32) % 41)
    for folder in path.parents:
        if folder.stat().st_uid == os.geteuid() and "pytest" in str(folder):
            folder.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "line",
    [
        ("inspect", BUNDLE, "--json"),
        ("selftest", BUNDLE, "--json"),
        ("generate", BUNDLE, "--prompt-tokens", "1,2", "--max-new-tokens", "2", "--json"),
        pytest.param(("score", BUNDLE, "IDS", "--json"), marks=pytest.mark.slow),
        pytest.param(("--help",), marks=pytest.mark.slow),
    ],
    ids=lambda line: line[0],
)
def test_a_user_who_may_write_nowhere_runs_a_bundle(python: str, ids: Path, line: tuple[object, ...]) -> None:
    done = as_nobody(python, "-m", "txl_deploy", *(ids if word == "IDS" else word for word in line))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert line == ("--help",) or json.loads(done.stdout)


@pytest.mark.parametrize("verb", ["build", pytest.param("export", marks=pytest.mark.slow)])
def test_a_user_who_may_write_nowhere_is_told_so(python: str, verb: str) -> None:
    """Nothing is left behind, and nothing is tried for long."""
    on = [BUNDLE, "--target", "cuda", "--force"] if verb == "build" else [BUNDLE / "weights.safetensors"]
    done = as_nobody(python, "-m", "txl_deploy", verb, *on)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "defect" not in done.stderr
