"""The check of docstrings and comments in `make lint`: each fault is found at its line, and good text passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from wording import faults, main

GOOD = '''"""Reads a file: another file is refused, and so many that nobody counts."""

LIMIT = 3
"""The most files."""


def size(text: str) -> int:
    """Return the size of a text, e.g. 3 for "abc"."""
    print("What a text")  # a string that is no docstring
    return len(text)
'''


def found(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [fault.removeprefix(f"{path}:") for fault in faults(path)]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"""Reads a file', '"""What reads a file', "1: begins with What; begin with a verb or a noun"),
        ('"""The most files', '"""Of files', "4: begins with Of; begin with a verb or a noun"),
        ("Return the size", "How long", "8: begins with How; begin with a verb or a noun"),
        ("  # a string", "  # Where a string", "9: begins with Where; begin with a verb or a noun"),
        ("The most files", "So many files", "4: 'So many'; name the number"),
        ("size of a text", "size of another one", "8: 'another one'; say different, second or new"),
    ],
)
def test_a_fault_in_python_is_found_at_its_line(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert found(tmp_path / "one.py", GOOD) == []
    assert GOOD.count(old) == 1
    assert found(tmp_path / "one.py", GOOD.replace(old, new)) == [fault]


def test_faults_in_c_and_javascript_are_found_in_comments_alone(tmp_path: Path) -> None:
    good = '/* Reads a file.\n * What it reads, it keeps. */\nconst char *text = "What";  // the text\n'
    assert found(tmp_path / "one.c", good) == []
    assert found(tmp_path / "one.c", "int a;\n" + good.replace("Reads a", "What reads a")) == [
        "2: begins with What; begin with a verb or a noun"
    ]
    assert found(tmp_path / "one.js", "let a;  // Whether a\n// Reads.\n// So many rows.\n") == [
        "1: begins with Whether; begin with a verb or a noun",
        "2: 'So many'; name the number",
    ]


def test_a_command_ends_with_1_where_something_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main(["tests/helpers/wording.py"]) == 0
    assert capsys.readouterr().out == "wording: nothing in 1 files\n"
    monkeypatch.setattr("wording.BEGINNING", re.compile("Finds"))
    assert main(["tests/helpers/wording.py"]) == 1
    assert capsys.readouterr().out.startswith("tests/helpers/wording.py:1: begins with Finds")
