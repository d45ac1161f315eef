"""The manifest: what a bundle says of itself, and that nothing passes for it whose tables contradict."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from txl_export.families.transformer_xl.tables import expected_programs, expected_states
from txl_runtime import BundleError, UsageError, load
from txl_runtime.bundle.derived import completed
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.bundle.reading import open_bundle

BOTH = ("ring", "rolled")


# --- of a bundle --------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(make_bundle: Callable[..., Any]) -> Manifest:
    return open_bundle(make_bundle(batch_size=3, config={"cutoffs": (20, 40), "div_val": 2})).manifest


def as_json(manifest: Manifest) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(manifest))


def refusal(changed: Any) -> str:
    with pytest.raises(BundleError) as caught:
        decode_manifest(json.dumps(changed).encode(), "manifest.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_exported_manifest_is_what_its_config_implies(manifest):
    m = manifest
    assert m.format_version == "2.1"
    assert m.updates == BOTH, "the fastest first"
    assert m.segment_lengths == (4, 1)
    plain = msgspec.structs.replace(m, states=expected_states(m.config, "kv", 3, 7, BOTH, 4))
    assert m.states == completed(plain).states
    graphs = expected_programs(m.config, m.states, 3, (4, 1), BOTH)
    assert tuple(msgspec.structs.replace(program, opset={}) for program in m.programs) == graphs
    assert m.states_of("ring") + m.states_of("rolled") == m.states
    assert m.state_bytes == 2 * 2 * 7 * 16 * 4, "of one sequence, whatever a ring takes on top"
    assert decode_manifest(json.dumps(as_json(m)).encode(), "manifest.json") == m


def test_weights_may_be_larger_than_2_gib(manifest):
    changed = as_json(manifest)
    changed["files"]["weights.safetensors"]["size"] = 5 * 2**30
    changed["parameters"] = 3_000_000_000
    assert decode_manifest(json.dumps(changed).encode(), "manifest.json").files["weights.safetensors"].size == 5 * 2**30
    changed["files"]["weights.safetensors"]["size"] = -1
    assert "files[...].size" in refusal(changed)


@pytest.mark.parametrize(
    "name", ["hidden-ring-4", "hidden-ring-1", "head", "tail.1", "tail.2", "logprobs-4", "logprobs-1"]
)
def test_a_program_that_is_missing_is_named(manifest, name):
    changed = as_json(manifest)
    changed["programs"] = [program for program in changed["programs"] if program["name"] != name]
    message = refusal(changed)
    assert f"program {name} is missing" in message or (name == "hidden-ring-4" and "state table" in message)


@pytest.mark.parametrize("rule", BOTH)
def test_a_bundle_may_have_one_update_rule_alone(manifest, rule):
    changed = as_json(manifest)
    kept = {rule, "none"} if rule == "ring" else {rule}
    changed["programs"] = [program for program in changed["programs"] if program["update"] in kept]
    changed["states"] = [state for state in changed["states"] if state["update"] == rule]
    if rule == "rolled":
        next(entry for entry in changed["inputs"] if entry["role"] == "head")["counter"] = None
    decoded = decode_manifest(json.dumps(changed).encode(), "manifest.json")
    assert decoded.updates == (rule,)
    assert decoded.state_bytes == manifest.state_bytes
    assert decoded.reach == manifest.reach


@pytest.mark.parametrize("place", ["state", "program"])
def test_an_unknown_update_rule_is_refused_by_name(manifest, place):
    changed = as_json(manifest)
    changed[f"{place}s"][0]["update"] = "paged"
    assert "update rule 'paged'" in refusal(changed)
    assert "ring, rolled" in refusal(changed)


def test_a_program_of_the_file_cannot_have_another_length(manifest):
    changed = as_json(manifest)
    single = changed["programs"][1]
    assert (single["name"], single["file"]) == ("hidden-ring-1", changed["programs"][0]["file"])
    single["segment_length"] = 2
    assert "program hidden-ring-1 is missing" in refusal(changed), "both rules have the same lengths"
    single["name"] = "hidden-ring-2"
    changed["programs"].append(json.loads(json.dumps(single)) | {"name": "hidden-ring-1", "segment_length": 1})
    assert "program logprobs-2 is missing" in refusal(changed)
    changed["programs"].append(changed["programs"][-2] | {"name": "logprobs-2", "segment_length": 2})
    assert "the inputs of program hidden-ring-2 do not fit the state table" in refusal(changed)


@pytest.mark.parametrize("field", [{"slots": 10}, {"slots": None}, {"slots": 12}, {"shape": [3, 2, 11, 8]}], ids=str)
def test_a_ring_of_other_slots_is_refused(manifest, field):
    changed = as_json(manifest)
    changed["states"][2] |= field
    assert "state table does not fit memory of 7 rows" in refusal(changed)
    for state in changed["states"][:4]:
        state |= field
    assert "state table does not fit memory of 7 rows" in refusal(changed)


def test_two_rules_must_start_from_the_same_rows(manifest):
    changed = as_json(manifest)
    changed["states"][0]["initial"] = "initial.layers.00.key"
    assert "layers.00.key starts as initial.layers.00.key and as None" in refusal(changed)


# --- which rule is run --------------------------------------------------------------------------------------------


def test_the_ring_is_run_where_there_is_one(make_bundle):
    path = make_bundle(batch_size=3, config={})
    assert load(path).update == "ring"
    assert load(path, update="ring").update == "ring"
    assert load(path, update="rolled").update == "rolled"
    assert load(make_bundle(batch_size=3, memory="hidden")).update == "rolled"


@pytest.mark.parametrize(
    "options", [{"batch_size": 3, "memory": "hidden"}, {"batch_size": 3, "config": {"memory_length": 0}}], ids=str
)
def test_a_ring_is_refused_by_name_where_there_is_none(make_bundle, options):
    with pytest.raises(UsageError, match=r"update is 'ring', this bundle has programs for rolled; use one"):
        load(make_bundle(**options), update="ring")


@pytest.mark.parametrize("update", ["paged", "", "none", "RING"])
def test_an_update_rule_that_does_not_exist_is_refused(make_bundle, update):
    with pytest.raises(UsageError, match=rf"update is '{update}', this bundle has programs for ring, rolled; use one"):
        load(make_bundle(batch_size=3, config={}), update=update)
