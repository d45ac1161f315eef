"""Every oracle case through a bundle: within 1e-4 of what the original code computed, with both forms of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import txl_runtime
from oracle import CASES, LANGUAGE_MODELS, export_case, oracle_errors, refuses_kv

LIMIT = 1e-4


def test_the_cases_are_there() -> None:
    assert len(CASES) == 25, "the oracle's files belong into tests/fixtures/oracle"


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("memory", ["kv", "hidden"])
@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_the_bundle_computes_what_the_original_computed(case: str, memory: str, tmp_path: Path) -> None:
    if memory == "kv" and refuses_kv(case):
        with pytest.raises(txl_runtime.TxlError, match="--memory hidden"):
            export_case(case, memory, tmp_path)
        return
    logprobs, remembered = oracle_errors(case, memory, tmp_path)
    assert logprobs <= LIMIT
    assert remembered <= LIMIT
