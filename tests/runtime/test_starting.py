"""Processes that this project starts: none of them stands in a folder of its user's, or imports from one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from txl_runtime.starting import APART, environment, signal_of

ROOT = Path(__file__).parents[2]
PRODUCT = [path for place in ("runtime", "export", "txl_deploy") for path in (ROOT / place).rglob("*.py")]


@pytest.fixture
def stranger(tmp_path: Path, plant: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "model.txl"
    folder.mkdir()
    plant(folder)
    monkeypatch.chdir(folder)
    return folder


def test_a_process_imports_from_where_this_one_does_and_not_from_the_users_folder(
    stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("")
    code = "import sys, numpy; print(*map(ascii, sys.path[1:]), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=APART, env=environment())
    assert done.stderr == ""
    assert [ast.literal_eval(line) for line in done.stdout.splitlines()] == list(dict.fromkeys(sys.path[1:]))


def test_every_process_is_started_so() -> None:
    """Whoever starts one says where it stands, and what it may import."""
    subprocesses = 0
    for path in PRODUCT:
        text = path.read_text(encoding="utf-8")
        assert "os.exec" not in text, path
        assert "os.spawn" not in text, path
        for node in ast.walk(ast.parse(text)) if "subprocess." in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("subprocess.run", "subprocess.Popen"):
                said = {word.arg: ast.unparse(word.value) for word in node.keywords}
                started = said.get("env"), said.get("cwd")
                assert started in (("environment()", "APART"), ("environment()", "folder")), (path, node.lineno)
                subprocesses += 1
        assert "get_context(" not in text, path
    assert subprocesses == 8


BUILD = """
import tempfile
from pathlib import Path
from txl_engines.building import BuildRequest, _run
from txl_engines.checking import Graph
from txl_runtime.bundle.tables import Program
from txl_runtime.listener import Silent

program = Program(name="p", kind="step", segment_length=1, update="replace", file="p.onnx", inputs=(), outputs=())
request = BuildRequest(target="tensorrt", size=1, file="p.onnx", program=program, gpus=(), scatters=0)
with tempfile.TemporaryFile() as said:
    graph = Graph(b"x", Path(tempfile.gettempdir()) / "p.onnx", "", {}, (), 0, 0)
    outcome = _run(request, graph, Path("absent"), Silent(), said)
    said.seek(0)
    print(outcome.failure, outcome.message or outcome.said, said.read().decode())
"""
"""Starts the process that builds an engine; where no TensorRT is, that process says so."""


def test_an_engine_is_built_where_pythonpath_names_folders_from_the_one_that_the_command_stands_in() -> None:
    """As on a machine to which everything was carried: `PYTHONPATH=SITE:.:runtime:export`, and a Python without any."""
    own = (place for place in sys.path if place and not place.startswith(sys.base_prefix))
    places = os.pathsep.join(dict.fromkeys(os.path.relpath(place, ROOT) for place in own))
    python, variables = getattr(sys, "_base_executable", sys.executable), os.environ | {"PYTHONPATH": places}
    done = subprocess.run([python, "-c", BUILD], capture_output=True, text=True, cwd=ROOT, env=variables)
    assert done.stdout.startswith(("refused tensorrt is not installed", "parse")), done.stdout + done.stderr


@pytest.mark.parametrize(("code", "name"), [(None, ""), (0, ""), (3, ""), (-9, "SIGKILL"), (-999, "")])
def test_what_ended_a_process_is_known_from_its_code(code: int | None, name: str) -> None:
    assert signal_of(code) == name
