"""The page on models says what the script prints: every stored case has its line, and figures are found again."""

from __future__ import annotations

from pathlib import Path

import models_table
import pytest
from oracle_stateful import BUILDS

ROOT = Path(__file__).parents[3]

LIMIT = 1e-4
APART = 10
"""By this factor rounding may differ on another machine."""


def rows() -> dict[str, tuple[str, ...]]:
    """The page's lines by case: those of the script, in its order."""
    page = (ROOT / "docs" / "models.md").read_text()
    found = [line for line in page.splitlines() if line.startswith("| [")][: len(models_table.MODELS)]
    return {
        name: tuple(cell.strip() for cell in line.strip("|").split(" | "))
        for name, line in zip(models_table.MODELS, found, strict=True)
    }


def test_every_case_has_a_line_with_where_to_begin() -> None:
    assert set(models_table.MODELS) == set(BUILDS)
    assert f"| {' | '.join(models_table.HEADER)} |" in (ROOT / "docs" / "models.md").read_text()
    for name, cells in rows().items():
        assert cells[:3] == models_table.words(name)
        assert len(cells) == len(models_table.HEADER)
        assert all(figure == "none" or float(figure) <= LIMIT for figure in cells[-2:])


@pytest.mark.slow
def test_the_figures_are_found_again() -> None:
    name = "as01_adaptive_span"
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    found, written = models_table.figures(name), rows()[name][3:]
    assert found[:4] == written[:4]
    for figure, on_page in zip(found[4:], written[4:], strict=True):
        assert float(on_page) / APART <= float(figure) <= float(on_page) * APART
