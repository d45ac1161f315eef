"""Facts that tables imply: said since format 2.1, derived if a manifest lacks them, and held against it."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
import step_models
from frozen import frozen
from support import FIXTURES
from txl_runtime import BundleError
from txl_runtime.bundle.derived import DERIVED, completed, says_nothing
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.guard.graph_check import imported_opset

RELEASED = FIXTURES / "release_0_8"


EXPORTED = frozen("clusters")
"""M 6, segments of 4 and 1, three clusters, a ring and rolled memory."""


@pytest.fixture
def written() -> dict[str, Any]:
    return json.loads((EXPORTED / "manifest.json").read_bytes())


def decoded(tables: dict[str, Any]) -> Manifest:
    return decode_manifest(json.dumps(tables).encode(), "manifest.json")


def refusal(tables: dict[str, Any]) -> str:
    with pytest.raises(BundleError) as caught:
        decoded(tables)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def row(tables: dict[str, Any], side: str, **named: Any) -> dict[str, Any]:
    return next(entry for entry in tables[side] if named.items() <= entry.items())


def silent(tables: dict[str, Any], version: str = "2.0") -> dict[str, Any]:
    """The tables as format 2.0 had them."""
    old = {**copy.deepcopy(tables), "format_version": version}
    del old["selftest"]
    for side, names in DERIVED.items():
        old[side] = [{name: value for name, value in entry.items() if name not in names} for entry in old[side]]
    for program in old["programs"]:
        del program["opset"]
    return old


def test_an_export_says_what_its_tables_imply(written):
    assert written["format_version"] == "2.1"
    assert row(written, "inputs", role="valid")["beyond"] == "zero"
    assert row(written, "inputs", role="fill")["counter"] == {"start": 0, "most": 6, "over": "stay"}
    assert row(written, "inputs", role="head")["counter"] == {"start": 0, "most": 10, "over": "wrap"}
    assert row(written, "inputs", role="tokens")["counter"] is row(written, "inputs", role="tokens")["beyond"] is None
    assert written["outputs"][0]["cluster_columns"] == [60, 61]
    rings = [state for state in written["states"] if state["update"] == "ring"]
    assert {(state["slots"], state["spill"], state["in_place"]) for state in rings} == {(10, 4, True)}
    assert all(state["shape"][state["row_axis"]] == state["slots"] + state["spill"] for state in rings)
    rolled = [state for state in written["states"] if state["update"] == "rolled"]
    assert {(state["spill"], state["in_place"]) for state in rolled} == {(0, False)}


def test_an_export_says_what_each_graph_imports(written):
    for program in written["programs"]:
        assert program["opset"] == {"ai.onnx": 24 if program["update"] == "ring" else 18}
        assert program["opset"] == imported_opset((EXPORTED / program["file"]).read_bytes())


def test_quantised_graphs_say_that_they_import_operators_of_onnx_runtime():
    manifest = open_bundle(frozen("int8")).manifest
    assert {"ai.onnx": 18, "com.microsoft": 1} in [program.opset for program in manifest.programs]


def test_a_manifest_of_2_0_is_read_as_if_it_said_so(written):
    read, now = decoded(silent(written)), open_bundle(EXPORTED).manifest
    assert not any(program.opset for program in read.programs)
    assert [*read.inputs, *read.outputs, *read.states] == [*now.inputs, *now.outputs, *now.states]


@pytest.mark.parametrize("path", sorted(RELEASED.glob("*/manifest.json")), ids=lambda path: path.parent.name)
def test_released_bundles_get_what_they_imply(path):
    manifest = decode_manifest(path.read_bytes(), "manifest.json")
    assert says_nothing(manifest) == (path.parent.name in ("growing", "stages")), "which read no count"
    assert manifest == completed(manifest)
    assert manifest.selftest == "selftest.npz"
    again = msgspec.json.encode(manifest)
    assert decode_manifest(again, "manifest.json") == manifest, "a manifest that is written again says it itself"


def test_streams_in_lockstep_fill_up_with_the_largest_count(written):
    tables = silent(written)
    tables["streams"] = "lockstep"
    for program in tables["programs"]:
        program["open_batch"] = False
    assert next(entry for entry in decoded(tables).inputs if entry.role == "valid").beyond == "largest"


FILL, HEAD = {"start": 0, "most": 6, "over": "stay"}, {"start": 0, "most": 10, "over": "wrap"}
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("inputs", {"role": "fill"}, {"counter": FILL | {"start": 1}}, 'input fill says counter {"start":1,"most":6,'),
    ("inputs", {"role": "fill"}, {"counter": FILL | {"over": "wrap"}}, '"over":"wrap"}, expected {"start":0,"most":6,'),
    (
        "inputs",
        {"role": "head"},
        {"counter": HEAD | {"most": 6}},
        '"most":6,"over":"wrap"}, expected {"start":0,"most":10,',
    ),
    ("inputs", {"role": "head"}, {"counter": ...}, "input head says counter null, expected {"),
    ("inputs", {"role": "tokens"}, {"counter": FILL}, '"over":"stay"}, expected null as'),
    ("inputs", {"role": "valid"}, {"beyond": "largest"}, 'input valid says beyond "largest", expected "zero" as'),
    ("inputs", {"role": "valid"}, {"beyond": ...}, "input valid says beyond null, expected"),
    ("outputs", {}, {"cluster_columns": [59, 60]}, "output logprobs says cluster_columns [59,60], expected [60,61] as"),
    ("outputs", {}, {"cluster_columns": ...}, "says cluster_columns [], expected [60,61] as"),
    ("states", {"update": "ring"}, {"spill": 3}, "state layers.00.key says spill 3, expected 4 as"),
    ("states", {"update": "ring"}, {"spill": ...}, "state layers.00.key says spill 0, expected 4 as"),
    ("states", {"update": "rolled"}, {"in_place": True}, "state layers.00.key says in_place true, expected false as"),
]


@pytest.mark.parametrize(("side", "named", "changes", "said"), CHANGES)
def test_what_is_said_otherwise_or_left_out_is_refused(written, side, named, changes, said):
    entry = row(written, side, **named)
    entry |= changes
    for field in [field for field, value in changes.items() if value is ...]:
        del entry[field]
    for version in ("2.1", "2.2"):
        assert said in refusal(written | {"format_version": version})


def test_vectors_that_are_not_listed_are_refused(written):
    said = "vectors.safetensors is used but not in the list of files"
    assert said in refusal(written | {"selftest": "vectors.safetensors"})


def test_a_newer_manifest_that_says_nothing_gets_it_derived(written):
    assert decoded(silent(written, "2.7")) == msgspec.structs.replace(decoded(silent(written)), format_version="2.7")


def test_columns_of_thousands_of_clusters_are_not_all_in_the_message(written):
    written["outputs"][0]["cluster_columns"] = [*range(5000)]
    assert len(refusal(written)) < 300


def test_a_step_without_counts_implies_nothing(tmp_path):
    path = step_models.growing().write(tmp_path / "growing.txl")
    manifest = open_bundle(path).manifest
    assert not any(entry.role == "valid" for entry in manifest.inputs)
    assert says_nothing(manifest)
    assert completed(manifest) == manifest
