"""Describes a bundle's format for readers in other languages; `make published` writes it into docs.

The schema is that of the structs that this project reads manifests with, and says of a field what their docstrings say.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
from txl_runtime.bundle import manifest, tables
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Tables
from txl_runtime.guard.forms import ANY, FORMS, IR_VERSIONS, MICROSOFT, OPSETS, PLAIN

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = Path(__file__).parents[2] / "runtime/js/src/schema.js"
LARGE = 100_000
"""Bytes of manifests that are too long to be held against the schema as well; some tests make long ones."""


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a manifest of format 2."""
    found = msgspec.json.schema(Manifest)
    for name, part in found["$defs"].items():
        first, fields = _told(inspect.getdoc(vars(tables).get(name) or vars(manifest)[name]) or "")
        part["description"] = first
        for field, said in fields.items():
            part["properties"][field] = {"description": said, **part["properties"][field]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The manifest of a bundle, format 2.1; one of format 2.0 passes as well",
        **found,
    }


def forms() -> dict[str, Any]:
    """The operators that a graph may have, as plain data."""
    return {
        "title": "What a graph of a bundle may hold; the fields of a form are those of Form in guard/forms.py",
        "opsets": [*OPSETS],
        "ir_versions": [*IR_VERSIONS],
        "microsoft": MICROSOFT,
        "any": ANY,
        "plain": sorted(PLAIN),
        "forms": msgspec.to_builtins(FORMS),
    }


def cases() -> dict[str, Any]:
    """Return each change by `str.lower` as plain data, found by asking it."""
    lower, kinds = list[list[int]](), list[list[int]]()
    for code in (*range(0xD800), *range(0xE000, 0x110000)):
        character = chr(code)
        found = character.lower()
        change = ord(found) - code if len(found) == 1 else 0
        first, last, step, before = lower[-1] if lower else [0, 0, 0, 0]
        if change and change == before and code - last in ((1, 2) if first == last else (step,)):
            lower[-1] = [first, code, code - last, change]
        elif change:
            lower.append([code, code, 1, change])
        kind = 1 if (character + "Σ").lower().endswith("ς") else 2 if ("a" + character + "Σ").lower()[-1] == "ς" else 0
        if kind and kinds and kinds[-1][1:] == [code - 1, kind]:
            kinds[-1][1] = code
        elif kind:
            kinds.append([code, code, kind])
    return {
        "title": "Lower case as Python's str.lower has it; docs/bundle-format.md says how to read the table",
        "unicode": unicodedata.unidata_version,
        "lower": lower,
        "kinds": kinds,
    }


PUBLISHED: dict[str, Callable[[], Any]] = {
    "bundle-format.schema.json": schema,
    "bundle-forms.json": forms,
    "bundle-cases.json": cases,
}


def text(name: str) -> str:
    """One of these files; a list in a list is one line."""
    found = json.dumps(PUBLISHED[name](), indent=1, ensure_ascii=False) + "\n"
    return re.sub(r"(?m)^ +\[[^][]+\]", lambda inner: f"  [{', '.join(re.findall('[-0-9]+', inner[0]))}]", found)


def script() -> str:
    """The schema as a module of the runtime in JavaScript, without what it says to people."""

    def plain(part: Any) -> Any:
        if isinstance(part, list):
            return [plain(each) for each in part]
        if isinstance(part, dict):
            told = ("$schema", "title", "description")
            return {name: plain(inner) for name, inner in part.items() if name not in told}
        return part

    about = "// @ts-check\n/** The schema of manifests; `make published` writes this file. */\n"
    return f"{about}\nexport const SCHEMA = {json.dumps(plain(schema()), separators=(',', ':'))};\n"


@cache
def validator() -> Any:
    """Return a validator of manifests by the schema."""
    return jsonschema.Draft202012Validator(schema())


def holding(
    contradictions: Callable[..., Iterator[str]], seen: set[bytes]
) -> Callable[[Tables, Sequence[str], Collection[str]], Iterator[str]]:
    """`contradictions`, which then holds each new manifest that has none against the schema."""

    def checked(found: Tables, used: Sequence[str], files: Collection[str]) -> Iterator[str]:
        problem = None
        for problem in contradictions(found, used, files):
            yield problem
        data = msgspec.json.encode(found)
        key = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(found, files={}, parity={}, provenance={})))
        if problem is None and len(data) < LARGE and key.digest() not in seen:
            seen.add(key.digest())
            faults = [
                f"{error.json_path}: {error.message[:200]}" for error in validator().iter_errors(json.loads(data))
            ]
            assert not faults, f"docs/bundle-format.schema.json refuses a manifest that is read: {faults[:3]}"

    return checked


def _told(documentation: str) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and what its attributes are."""
    first, _, attributes = documentation.partition("Attributes:\n")
    fields: dict[str, str] = {}
    for names, said in re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", attributes, re.MULTILINE):
        fields |= dict.fromkeys(names.split(", "), " ".join(said.split()))
    return " ".join(first.split()), fields


if __name__ == "__main__":
    for file in PUBLISHED:
        (DOCS / file).write_text(text(file), "utf-8")
    SCRIPT.write_text(script(), "utf-8")
