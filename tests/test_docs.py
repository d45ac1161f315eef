"""What the documents say: links lead somewhere, commands are real, figures of speech aside."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from txl_deploy.verbs import VERBS, command

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_have_the_options_they_are_shown_with(document: Path) -> None:
    for line in re.findall(r"^(?:[ \t]+\$? ?|\$ ?)txl-deploy (.+)$", document.read_text(), flags=re.MULTILINE):
        verb, *words = shlex.split(line.split("#")[0].replace("…", ""))
        if verb.startswith("-") or "|" in verb:
            continue
        assert verb in VERBS, f"{document.name}: txl-deploy {line}"
        known = {
            option for parameter in command(verb).params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        unknown = [word for word in words if word.startswith("-") and word.split("=")[0] not in known]
        assert not unknown, f"{document.name}: txl-deploy {line}"


def test_the_design_names_every_module() -> None:
    """Its trees are indented by four; the first word of a line is a file, or a folder that ends with a slash."""
    named: list[str] = []
    for tree in re.findall(
        r"^```text\n(\S+/ .*?)^```", (ROOT / "docs" / "design.md").read_text(), re.DOTALL | re.MULTILINE
    ):
        folders: list[str] = []
        for line in tree.splitlines():
            name = line.split()[0]
            folders[(len(line) - len(line.lstrip())) // 4 :] = [name]
            named += ["".join(folders)] if name.endswith(".py") else []
    packages = [
        ROOT / place for place in ("runtime/txl_runtime", "export/txl_export", "export/txl_engines", "txl_deploy")
    ]
    modules = {str(path.relative_to(ROOT)) for package in packages for path in package.rglob("*.py")}
    assert len(named) == len(set(named))
    assert {name for name in named if not name.endswith("__init__.py")} == {
        name for name in modules if not name.endswith("__init__.py")
    }
