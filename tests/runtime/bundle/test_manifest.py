"""The manifest: what a bundle says of itself, and that nothing passes for it whose tables contradict.

What is of another type, or out of its range, `test_schema.py` shows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from frozen import frozen
from txl_runtime import BundleError, UsageError, load
from txl_runtime.bundle.derived import completed
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.bundle.reading import open_bundle

BOTH = ("ring", "rolled")
Tables = dict[str, Any]
WRITTEN = json.loads((frozen("ring") / "manifest.json").read_bytes())
"""B 3, M 6, segments of 4 and 1, 41 words, a ring (states 0 … 3) and rolled memory (4 … 7)."""


@pytest.fixture
def tables() -> Tables:
    return copy.deepcopy(WRITTEN)


def decoded(tables: object) -> Manifest:
    return decode_manifest(json.dumps(tables).encode(), "manifest.json")


def refusal(tables: object) -> str:
    with pytest.raises(BundleError) as caught:
        decoded(tables)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put(tables: Tables, place: str, value: Any) -> None:
    """Set what stands at a place such as `programs hidden-ring-4 inputs 0 shape`; ... takes it away.

    An entry of a list may be given by its name, of which the first counts.
    """
    node: Any = tables
    keys: list[Any] = place.split()
    for depth, key in enumerate(keys):
        if isinstance(node, list):
            key = int(key) if key.isdecimal() else next(n for n, entry in enumerate(node) if entry["name"] == key)
        if depth < len(keys) - 1:
            node = node[key]
        elif value is ...:
            del node[key]
        else:
            node[key] = value


WRONG: list[tuple[str, Any, str]] = [
    ("format", "txl-deploy.checkpoint", "'txl-deploy.checkpoint', expected 'txl-deploy.bundle'"),
    ("format_version", "latest", "format_version is 'latest'"),
    ("format_version", "10.3.1", "format 10.3.1, this version reads up to 2.x; upgrade txl-deploy"),
    ("counters", {}, "no counter is called fill"),
    ("counters laps", {"start": 0, "most": 1}, "counter 'laps'"),
    ("counters fill start", 7, "starts at 7"),
    ("programs hidden-ring-4 segment_length", 0, "program hidden-ring-4 of kind hidden has segments of 0"),
    ("programs logprobs-1 segment_length", 2, "program hidden-ring-2 is missing"),
    ("programs hidden-ring-1 segment_length", 4, "program hidden-ring-1 is missing"),
    ("programs hidden-ring-1 segment_length", 2, "program hidden-ring-1 is missing"),
    ("inputs 0 name", "ids", "inputs of program hidden-ring-4"),
    ("inputs tokens vocab", None, "input tokens of role tokens has vocab None"),
    ("inputs tokens vocab", 42, "logprobs has 41 columns"),
    ("inputs fill shape", ["B", "L"], "input fill"),
    ("inputs valid", ..., "valid"),
    ("outputs 0 shape", ["B", "L", 42], "logprobs has 42 columns"),
    ("outputs 0 clusters", [[0, 30], [30, 20], [20, 41]], "clusters [[0, 30], [30, 20]"),
    ("outputs 0 clusters", [[0, 42]], "clusters [[0, 42]] do not ascend"),
    ("outputs 0 clusters", [[0, 20], [20, 41]], "program tail.1 is missing"),
    ("outputs 0 width", 9, "program hidden-ring-4 do not fit"),
    ("outputs 0 width", None, "clusters"),
    ("boundary_token", 41, "boundary_token is 41"),
    ("stepwise", 5, "stepwise is 5, expected at most 4, the positions of the longest segment"),
    ("states 2 update", "spiral", "layers.01.key has update rule 'spiral', this version knows ring, rolled"),
    ("states 0 update", "rolled", "two states of rule rolled"),
    ("states 0 initial", "initial.k", "layers.00.key starts as initial.k and as None"),
    (
        "programs logprobs-1 kind",
        "tail.3",
        "program logprobs-1 has update rule 'rolled', which its kind tail.3 has not",
    ),
    ("programs 1 update", "spiral", "hidden-ring-1 has update rule 'spiral', this version knows ring, rolled"),
    ("programs logprobs-1 update", "ring", "programs of rule ring are of kinds"),
    ("programs head update", "ring", "program head has update rule 'ring'"),
    ("programs 0 name", "logprobs-1", "two programs are called logprobs-1"),
    ("programs hidden-ring-4", ..., "program hidden-ring-4 is missing"),
    ("programs hidden-ring-1", ..., "program hidden-ring-1 is missing"),
    ("programs head", ..., "program head is missing"),
    ("programs logprobs-4", ..., "program logprobs-4 is missing"),
    ("programs logprobs-1", ..., "program logprobs-1 is missing"),
    ("programs hidden-ring-1 file", "other.onnx", "other.onnx is used but not in the list"),
    ("programs logprobs-4 inputs fill", ..., "inputs of program logprobs-4"),
    ("programs hidden-ring-4 inputs head", ..., "inputs of program hidden-ring-4"),
    ("programs logprobs-1 inputs 0 name", "ids", "inputs of program logprobs-1"),
    ("programs logprobs-1 outputs 0 shape", [3, 1, 42], "outputs of program logprobs-1"),
    ("programs head inputs 0 shape", [3, 8], "inputs of program head"),
    ("programs 0 inputs 0 shape", ["rows", 4], "inputs of program hidden-ring-4"),
    ("weights", "other.bin", "other.bin is used but not in the list"),
    ("vocabulary", "words.json", "words.json is used but not in the list"),
    ("states 4 shape", [3, 2**30, 6, 2**30], "expected at most 1099511627776 values"),
    ("states 0 rows", [0, 13], "has [0, 13] rows, expected none up to those of its shape"),
    ("states 4 slots", 6, "has 6 slots, expected them of a ring alone"),
    ("states 5 input", "memory.layers.00.key.x", "memory.layers.00.key is a prefix of memory.layers.00.key.x"),
    ("states 4 output", "new_memory.z", "inputs and outputs of rule rolled sort differently"),
    ("joint", True, "sequences are independent and influence one another"),
    ("batch_sizes", [5], "batch_sizes are [5], expected smaller ones than B 3"),
]
STATES: list[tuple[str, Any]] = [
    ("batch_size", 4),
    ("counters fill most", 7),
    ("counters fill most", 0),
    ("programs logprobs-4 segment_length", 5),
    ("states", []),
    ("states 1", ...),
    ("states 0 shape", [3, 2, 8, 4]),
    ("states 0 shape", [3, 2, 10, 4]),
    ("states 0 row_axis", 1),
    ("states 0 row_axis", 4),
    ("states 0 row_axis", None),
    ("states 0 name", "layers.09.key"),
    ("states 0 dtype", "float16"),
    ("states 0 dtype", "int32"),
    ("states 0 slots", 9),
    ("states 2 slots", 11),
    ("states 3 slots", None),
    ("states 0 batch_axis", 1),
    ("states 0 batch_axis", None),
    ("states 0 rows", [0, 14]),
    ("states 0 absent", True),
]
"""Values that do not fit the state table."""


@pytest.mark.parametrize(("place", "value", "said"), [*WRONG, *((*row, "state table") for row in STATES)], ids=str)
def test_tables_that_contradict_are_refused(tables, place, value, said):
    put(tables, place, value)
    assert said in refusal(tables)


def one_more_length(tables: Tables) -> None:
    """A further program of a longer segment, for which the ring has no room."""
    longer = copy.deepcopy(tables["programs"][0]) | {"name": "hidden-ring-8", "segment_length": 8}
    longer["inputs"][0]["shape"], longer["outputs"][0]["shape"] = [3, 8], [3, 8, 8]
    tables["programs"].append(longer)


def swapped(tables: Tables) -> None:
    one, other = tables["programs"][:2]
    one["name"], other["name"] = other["name"], one["name"]


def without_valid(tables: Tables) -> None:
    for holder in (tables, *tables["programs"]):
        holder["inputs"] = [entry for entry in holder["inputs"] if entry["name"] != "valid"]


def graph_of_one_b(tables: Tables) -> None:
    tables["batch_sizes"], tables["programs"][0]["open_batch"] = [2], False


def more(tables: Tables, program: int, **changes: Any) -> None:
    tables["programs"].append(tables["programs"][program] | changes)


def without(kind: str, rule: str) -> Callable[[Tables], None]:
    return lambda m: m.update({kind: [entry for entry in m[kind] if entry["update"] != rule]})


def other_rings(tables: Tables) -> None:
    for state in tables["states"][:4]:
        state["slots"] = 9


def another_rule_alone(tables: Tables) -> None:
    for state in tables["states"]:
        state.update(update="ring-7", shape=[3, 2, 11, 4])


MORE: dict[str, tuple[Callable[[Tables], Any], str]] = {
    "an input twice": (lambda m: m["inputs"].append(dict(m["inputs"][0])), "two inputs are called tokens"),
    "a program twice": (
        lambda m: more(m, 0, name="again-4"),
        "program again-4 takes the same segments as hidden-ring-4",
    ),
    "another softmax": (lambda m: more(m, 2, name="tail.3", kind="tail.3"), "program tail.3 is 'tail.3', known: head"),
    "no segments": (lambda m: m.update(programs=m["programs"][2:3]), "no program runs segments"),
    "no count": (without_valid, "lengths are 'valid', but the programs read no valid"),
    "no idle sequences": (
        lambda m: (without_valid(m), m.update(lengths="exact")),
        "sequences are independent, but the programs read no valid",
    ),
    "a graph of one B": (graph_of_one_b, "there are several batch_sizes, but a program's graph is of one B"),
    "a longer segment of one rule alone": (one_more_length, "state table"),
    "in each other's place": (swapped, "program hidden-ring-1 has segments of 4"),
    "a rule without programs": (without("programs", "ring"), "state table"),
    "a rule without its states": (without("states", "rolled"), "state table"),
    "all rings of other slots": (other_rings, "state table does not fit memory of 6 rows"),
    "states of another rule": (another_rule_alone, "layers.00.key has update rule 'ring-7', this version knows ring"),
}


@pytest.mark.parametrize(("edit", "said"), MORE.values(), ids=MORE)
def test_rows_of_tables_that_contradict_are_refused(tables, edit, said):
    edit(tables)
    assert said in refusal(tables)


def test_a_newer_major_version_is_named_even_when_nothing_else_is_understood():
    said = refusal({"format": "txl-deploy.bundle", "format_version": "3.1", "everything": "is different"})
    assert "format 3.1, this version reads up to 2.x; upgrade txl-deploy" in said


def test_a_newer_minor_version_with_unknown_fields_is_read(tables):
    def add_unknown_fields(node: object) -> None:
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            add_unknown_fields(child)
        if isinstance(node, dict):
            node["from the future"] = {"nested": [1, None]}

    tables["format_version"] = "2.99"
    for name in ("inputs", "outputs", "states", "family"):
        add_unknown_fields(tables[name])
    for entry in (tables, *tables["programs"], *tables["files"].values()):
        entry["from the future"] = True
    known = decoded(tables)
    assert "from the future" not in msgspec.to_builtins(known)
    assert known.programs == decoded(WRITTEN).programs


@pytest.mark.parametrize(
    "path", ["../x", "/abs", "a\\..\\b", "..", "a/../b", "C:x", "./head.onnx", ".", "", "a//b", "a\0b", "head.onnx/"]
)
def test_a_path_that_is_not_plainly_inside_the_bundle_is_refused(tables, path):
    weights = copy.deepcopy(tables)
    tables["files"][path] = tables["files"]["head.onnx"]
    weights["weights"] = path
    weights["files"][path] = weights["files"].pop("weights.safetensors")
    for changed in (tables, weights):
        assert f"{path!r} leaves the bundle" in refusal(changed)


def test_what_is_read_is_written_again_as_it_was_and_weights_may_be_larger_than_2_gib(tables):
    tables["files"]["weights.safetensors"]["size"] = 5 * 2**30
    tables["parameters"] = 3_000_000_000
    manifest = decoded(tables)
    assert manifest.updates == BOTH, "the fastest first"
    assert manifest.segment_lengths == (4, 1)
    assert manifest.states_of("ring") + manifest.states_of("rolled") == manifest.states
    assert manifest.state_bytes == 2 * 2 * 6 * 8 * 4, "of one sequence, whatever a ring takes on top"
    assert manifest == completed(manifest)
    assert decode_manifest(msgspec.json.encode(manifest), "manifest.json") == manifest


def test_segments_that_are_single_steps_are_said_or_not_known(tables):
    assert [decoded(tables).stepwise, decoded({**tables, "stepwise": 4}).stepwise] == [None, 4]
    assert open_bundle(frozen("0.8/tokens")).manifest.stepwise is None


@pytest.mark.parametrize("rule", BOTH)
def test_a_bundle_may_have_one_update_rule_alone(tables, rule):
    kept = {rule, "none"} if rule == "ring" else {rule}
    tables["programs"] = [program for program in tables["programs"] if program["update"] in kept]
    tables["states"] = [state for state in tables["states"] if state["update"] == rule]
    if rule == "rolled":
        put(tables, "inputs head counter", None)
    manifest = decoded(tables)
    assert manifest.updates == (rule,)
    assert (manifest.state_bytes, manifest.reach) == (decoded(WRITTEN).state_bytes, WRITTEN["reach"])


def test_the_ring_is_run_where_there_is_one_and_refused_by_name_where_there_is_none():
    assert [load(frozen("ring"), update=update).update for update in (None, *BOTH)] == ["ring", *BOTH]
    assert load(frozen("hidden")).update == "rolled"
    with pytest.raises(UsageError, match=r"update is 'ring', this bundle has programs for rolled; use one"):
        load(frozen("hidden"), update="ring")
    for update in ("paged", "", "none", "RING"):
        with pytest.raises(UsageError, match=rf"update is '{update}', this bundle has programs for ring, rolled; use"):
            load(frozen("ring"), update=update)


def test_a_program_of_kind_attention_is_ignored_whatever_it_says():
    """Bundles of 0.8 may have one."""
    tables = json.loads((frozen("0.8/tokens") / "manifest.json").read_bytes())
    (look,) = (program for program in tables["programs"] if program["kind"] == "attention")
    found = decoded(tables).programs
    assert [program.name for program in found] == [p["name"] for p in tables["programs"] if p is not look]
    look |= {"update": "rolled", "segment_length": 0, "file": "nowhere.onnx", "inputs": [], "outputs": []}
    assert decoded(tables).programs == found
    tables["programs"] = [look]
    assert "no program runs segments" in refusal(tables)


def test_a_config_is_read_of_a_transformer_xl_alone():
    manifest = decode_manifest((frozen("policy-16") / "manifest.json").read_bytes(), "manifest.json")
    with pytest.raises(BundleError, match="family is 'own_module'"):
        _ = manifest.config
