"""A verification in a terminal: chains of every kind of model in one form, the order of tokens, no number."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
from msgspec.structs import replace
from resealing import BASES
from support import FIXTURES
from txl_report.schema.verification import (
    LOGPROBS,
    Gate,
    Ranks,
    Spread,
    Tensor,
    Verification,
    decode_verification,
)

from txl_deploy.console import stdout
from txl_deploy.parity_tables import print_parity


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdout, "width", 120)


def shown(**changes: Any) -> str:
    found = decode_verification((BASES / "transformer_xl" / "report.json").read_bytes())
    return printed(replace(found, **changes))


def printed(found: Verification) -> str:
    with stdout.capture() as captured:
        print_parity(found)
    return captured.get()


@pytest.mark.parametrize(
    ("first", "among", "shared", "said"),
    [
        (30_000, 30_000, 300_000, "best token first 100 %, among the first 10 100 % · 10 best shared 100 %"),
        (29_999, 30_000, 299_999, "best token first 99.99 %, among the first 10 100 % · 10 best shared 99.99 %"),
    ],
)
def test_what_is_not_all_is_no_hundred_percent(first: int, among: int, shared: int, said: str):
    within = {"1": first, "2": among, "5": among, "10": among}
    assert said in shown(spread=Spread("the text", (), {}, (), ranks=Ranks(30_000, within, 10, shared)))


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The cells of a table, whose columns stand two blanks apart."""
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.split()[:1] == [heading]) + 1
    rest = (line for line in lines[first:])
    return [re.split(r"\s{2,}", line.strip()) for line in itertools.takewhile(str.strip, rest)]


def test_a_chain_of_a_transformer_xl_has_its_errors():
    found = decode_verification((BASES / "transformer_xl" / "report.json").read_bytes())
    text = printed(found)
    chains = rows_of(text, "chain")
    assert [row[0] for row in chains] == [chain.name for chain in found.chains]
    mean = sum(found.chains[0].outputs[LOGPROBS].mean) / 66
    assert chains[0][1:] == ["2", "66", "6.94e-07", f"{mean:.3g}", "5.28e-08"]
    assert rows_of(text, "compared") == [
        ["logprobs", "output", "8.07e-07", "nats"],
        ["memory", "state", "5.57e-08", "relative"],
    ]
    assert "drift: logprobs max abs, segments of 2, ring" in text


def test_a_chain_of_any_other_step_has_the_same_table():
    text = printed(decode_verification((FIXTURES / "release_0_8" / "policy-1" / "report.json").read_bytes()))
    assert rows_of(text, "chain")[0][0] == "segments of 4"
    assert {row[0]: row[1:] for row in rows_of(text, "compared")}.keys() == {"action", "value", "h"}
    assert "drift: action max abs" in text
    assert "drift: value max abs" in text


def test_whole_numbers_that_differ_are_counted_and_no_error():
    found = decode_verification((BASES / "step" / "report.json").read_bytes())
    for index, chain in enumerate(found.chains):
        chain.states["count"] = Tensor(exact=True, largest=7.0)
        chain.states["began"] = Tensor(exact=True, largest=0.0, reached=120 - index)
    text = printed(found)
    assert ["count", "state", "7", "values"] in rows_of(text, "compared")
    assert ["began", "state", "0", "values, reached 120"] in rows_of(text, "compared")
    assert float(rows_of(text, "chain")[0][-1]) < 1e-6


def test_what_is_infinite_is_told():
    """As a verification that ran here has it, and as its file does, which has no number for it."""
    found = decode_verification((BASES / "transformer_xl" / "report.json").read_bytes())
    gate = Gate("log-probs max abs", math.inf, 1e-4, False)
    found.passed, found.gates = False, (gate,)
    found.chains[0].outputs[LOGPROBS] = Tensor(nats=True, largest=None, mean=[None], most=[None])
    text = printed(found)
    assert ["log-probs max abs", "inf", "0.0001", "FAILED"] in rows_of(text, "gate")
    assert rows_of(text, "chain")[0][3:5] == ["inf", "inf"]
