"""The runtime in JavaScript under TypeScript's strict check of the types in its comments, and its package."""

from __future__ import annotations

import json
import re
import subprocess

from scripting import FOLDER, ROOT, RUNTIME, module, node

SOURCES = sorted(RUNTIME.rglob("*.js"))


def test_the_types_in_comments_agree() -> None:
    compiler = module("typescript/bin/tsc")
    options = ["--allowJs", "--checkJs", "--noEmit", "--strict", "--noUnusedLocals", "--module", "es2022"]
    options += [
        "--moduleResolution",
        "bundler",
        "--target",
        "es2024",
        "--lib",
        "es2024,dom,dom.iterable,dom.asynciterable",
    ]
    options += ["--types", "node", "--typeRoots", str(FOLDER / "node_modules/@types")]
    done = subprocess.run([node(), compiler, *options, *SOURCES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_file_is_checked_and_is_in_the_package() -> None:
    package = json.loads((RUNTIME / "package.json").read_text("utf-8"))
    assert package["files"] == ["index.js", "src"]
    assert len(SOURCES) > 15
    for path in SOURCES:
        assert path.read_text("utf-8").startswith("// @ts-check\n"), path.name
        assert "node:" not in path.read_text("utf-8").split("*/")[-1] or path.parent.name == "tests"


def test_its_version_is_the_project_s() -> None:
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert json.loads((RUNTIME / "package.json").read_text("utf-8"))["version"] == version
