"""The snippets of docs/javascript.md, run in Node and in Chromium as they stand there."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import browser, opened, served
from frozen import frozen
from scripting import ROOT, RUNTIME, module, node

DOCUMENT = ROOT / "docs" / "javascript.md"
INDEX = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><title>a page</title>'


def blocks(language: str) -> list[str]:
    """The page's blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def installed(folder: Path, *engines: str) -> None:
    """Put the package into a folder as `npm install` does: what `npm pack` leaves out is not there."""
    (folder / "txl-runtime").mkdir(parents=True)
    for name in ("package.json", "index.js"):
        shutil.copy(RUNTIME / name, folder / "txl-runtime")
    shutil.copytree(RUNTIME / "src", folder / "txl-runtime" / "src")
    for engine in engines:
        (folder / engine).symlink_to(module(engine))


@pytest.fixture(scope="module")
def letters(make_bundle: Callable[..., Path]) -> Path:
    return make_bundle(config={"vocab_size": 256}, vocabulary=True, batch_size=2)


def test_the_snippets_for_node_run(letters: Path, tmp_path: Path) -> None:
    installed(tmp_path / "node_modules", "onnxruntime-node")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/model.txl").symlink_to(letters)
    (tmp_path / "policy.txl").symlink_to(frozen("policy-1"))
    said = []
    for number, block in enumerate(blocks("js")):
        (tmp_path / f"{number}.mjs").write_text(block, "utf-8")
        done = subprocess.run([node(), f"{number}.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        said.append(done.stdout)
    story, policy, everything = said
    assert len(story) > 50
    assert policy == "[ 1, 1, 3 ]\n"
    assert everything.splitlines()[-1].endswith("true")


def test_the_snippet_for_a_page_runs(letters: Path, tmp_path: Path) -> None:
    installed(tmp_path, "onnxruntime-web")
    (tmp_path / "model.txl").symlink_to(letters)
    (page,) = blocks("html")
    (tmp_path / "index.html").write_text(INDEX + page, "utf-8")
    with browser() as chrome, served(tmp_path) as address, opened(chrome, f"{address}/index.html") as window:
        window.page.wait_for_function("document.getElementById('said').textContent.length >= 40")
        told: Any = window.page.text_content("#said")
        assert window.faults() == []
    assert "expected" not in told
