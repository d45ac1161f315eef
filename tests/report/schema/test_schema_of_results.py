"""Structs of report.json and of bench.json: what older versions wrote has today's form."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from resealing import BASES
from support import FIXTURES
from txl_report.schema.measurement import BUNDLE, Agreement, check_measurement, decode_measurement
from txl_report.schema.verification import LOGPROBS, MEMORY, Chain, Gate, decode_verification

RELEASED = [FIXTURES / "release_0_8" / name for name in ("clusters", "half", "hidden", "int4", "tokens")]


@pytest.mark.parametrize("path", [BASES / "transformer_xl", *RELEASED], ids=lambda path: path.name)
def test_older_chains_of_a_transformer_xl_have_the_form_of_every_step(path: Path):
    data = (path / "report.json").read_bytes()
    written = msgspec.json.decode(data)["chains"]
    for chain, old in zip(decode_verification(data).chains, written, strict=True):
        assert type(chain) is Chain
        (logprobs,), (memory,) = chain.outputs.values(), chain.states.values()
        assert ([*chain.outputs], [*chain.states]) == ([LOGPROBS], [MEMORY])
        assert (logprobs.unit, memory.unit) == ("nats", "relative")
        assert (logprobs.largest, memory.largest) == (old["max_logprobs"], old["max_memory"])
        assert (logprobs.mean, logprobs.most) == (old["mean_logprobs"], old["max_per_segment"])
        kept = ("name", "streams", "segments", "positions", "rows", "full_from", "agreeing", "decided")
        assert {name: getattr(chain, name) for name in kept} == {name: old[name] for name in kept}
        assert not memory.most


@pytest.mark.parametrize("name", ["policy-1", "growing", "stages", "adapted"])
def test_what_is_read_of_any_other_step_is_written_again_byte_by_byte(name: str):
    data = (FIXTURES / "release_0_8" / name / "report.json").read_bytes()
    assert msgspec.json.format(msgspec.json.encode(decode_verification(data))) == data


@pytest.mark.parametrize(("passed", "said"), [(True, "passed"), (False, "FAILED"), (None, "not judged")])
def test_the_words_of_a_gate_follow_from_its_verdict(passed: bool | None, said: str):
    """Whatever a file says: nobody calls a failed gate passed."""
    assert msgspec.convert({"name": "a", "passed": passed, "verdict": "passed"}, Gate).verdict == said
    assert replace(Gate("a", 1.0, 1.0, True), passed=passed).verdict == said
    assert msgspec.to_builtins(Gate("a", None, None, passed))["verdict"] == said


@pytest.mark.parametrize("name", ["tokens", "policy-16"])
def test_measurements_of_0_8_are_read(name: str):
    """Measurements of a Transformer-XL and of a step had floors in two forms; no reader of a file asks for them."""
    data = (FIXTURES / "release_0_8" / f"{name}.bench.json").read_bytes()
    written, found = msgspec.json.decode(data), decode_measurement(data)
    check_measurement(found)
    kept = msgspec.json.decode(msgspec.json.encode(found))
    assert found.floor == {}
    for row, old in zip(kept["rows"], written["rows"], strict=True):
        assert row | old == row
        assert {name for name, value in row.items() if value is None} - {"foreign"} == row.keys() - old.keys()
    for part in ("machine", "load", "memory", "left_out", "model_id", "precision"):
        assert kept[part] == written[part]
    assert kept["overhead"] == written["overhead"] | {"put": None}
    assert kept["conditions"] | written["conditions"] == kept["conditions"]


def test_the_bundle_comes_first_of_each_kind_of_work():
    found = decode_measurement((FIXTURES / "release_0_8" / "tokens.bench.json").read_bytes())
    found.rows = found.rows[::-1]
    for rows in found.works:
        assert rows[0].competitor == BUNDLE
        assert len({(row.task, row.segment_length) for row in rows}) == 1
    assert sum(map(len, found.works)) == len(found.rows)


def test_what_an_agreement_reached_is_told_of_every_model():
    known = {"segments": 9, "limit": 1e-3, "measure": "max_abs"}
    assert Agreement(max_abs=0.5, kl=0.0, **known).reached == {"log-probs max abs": 0.5, "KL": 0.0}
    assert Agreement(found={"y": 0.5, "z": None}, **known).reached == {"y": 0.5}
