"""A text without the tokens that a bundle's matrices were fitted to."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from frozen import frozen
from txl_report.calibration import LEAST, begins_with_fitted, fitted, record, unfitted
from txl_runtime.bundle.reading import open_bundle

TOKENS = np.arange(30 + LEAST, dtype=np.int32)


def manifest(noted, precision="int4"):
    found = open_bundle(frozen("ring")).manifest
    return msgspec.structs.replace(found, precision=precision, provenance={**found.provenance, "calibration": noted})


def test_a_text_that_begins_with_them_is_judged_by_what_follows():
    rest, count = unfitted(manifest(record(TOKENS[:30])), TOKENS)
    assert (rest.tolist(), count) == ([*range(30, 30 + LEAST)], 30)


@pytest.mark.parametrize(
    ("text", "begins"),
    [(TOKENS[1:], False), (TOKENS[:30], True), (TOKENS[:31], True), (TOKENS[:-1], True), (TOKENS[:29], False)],
    ids=["other", "all", "one more", "too few more", "part"],
)
def test_any_other_text_stays_whole_and_one_that_begins_with_them_is_known(text, begins):
    assert begins_with_fitted(manifest(record(TOKENS[:30])), text) is begins
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
    assert fitted(described) in (0, 30)
    assert unfitted(described, TOKENS)[1] == 0


@pytest.mark.parametrize("count", [True, 1.0, 0, 2**31 + 1])
def test_a_number_that_counts_no_tokens_is_not_believed(count):
    assert fitted(manifest({**record(TOKENS[:1]), "tokens": count})) == 0


def test_only_int4_was_fitted():
    noted = record(TOKENS[:30])
    assert (fitted(manifest(noted)), fitted(manifest(noted, "fp32"))) == (30, 0)


def test_without_a_record_nothing_was_fitted():
    assert fitted(open_bundle(frozen("ring")).manifest) == 0
