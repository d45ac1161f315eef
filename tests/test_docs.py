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
