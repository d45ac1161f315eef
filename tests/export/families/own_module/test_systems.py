"""The systems of the surveys: each one's bundle beside its module, and the table of them on the page on models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from systems import FILES, SYSTEMS, errors, written
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states

PAGE = Path(__file__).parents[4] / "docs" / "models.md"
LIMIT = 1e-5
FAST = (
    "Compressive Transformer",
    "CALM",
    "RoPE",
    "DA-Transformer",
    "Global and window (ETC, Longformer)",
    "LSH (Reformer)",
    "Random features (RFA)",
    "Decision Transformer",
)
"""One of each file that carries something; the others are slow."""
WHOLE = {"positions": 8, "depth": 8, "buckets": 16, "strided": 28, "random": 28, "local": 40, "block": 40, "global": 40}
"""Positions, by file or kind, that segments of 4 and one whole segment see alike."""


@pytest.mark.parametrize("name", FAST)
def test_the_bundle_of_a_system_does_what_its_module_does(name: str, tmp_path: Path) -> None:
    assert max(errors(SYSTEMS[name], tmp_path)) <= LIMIT


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.source and name not in FAST])
def test_the_bundle_of_each_other_system_does_what_its_module_does(name: str, tmp_path: Path) -> None:
    assert max(errors(SYSTEMS[name], tmp_path)) <= LIMIT


@pytest.mark.parametrize("name", [name for name, one in SYSTEMS.items() if {one.source, one.kind} & set(WHOLE)])
def test_what_is_carried_is_all_that_later_positions_see(name: str, tmp_path: Path) -> None:
    system = SYSTEMS[name]
    spec = written(system, tmp_path / "weights.pt")
    step, most = Eager(spec), WHOLE.get(system.kind) or WHOLE[system.source]
    tokens, states, parts = torch.randint(0, 20, (2, most), dtype=torch.int32), fresh_states(spec, 2), []
    whole = step({"tokens": tokens}, states)[0]
    for segment in tokens.split(4, 1):
        outputs, states = step({"tokens": segment}, states)
        parts.append(outputs)
    for output, expected in whole.items():
        assert torch.allclose(torch.cat([part[output] for part in parts], 1), expected, atol=1e-5)
    if system.source == "depth":  # positions leave at different layers
        assert len(whole["layers"].unique()) > 1


def test_the_page_lists_the_systems_that_are_tested_and_how_exact_they_are() -> None:
    table = PAGE.read_text().partition("\n## Systems")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]
    assert [row[:3] for row in rows] == [[name, system.carried, system.said] for name, system in SYSTEMS.items()]
    for row, system in zip(rows, SYSTEMS.values(), strict=True):
        assert all(re.fullmatch(r"\de-0[6-9]|0" if system.source else "–", cell) for cell in row[3:])


def test_every_file_is_of_a_row() -> None:
    assert {"attention", "carried"} | {system.source for system in SYSTEMS.values()} >= FILES
