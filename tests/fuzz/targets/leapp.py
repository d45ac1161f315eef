"""YAML files of folders that LEAPP wrote: read as they are, or a good one after some changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from leapp_folders import two_nodes
from txl_export.families.graph.take.leapp import read_leapp

from fuzz.choices import Choices
from fuzz.edits import edited
from fuzz.targets.places import folder


def one_input(data: bytes) -> None:
    """Read a node of a folder; what is read names files that are there, and states with what they start as."""
    choices = Choices(data)
    table, document = _good()
    node = choices.pick(["", "policy", "encoder"])
    if choices.number(7) == 7:
        table.write_bytes(choices.rest())
    else:
        table.write_text(_text(edited(document, choices)))
    found = read_leapp(table.with_name(f"{table.name}:{node}") if node else table)
    assert found.path.parent == table.parent
    assert found.path.is_file()
    assert found.initial.keys() in ({*found.states}, set())
    assert found.rate is None or 0 < found.rate <= 1e9


def seeds() -> Iterator[bytes]:
    """A good file as it is, and with a change of each kind."""
    yield bytes([1, 0, 0])
    for kind in range(10):
        yield bytes([1, 0, 1, kind * 11, 0, kind, kind])
        yield bytes([2, 0, 2, kind * 7, 0, kind, 1, 255 - kind, 0, kind, 5])
    yield bytes([1, 7]) + _text(_good()[1]).encode()
    yield bytes([1, 7]) + b"a: &a [x, {b: !!python/name:os.system c}]\nb: {<<: *a}\nmodels: {policy: *a}\n"


def _text(document: Any) -> str:
    """A document as YAML: its first tables on lines of their own, as LEAPP writes them, and the rest as JSON."""
    if not isinstance(document, dict):
        return f"models: {json.dumps(document)}\n"
    return "".join(f"{key if key.isalpha() else json.dumps(key)}: {json.dumps(document[key])}\n" for key in document)


@cache
def _good() -> tuple[Path, Any]:
    """The YAML file of a good folder, and what it says."""
    table = two_nodes(folder() / "leapp") / "leapp.yaml"
    return table, yaml.safe_load(table.read_text())
