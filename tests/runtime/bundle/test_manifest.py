"""What a config implies for a bundle: rings, state tables and programs; and that nothing else passes for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support import small_config
from txl_runtime import BundleError, UsageError, load
from txl_runtime.bundle.format1 import ModelConfig, expected_programs, expected_states
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.tables import ring_slots

CONFIG = msgspec.convert(small_config(), ModelConfig)
ADAPTIVE = msgspec.convert(small_config(cutoffs=(20, 40), div_val=2), ModelConfig)
BOTH = ("ring", "rolled")


# --- rings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory_length", "longest", "ring", "columns"),
    [(7, 4, 11, 15), (640, 64, 704, 768), (1, 8, 9, 17), (5, 1, 6, 6), (1, 1, 2, 2)],
)
def test_a_ring_has_room_for_memory_and_segment_and_the_segment_once_more(memory_length, longest, ring, columns):
    assert ring_slots(memory_length, longest) == (ring, columns)


@pytest.mark.parametrize("memory_length", [1, 3, 7])
@pytest.mark.parametrize("longest", [1, 2, 4, 9])
def test_a_step_writes_over_no_memory_and_not_beyond_the_slots(memory_length, longest):
    """By hand: wherever the head stands, whatever counts, all M rows before the new head are still there."""
    ring, columns = ring_slots(memory_length, longest)
    for head in range(ring):
        for length in range(1, longest + 1):
            written = set(range(head, head + length))
            assert max(written) < columns
            for valid in range(length + 1):
                older = {(head - back) % ring for back in range(1, memory_length - valid + 1)}
                assert not written & older


# --- the state table ----------------------------------------------------------------------------------------------


def test_the_state_table_has_every_tensor_once_for_each_rule():
    states = expected_states(CONFIG, "kv", 3, 7, BOTH, 4)
    names = [f"layers.{i:02d}.{role}" for i in range(2) for role in ("key", "value")]
    assert [(state.update, state.name) for state in states] == [(rule, name) for rule in BOTH for name in names]
    for state in states:
        assert state.shape == ((3, 2, 15, 8) if state.update == "ring" else (3, 2, 7, 8))
        assert state.slots == (11 if state.update == "ring" else None)
        assert (state.axis, state.initial) == (2, None)
        assert (state.input, state.output) == (f"memory.{state.name}", f"new_memory.{state.name}")


def test_hidden_memory_is_rolled_and_no_memory_has_no_states():
    states = expected_states(CONFIG, "hidden", 3, 7, ("rolled",), 4)
    assert [(state.name, state.shape, state.axis) for state in states] == [
        (f"layers.{i:02d}.hidden", (3, 7, 16), 1) for i in range(2)
    ]
    assert expected_states(CONFIG, "kv", 3, 0, ("rolled",), 4) == ()


# --- programs -----------------------------------------------------------------------------------------------------


def test_programs_of_the_ring_share_a_file_and_the_softmax_is_apart():
    states = expected_states(ADAPTIVE, "kv", 3, 7, BOTH, 4)
    programs = expected_programs(ADAPTIVE, states, 3, (4, 1), BOTH)
    assert [(p.name, p.kind, p.segment_length, p.update, p.file) for p in programs] == [
        ("hidden-ring-4", "hidden", 4, "ring", "hidden-ring.onnx"),
        ("hidden-ring-1", "hidden", 1, "ring", "hidden-ring.onnx"),
        ("head", "head", 0, "none", "head.onnx"),
        ("tail.1", "tail.1", 0, "none", "tail.1.onnx"),
        ("tail.2", "tail.2", 0, "none", "tail.2.onnx"),
        ("logprobs-4", "logprobs", 4, "rolled", "logprobs-4.onnx"),
        ("logprobs-1", "logprobs", 1, "rolled", "logprobs-1.onnx"),
    ]
    ring, single, head, *tails = programs[:5]
    assert [(spec.name, spec.shape) for spec in ring.inputs[:5]] == [
        ("tokens", (3, 4)),
        ("valid", (3,)),
        ("fill", (3,)),
        ("head", (3,)),
        ("memory.layers.00.key", (3, 2, 15, 8)),
    ]
    assert [spec.shape for spec in ring.inputs[4:]] == [spec.shape for spec in ring.outputs[1:]]
    assert single.inputs[0].shape == (3, 1)
    assert single.inputs[1:] == ring.inputs[1:], "the memory is one for all lengths"
    assert (ring.outputs[0].name, ring.outputs[0].shape) == ("hidden", (3, 4, 16))
    assert [part.inputs[0].shape for part in (head, *tails)] == [("rows", 16)] * 3
    assert [part.outputs[0].shape for part in (head, *tails)] == [("rows", 22), ("rows", 20), ("rows", 20)]
    rolled = programs[5]
    assert [spec.name for spec in rolled.inputs[:4]] == ["tokens", "valid", "fill", "memory.layers.00.key"]
    assert (rolled.outputs[0].name, rolled.outputs[0].shape) == ("logprobs", (3, 4, 60))


@pytest.mark.parametrize("updates", [("ring",), ("rolled",)])
def test_each_rule_brings_its_own_programs(updates):
    states = expected_states(CONFIG, "kv", 1, 7, updates, 4)
    names = [program.name for program in expected_programs(CONFIG, states, 1, (4, 1), updates)]
    expected = {"ring": ["hidden-ring-4", "hidden-ring-1", "head"], "rolled": ["head", "logprobs-4", "logprobs-1"]}
    assert names == expected[updates[0]]


def test_sizes_that_are_open_are_not_taken_for_numbers():
    states = expected_states(CONFIG, "kv", 1, 7, BOTH, 4)
    programs = {program.name: program for program in expected_programs(CONFIG, states, 1, (4,), BOTH)}
    assert programs["logprobs-4"].inputs[0].fixed == (1, 4)
    with pytest.raises(ValueError, match="rows"):
        _ = programs["head"].inputs[0].fixed


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
    assert m.format_version == "1.1"
    assert m.updates == BOTH, "the fastest first"
    assert m.segment_lengths == (4, 1)
    assert m.states == expected_states(m.config, "kv", 3, 7, BOTH, 4)
    assert m.programs == expected_programs(m.config, m.states, 3, (4, 1), BOTH)
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
    decoded = decode_manifest(json.dumps(changed).encode(), "manifest.json")
    assert decoded.updates == (rule,)
    assert decoded.state_bytes == manifest.state_bytes
    assert decoded.context == manifest.context


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
    assert "program hidden-ring-2 is missing" in refusal(changed)
    single["name"] = "hidden-ring-2"
    assert "program hidden-ring-1 is missing" in refusal(changed), "both rules have the same lengths"
    changed["programs"].append(json.loads(json.dumps(single)) | {"name": "hidden-ring-1", "segment_length": 1})
    changed["programs"].append(changed["programs"][-3] | {"name": "logprobs-2", "segment_length": 2})
    assert "the inputs of program hidden-ring-2 do not fit the state table" in refusal(changed)


@pytest.mark.parametrize("field", [{"slots": 10}, {"slots": None}, {"slots": 12}, {"shape": [3, 2, 11, 8]}], ids=str)
def test_a_ring_of_other_slots_is_refused(manifest, field):
    changed = as_json(manifest)
    changed["states"][2] |= field
    assert "state table does not fit kv memory" in refusal(changed)
    for state in changed["states"][:4]:
        state |= field
    assert "state table does not fit kv memory" in refusal(changed)


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
