"""Files that a forge and its tools read: workflows, forms of issues, hooks, the citation."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
READ = [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


@pytest.mark.parametrize("path", READ, ids=lambda path: path.name)
def test_it_is_yaml(path: Path) -> None:
    assert yaml.safe_load(path.read_text("utf-8"))


def test_forms_ask_for_the_version_and_for_what_inspect_says() -> None:
    for path in sorted(ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml")):
        labels = [field["attributes"]["label"] for field in yaml.safe_load(path.read_text("utf-8"))["body"]]
        assert "txl-deploy --version" in labels
        assert any("inspect" in label and "--json" in label for label in labels), path.name


def test_hooks_run_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    lint = (ROOT / "Makefile").read_text("utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    for hook in hooks:
        assert hook["entry"].split()[0].removeprefix(".venv/bin/") in lint
    assert len(hooks) == lint.count("$(BIN)/")
