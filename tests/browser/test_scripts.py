"""The playground's scripts, whose comments say their types, under TypeScript's strict check."""

from __future__ import annotations

import subprocess

from browsing import tool

import txl_deploy.serve.playground

SCRIPTS = sorted(txl_deploy.serve.playground.STATIC.glob("*.js"))


def test_the_scripts_agree_with_the_types_in_their_comments():
    compiler, node = tool("node_modules/typescript/bin/tsc"), tool("playwright/driver/node")
    options = ["--allowJs", "--checkJs", "--noEmit", "--strict", "--moduleResolution", "bundler", "--module", "es2022"]
    options += ["--target", "es2024", "--lib", "es2024,dom,dom.iterable,dom.asynciterable"]
    found = subprocess.run([node, compiler, *options, *SCRIPTS], capture_output=True, text=True, check=False)
    assert SCRIPTS
    assert found.returncode == 0, found.stdout
    for script in SCRIPTS:
        assert script.read_text(encoding="utf-8").startswith("// @ts-check\n"), script.name
