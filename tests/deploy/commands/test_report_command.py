"""`txl-deploy report`: what it prints, what it refuses, its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from step_models import counting, recurrent
from support import Called

Run = Callable[..., Called]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small bundle in an empty folder."""
    recurrent().write(tmp_path / "step.txl")
    monkeypatch.chdir(tmp_path)


def test_the_page_goes_into_the_current_folder(run: Run):
    code, out, err = run("report", "step.txl")
    assert code in (0, None)
    assert Path("report.html").read_text().startswith("<!DOCTYPE html>")
    assert "report.html" in out
    assert "speed" in out
    assert "write the page" in err
    code, _, err = run("report", "step.txl")
    assert code == 2
    assert "add --force" in err
    code, _, _ = run("report", "step.txl", "--force")
    assert code in (0, None)


def test_json_says_what_the_page_has(run: Run):
    _, out, _ = run("report", "step.txl", "-o", "page.html", "--json")
    document = json.loads(out)
    assert document["path"] == "page.html"
    assert document["bytes"] == Path("page.html").stat().st_size
    sections = {section["name"]: section for section in document["sections"]}
    assert list(sections)[:4] == ["model", "same", "memory", "context"]
    assert sections["model"]["present"]
    assert not sections["speed"]["present"]
    assert sections["speed"]["missing"]


@pytest.mark.parametrize(
    "wrong",
    ["--bench list.json", "--verify list.json", "--bench no.json", "--tokens list.json", "--text no.txt", "--context"],
)
def test_what_cannot_be_used_leaves_nothing(run: Run, wrong: str):
    Path("list.json").write_text("[]")
    code, out, err = run("report", "step.txl", *wrong.split())
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert not Path("report.html").exists()


def test_token_ids_come_from_a_file(run: Run):
    counting().write(Path("other.txl"))
    np.save("ids.npy", np.zeros((2, 2), np.float32))
    code, _, err = run("report", "other.txl", "--tokens", "ids.npy")
    assert code == 2
    assert "ids.npy" in err
