"""The counts of a checkout's lines, imports, arrows, circles, and questions about the kind of model."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import house
import pytest


def checkout(folder: Path, **modules: str) -> Path:
    """A tree of packages; `a__b` is module a.b, and folders get an empty `__init__`."""
    for name, text in modules.items():
        *parts, last = name.split("__")
        place = folder / {"txl_runtime": "runtime", "txl_deploy": "."}.get(parts[0], "export")
        for part in parts:
            place /= part
            place.mkdir(parents=True, exist_ok=True)
            (place / "__init__.py").touch()
        (place / f"{last}.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ('if program.update == "ring": pass', ["rule"]),
        ('usable = [r for r in rules if r != "ring" or ring]', ["rule", "flag"]),
        ('same = update in ("rolled", "replace")', ["rule"]),
        ('match update:\n    case "ring": pass\n    case "rolled" | "replace": pass', ["rule"] * 3),
        ('x = 1 if program.kind == "step" else 2', ["kind"]),
        ('rows = "fill" in manifest.counters', ["rows"]),
        ("x = m.memory_length if m.counters else None", ["rows"]),
        ('if manifest.family_name == "transformer_xl": pass', ["family"]),
        ("steps = loop if isinstance(loop, StepState) else None", ["class"]),
        ("if not self._counts_rows: pass", ["flag"]),
        ("if is_transformer_xl(model.manifest): pass", ["flag"]),
        ('table = m.states_of("rolled") or states', ["lookup"]),
        ('kinds = {"ring": Ring, "rolled": Rolled}', ["table"]),
        # Code that asks nothing, or asks about a property:
        ('states = manifest.states_of("rolled")', []),
        ('if manifest.streams == "lockstep" or program.open_batch: pass', []),
        ('if "fill" in roles: pass', []),
        ("if isinstance(tokens, Mapping): pass", []),
        ('names = {"ring": 1}', []),
    ],
)
def test_a_question_about_the_kind_of_model_is_known_by_its_form(text: str, forms: list[str]) -> None:
    assert sorted(form for _, form in house.questions(ast.parse(text))) == sorted(forms)


def test_lines_of_code_are_those_without_comments_and_docstrings() -> None:
    text = '"""A module.\n\nOf several lines.\n"""\n\n# why\nx = 1  # a number\n"""What it is."""\n'
    text += 'y = """two\n\nlines"""\n'
    assert house.code_lines(text, ast.parse(text)) == 4


def test_what_is_no_python_of_the_product_is_counted_by_its_kind(tmp_path: Path) -> None:
    checkout(tmp_path, txl_runtime__model="x = 1\n")
    cpp, pages = ["runtime/cpp/src/a/b.cpp", "runtime/cpp/include/txl.h"], ["docs/a.md", "A.md"]
    files = [*cpp, "txl_deploy/page.js", "tests/a/test_b.py", *pages, "runtime/cpp/src/CMakeLists.txt"]
    for number, name in enumerate(files, 1):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n" * number)
    told = {name: lines for name, lines in house.counted(tmp_path).beside.items() if lines}
    assert told == {"C++, src and include": 3, "JavaScript of pages": 3, "tests, Python": 4, "docs": 11}


def test_two_checkouts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = checkout(tmp_path / "old", txl_runtime__model='a = rule == "ring"\nb = 2\n')
    new = checkout(tmp_path / "new", txl_runtime__model="a = 1\n")
    monkeypatch.setattr(sys, "argv", ["house.py", str(old), str(new)])
    assert house.main() == 0
    told = capsys.readouterr().out
    assert "| code lines, runtime/root | 2 | 1 | -1 |" in told
    assert "| questions, in all | 1 | 0 | -1 |" in told
    monkeypatch.setattr(sys, "argv", ["house.py", str(old), "--json"])
    house.main()
    assert json.loads(capsys.readouterr().out)["checkout"]["figures"]["questions of form rule"] == 1
