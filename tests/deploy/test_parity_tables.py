"""A verification in a terminal: one line says how far the order of tokens is the same, where it was looked at."""

from __future__ import annotations

import json
from typing import Any

import pytest
from resealing import BASES

from txl_deploy.console import stdout
from txl_deploy.parity_tables import print_parity


def shown(**changes: Any) -> str:
    document = json.loads((BASES / "transformer_xl" / "report.json").read_bytes()) | changes
    with stdout.capture() as captured:
        print_parity(document)
    return captured.get()


@pytest.mark.parametrize(
    ("first", "among", "shared", "said"),
    [
        (30_000, 30_000, 300_000, "best token first 100 %, among the first 10 100 % · 10 best shared 100 %"),
        (29_999, 30_000, 299_999, "best token first 99.99 %, among the first 10 100 % · 10 best shared 99.99 %"),
        (15_000, 29_000, 0, "best token first 50 %, among the first 10 96.66 % · 10 best shared 0 %"),
    ],
)
def test_what_is_not_all_is_no_hundred_percent(first: int, among: int, shared: int, said: str):
    within = {"1": first, "2": among, "5": among, "10": among}
    ranks = {"positions": 30_000, "within": within, "best": 10, "shared": shared}
    assert said in shown(spread={"ranks": ranks})


@pytest.mark.parametrize("changes", [{}, {"spread": None}, {"spread": {"ranks": None}}], ids=str)
def test_older_verifications_have_no_such_line(changes: dict[str, Any]):
    text = shown(**changes)
    assert "best token" not in text
    assert "top-1" in text
