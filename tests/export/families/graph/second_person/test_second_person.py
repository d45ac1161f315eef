"""Files that were made, and judged, by somebody who does not know how the verifier works.

PyTorch's own exporters make each file on the fly. What verify gets wrong is marked with what it says.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support import call_main

from . import modules, mutants

QUICK = {"gru_cell", "window_not_moved", "state_of_one_number"}
FOUND = {"one_of_many_tokens": "passes: of 50,000 token ids few are tried, and a note says how many"}
"""What is wrong in the verifier, by the case that shows it."""


def variants(table, found=FOUND):
    """All cases of a table: those of QUICK are fast, and those in which something is wrong fail for its reason."""
    cases = []
    for name in table:
        marks = [] if name in QUICK else [pytest.mark.slow(keep=3)]
        if name in found:
            marks.append(pytest.mark.xfail(strict=True, reason=found[name], raises=AssertionError))
        cases.append(pytest.param(name, marks=marks))
    return cases


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """A command in this process, in an empty folder but for the constant that one file takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    np.savez("sr.npz", sr=np.array(16000))
    return lambda *arguments: call_main(arguments, monkeypatch, capfd)


def verified(run, case, of):
    """Make the file of a case and hold it against its module: exit code, last line, and all that is said."""
    file = modules.export(case, Path("file.onnx"))
    code, _, said = run("verify", file, "--module", f"{modules.__file__}:{of}", *case.command)
    return code, said.splitlines()[-1], said


@pytest.mark.parametrize("name", variants(modules.RIGHTS, {}))
def test_a_right_file_passes(run, name):
    code, last, _ = verified(run, modules.RIGHTS[name], name)
    assert code == 0, last


@pytest.mark.parametrize("name", variants(mutants.MUTANTS))
def test_a_wrong_file_is_refused_and_the_last_line_says_where(run, name):
    of, case = mutants.MUTANTS[name]
    code, last, _ = verified(run, case, of)
    assert code == 1, last
    assert any(words in last for words in case.fails), last


@pytest.mark.parametrize("name", variants(modules.SURPRISES))
def test_a_surprise_is_judged_rightly(run, name):
    case = modules.SURPRISES[name]
    code, last, said = verified(run, case, name)
    assert code == bool(case.fails), last
    assert not case.fails or any(words in last for words in case.fails), last
    assert case.fails or "changes no output" not in said


@pytest.mark.slow
def test_what_was_not_tried_of_whole_numbers_is_said(run):
    said = [verified(run, modules.SURPRISES[name], name)[2] for name in ("one_of_many_tokens", "positions_beyond_one")]
    assert re.search(r"note: \d{3} of 50000 ids of tokens were tried, drawn at random", said[0])
    assert "note: position was only tried from 0 to 63, as nothing says how large it is; give real inputs" in said[1]
