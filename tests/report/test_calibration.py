"""A text without the tokens that a bundle's matrices were fitted to."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from frozen import frozen
from txl_report.calibration import fitted, record, unfitted
from txl_runtime.bundle.reading import open_bundle

TOKENS = np.arange(40, dtype=np.int32)


def manifest(noted):
    found = open_bundle(frozen("ring")).manifest
    return msgspec.structs.replace(found, provenance={**found.provenance, "calibration": noted})


def test_a_text_that_begins_with_them_is_judged_by_what_follows():
    rest, count = unfitted(manifest(record(TOKENS[:30])), TOKENS)
    assert (rest.tolist(), count) == ([*range(30, 40)], 30)


@pytest.mark.parametrize(
    "text", [TOKENS[1:], TOKENS[:30], TOKENS[:31], TOKENS[:5]], ids=["other", "all", "one", "part"]
)
def test_any_other_text_stays_whole(text):
    rest, count = unfitted(manifest(record(TOKENS[:30])), text)
    assert (rest.tolist(), count) == (text.tolist(), 0)


@pytest.mark.parametrize(
    "noted",
    [
        None,
        "much",
        {},
        {"tokens": "30"},
        {"tokens": -3},
        {"tokens": 30},
        {"tokens": 30, "sha256": 7},
        {"tokens": 10**30},
    ],
)
def test_a_record_that_means_nothing_leaves_no_token_out(noted):
    described = manifest(noted)
    assert fitted(described) >= 0
    assert unfitted(described, TOKENS)[1] == 0


def test_without_a_record_nothing_was_fitted():
    assert fitted(open_bundle(frozen("ring")).manifest) == 0
