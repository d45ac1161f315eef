"""The page's scripts, whose comments say their types, under TypeScript's strict check."""

from __future__ import annotations

import subprocess

from browsing import tool

from txl_deploy.page import STATIC
from txl_deploy.web.single import UNPACK

SCRIPTS = [UNPACK, *sorted(STATIC.glob("*.js"))]


def test_the_scripts_agree_with_the_types_in_their_comments():
    compiler, node = tool("node_modules/typescript/bin/tsc"), tool("playwright/driver/node")
    options = ["--allowJs", "--checkJs", "--noEmit", "--strict", "--noUnusedLocals", "--moduleResolution", "bundler"]
    options += ["--module", "es2022", "--types", ""]
    options += ["--target", "es2024", "--lib", "es2024,dom,dom.iterable,dom.asynciterable"]
    found = subprocess.run([node, compiler, *options, *SCRIPTS], capture_output=True, text=True, check=False)
    assert SCRIPTS
    assert found.returncode == 0, found.stdout
    for script in SCRIPTS:
        assert script.read_text(encoding="utf-8").startswith("// @ts-check\n"), script.name
