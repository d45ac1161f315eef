"""Examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest
import txl_runtime

ROOT = Path(__file__).parents[1]
SOURCES = [(ROOT / folder, folder) for folder in ("runtime/txl_runtime", "export/txl_export", "export/txl_report")]


def modules() -> list[str]:
    """Names of the modules with an example."""
    files = [
        file for folder, _ in SOURCES for file in sorted(folder.rglob("*.py")) if ">>> " in file.read_text("utf-8")
    ]
    packages = [ROOT / "runtime", ROOT / "export"]
    return [
        ".".join(file.relative_to(package).with_suffix("").parts)
        for file in files
        for package in packages
        if file.is_relative_to(package)
    ]


@pytest.mark.parametrize("name", modules())
def test_examples(name, monkeypatch):
    monkeypatch.chdir(ROOT)  # for samples/tiny.txl
    module = importlib.import_module(name)
    known = vars(module) | {"np": np, "txl_runtime": txl_runtime}
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(verbose=False)
    for found in finder.find(module, name, globs=known):
        said: list[str] = []
        runner.run(found, out=said.append)
        assert not said, "".join(said)
    assert runner.summarize(verbose=False).attempted
