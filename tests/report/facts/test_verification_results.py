"""Verifications that are read: of every version and kind of model, failed ones, and files that lie or are damaged."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from resealing import BASES, changed, copied, reseal
from txl_report.facts.plain import Missing
from txl_report.facts.results import verification_of_bundle, verification_of_file
from txl_report.schema.reading import MOST_TEXT
from txl_report.schema.verification import (
    LOGPROBS,
    MEMORY,
    Ranks,
    Verification,
    check_verification,
    decode_verification,
)
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.errors import UsageError


@pytest.fixture(scope="module")
def opened() -> Bundle:
    return open_bundle(BASES / "transformer_xl")


@pytest.fixture(scope="module")
def written(opened: Bundle) -> dict[str, Any]:
    """A document as `verify --json` writes it: an older one, with what this version adds."""
    document = msgspec.json.decode(opened.read("report.json"))
    edges, kl_edges = [10.0**power for power in range(-9, 1)], [10.0**power for power in range(-15, 1)]
    spread = {
        "ran_on": "random tokens",
        "edges": edges,
        "errors": {"log-probabilities": {"unit": "nats", "counts": [*range(11)]}},
        "kl_edges": kl_edges,
        "kl": [*range(17)],
        "ranks": {"positions": 40, "within": {"1": 38, "2": 39, "5": 40, "10": 40}, "best": 10, "shared": 399},
    }
    text = {"tokens": 9, "reference_nll": 2.0, "runtime_nll": 2.1, "relative": 0.1, "errors": [8, *[0] * 10]}
    return document | {"model_id": opened.manifest.model_id, "spread": spread, "text": text}


def read(tmp_path: Path, bundle: Bundle, document: Any) -> Verification:
    path = tmp_path / "verify.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    return verification_of_file(path, bundle)


# ---- what bundles hold


def test_of_any_other_step_every_output_and_state_is_told():
    found = verification_of_bundle(open_bundle(BASES / "step"))
    assert isinstance(found, Verification)
    assert found.passed
    assert found.kl is None
    longest = found.chains[0]
    assert ([*longest.outputs], [*longest.states]) == (["values"], ["hidden", "count"])
    assert [tensor.unit for tensor in longest.tensors] == ["relative", "relative", "values"]


def test_what_an_export_of_this_version_writes_is_read(make_bundle):
    bundle = open_bundle(make_bundle(batch_size=3, config={}))
    found = verification_of_bundle(bundle)
    assert isinstance(found, Verification)
    assert found.passed
    reached = {gate.name: gate.value for gate in found.gates if gate.value is not None}
    assert reached == bundle.manifest.parity
    positions = sum(chain.positions for chain in found.chains)
    spread = found.spread
    assert spread is not None
    assert spread.ran_on == "random inputs"
    errors, states = (spread.errors[name] for name in (LOGPROBS, "all states"))
    assert sum(states.counts) > 0
    assert spread.kl is not None
    assert (sum(errors.counts), sum(spread.kl)) == (60 * positions, positions)
    assert spread.ranks is not None
    assert spread.ranks.positions == positions
    assert [*spread.ranks.within] == ["1", "2", "5", "10"]
    assert 0.9 * positions < spread.ranks.within["1"] <= spread.ranks.within["10"] <= positions
    assert found.text is None
    check_verification(found)
    assert decode_verification(msgspec.json.encode(found)) == found
    assert all(([*chain.outputs], [*chain.states]) == ([LOGPROBS], [MEMORY]) for chain in found.chains)


def test_a_bundle_without_a_verification_says_so(tmp_path: Path):
    path = copied(BASES / "step", tmp_path / "a.txl")
    (path / "report.json").unlink()
    found = verification_of_bundle(open_bundle(reseal(path, parity={})))
    assert found == Missing("The bundle was exported without a verification (--no-verify).")


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"passed": true}', b"[" * 100_000])
def test_a_damaged_report_is_a_reason_and_no_crash(tmp_path: Path, damage: bytes):
    path = copied(BASES / "transformer_xl", tmp_path / "a.txl")
    (path / "report.json").write_bytes(damage)
    found = verification_of_bundle(open_bundle(reseal(path)))
    assert isinstance(found, Missing)
    assert found.reason.startswith("report.json cannot be read: ")
    assert len(found.reason) <= MOST_TEXT
    assert found.command == "txl-deploy verify BUNDLE"


@pytest.mark.parametrize("other", [{"model_id": "0" * 64}, {"precision": "fp16"}])
def test_a_report_of_another_bundle_proves_nothing(tmp_path: Path, other: dict[str, str]):
    path = copied(BASES / "transformer_xl", tmp_path / "b.txl")
    report = path / "report.json"
    report.write_bytes(json.dumps(json.loads(report.read_bytes()) | other).encode())
    found = verification_of_bundle(open_bundle(reseal(path)))
    assert isinstance(found, Missing)
    assert "of another model or another precision" in found.reason


def test_a_report_that_is_too_long_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("txl_report.schema.reading.MOST_BYTES", 100)
    found = verification_of_bundle(open_bundle(BASES / "transformer_xl"))
    assert isinstance(found, Missing)
    assert "more than 100 bytes" in found.reason


# ---- files of `verify --json`


def test_a_later_verification_is_read(tmp_path: Path, opened: Bundle, written: dict[str, Any]):
    found = read(tmp_path, opened, written)
    assert found.spread is not None
    assert found.spread.errors["log-probabilities"].counts == tuple(range(11))
    assert found.spread.ranks == Ranks(40, {"1": 38, "2": 39, "5": 40, "10": 40}, 10, 399)
    assert found.text is not None
    assert found.text.runtime_nll == 2.1


def test_a_file_of_an_older_version_does_not_name_its_model(tmp_path: Path, opened: Bundle, written: dict[str, Any]):
    older = {name: value for name, value in written.items() if name not in ("model_id", "spread")}
    assert read(tmp_path, opened, older).passed


def test_a_failed_verification_is_shown_as_such(tmp_path: Path, opened: Bundle, written: dict[str, Any]):
    failed = copy.deepcopy(written) | {"passed": False}
    failed["gates"][0] |= {"value": None, "passed": False}  # what is infinite stands in JSON as null
    failed["gates"][1] |= {"value": 5.0, "passed": False}
    failed["chains"][0]["max_logprobs"] = None
    failed["chains"][0]["max_per_segment"][1] = None
    found = read(tmp_path, opened, failed)
    assert not found.passed
    assert [(gate.value, gate.verdict) for gate in found.gates[:2]] == [(None, "FAILED"), (5.0, "FAILED")]
    logprobs = found.chains[0].outputs[LOGPROBS]
    assert logprobs.largest is None
    assert logprobs.most[1] is None


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("passed", False, "passed is false, and its gates say otherwise"),
        ("gates.0.passed", False, "does not follow from its value and its limit"),
        ("chains.0.agreeing", 10**9, "agrees at more positions than were decided"),
        ("chains.0.mean_logprobs", ["<b>"], "mean_logprobs"),
        ("spread.kl", [1, 2], "counts of its spread do not fit"),
        ("spread.ranks.within", {"²": 1}, "the ranks of its spread"),
        ("spread.edges.0", 5.0, "counts of its spread do not fit"),
        ("spread.errors.log-probabilities.counts.0", -1, "counts"),
        ("spread.errors.log-probabilities.unit", "miles", "unit"),
        ("spread.ranks.within.1", 41, "the ranks of its spread"),
        ("spread.ranks.within", {"many": 1}, "the ranks of its spread"),
        ("spread.ranks.shared", 401, "the ranks of its spread"),
        ("spread.ranks.positions", 0, "positions"),
        ("model_id", "0" * 64, "is of model 000000000000, the bundle is of .*give a verification of this bundle"),
        ("precision", "int8", "is of int8, the bundle is fp32"),
    ],
)
def test_files_that_lie_are_refused(tmp_path, opened, written, place: str, value: Any, said: str):
    with pytest.raises(UsageError, match=rf"verify\.json: .*{said}") as refused:
        read(tmp_path, opened, changed(written, place, value))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"\xef\xbb\xbf{}", b"\x00" * 99, b"[" * 99_999, b'"\xed\xa0\x80"']
)
def test_what_is_no_verification_is_refused(tmp_path: Path, opened: Bundle, data: bytes):
    with pytest.raises(UsageError, match=r"expected what `txl-deploy verify --json` writes; write one with"):
        read(tmp_path, opened, data)


def test_what_is_no_plain_file_is_refused(tmp_path: Path, opened: Bundle, monkeypatch: pytest.MonkeyPatch):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "nothing", "nothing\0at all"):
        with pytest.raises(UsageError, match="expected what `txl-deploy verify --json` writes"):
            verification_of_file(tmp_path / name, opened)
    (tmp_path / "long").write_bytes(b" " * 1000)
    monkeypatch.setattr("txl_report.schema.reading.MOST_BYTES", 999)
    with pytest.raises(UsageError, match="more than 999 bytes"):
        verification_of_file(tmp_path / "long", opened)


def test_texts_of_strangers_are_kept_as_they_are(tmp_path: Path, opened: Bundle, written: dict[str, Any]):
    odd = "<script>alert(1)</script>\x1b[31m‮مرحبا😀"
    assert read(tmp_path, opened, changed(written, "backend", odd)).backend == odd
