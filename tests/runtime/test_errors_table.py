"""The table of errors in docs/runtime.md has a part of every message about a bundle, and no part that none has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FEW = 8
"""Letters of a message's own words below which it only passes on what a different message says."""


def messages() -> list[str]:
    """The texts given to `BundleError` in the runtime, with … where values stand."""
    found = []
    for file in sorted((ROOT / "runtime" / "txl_runtime").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "BundleError":
                found.append(_text(node.args[0]))
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_refused" and node.args[1:]:
                found.append(_text(node.args[1]))
    return [text for text in found if len(re.findall("[a-z]", text.rpartition("; ")[0] or text)) >= FEW]


def _text(node: ast.expr) -> str:
    values = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(value.value) if isinstance(value, ast.Constant) else "…" for value in values)


def parts() -> list[str]:
    """The quoted parts in the table."""
    text = (ROOT / "docs" / "runtime.md").read_text("utf-8")
    table = text.partition("| the message says |")[2].partition("\n\n")[0]
    return [part for line in table.splitlines()[2:] for part in re.findall("`([^`]+)`", line.split("|")[1])]


def test_every_message_has_its_row():
    assert [text for text in messages() if not any(part in text for part in parts())] == []


def test_every_part_is_of_a_message():
    assert [part for part in parts() if not any(part in text for text in messages())] == []
