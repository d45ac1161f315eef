"""What tables imply: said since format 2.1, derived where a manifest says nothing of it, and held against it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
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


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a counter that starts elsewhere": (
        lambda m: row(m, "inputs", role="fill")["counter"].update(start=1),
        'input fill says counter {"start":1,"most":6,"over":"stay"}, expected {"start":0,"most":6,"over":"stay"} as',
    ),
    "a counter of another bound": (
        lambda m: row(m, "inputs", role="head")["counter"].update(most=6),
        'input head says counter {"start":0,"most":6,"over":"wrap"}, expected {"start":0,"most":10,"over":"wrap"} as',
    ),
    "a counter that wraps": (
        lambda m: row(m, "inputs", role="fill")["counter"].update(over="wrap"),
        'input fill says counter {"start":0,"most":6,"over":"wrap"}, expected',
    ),
    "no counter": (lambda m: row(m, "inputs", role="head").pop("counter"), "input head says counter null, expected {"),
    "a counter of tokens": (
        lambda m: row(m, "inputs", role="tokens").update(counter={"start": 0, "most": 1, "over": "stay"}),
        'input tokens says counter {"start":0,"most":1,"over":"stay"}, expected null as',
    ),
    "another count beyond": (
        lambda m: row(m, "inputs", role="valid").update(beyond="largest"),
        'input valid says beyond "largest", expected "zero" as',
    ),
    "no count beyond": (
        lambda m: row(m, "inputs", role="valid").pop("beyond"),
        "input valid says beyond null, expected",
    ),
    "other columns": (
        lambda m: m["outputs"][0].update(cluster_columns=[59, 60]),
        "output logprobs says cluster_columns [59,60], expected [60,61] as",
    ),
    "no columns": (lambda m: m["outputs"][0].pop("cluster_columns"), "says cluster_columns [], expected [60,61] as"),
    "another spill": (
        lambda m: row(m, "states", update="ring").update(spill=3),
        "state layers.00.key says spill 3, expected 4 as",
    ),
    "no spill": (
        lambda m: row(m, "states", update="ring").pop("spill"),
        "state layers.00.key says spill 0, expected 4 as",
    ),
    "rolled in place": (
        lambda m: row(m, "states", update="rolled").update(in_place=True),
        "state layers.00.key says in_place true, expected false as",
    ),
    "vectors that are not listed": (
        lambda m: m.update(selftest="vectors.safetensors"),
        "vectors.safetensors is used but not in the list of files",
    ),
}


@pytest.mark.parametrize(("edit", "said"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_what_is_said_otherwise_or_left_out_is_refused(written, edit, said, version):
    written["format_version"] = version
    edit(written)
    assert said in refusal(written)


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
