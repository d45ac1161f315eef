"""The published schema and table of operators: they are what the code says, and refuse what the code refuses."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import msgspec
import published
import pytest
import step_models
from frozen import frozen
from resealing import changed
from support import FIXTURES
from txl_runtime import BundleError
from txl_runtime.bundle.manifest import decode_manifest
from txl_runtime.guard.forms import FORMS, Form

from conformance import spoiling

RELEASED = FIXTURES / "release_0_8"


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    return json.loads((frozen("clusters") / "manifest.json").read_bytes())


@pytest.mark.parametrize("name", published.PUBLISHED)
def test_what_is_published_is_what_the_code_says(name):
    found, expected = (published.DOCS / name).read_text("utf-8"), published.text(name)
    if json.loads(found).get("unicode") != json.loads(expected).get("unicode"):
        pytest.skip("this Python has another Unicode than the table")
    assert found == expected, "make published"


def test_the_script_of_the_schema_is_what_the_code_says():
    assert published.SCRIPT.read_text("utf-8") == published.script(), "make published"


def test_the_schema_is_one_and_says_what_every_field_is():
    jsonschema.Draft202012Validator.check_schema(published.schema())
    for part in published.schema()["$defs"].values():
        assert part["description"]
    for name in ("Manifest", "Input", "Output", "StateTensor", "Program", "Counting"):
        fields = published.schema()["$defs"][name]["properties"]
        assert [field for field, said in fields.items() if not said.get("description")] == []


def test_the_table_of_operators_can_be_read_back():
    table = published.forms()
    assert msgspec.convert(table["forms"], dict[str, dict[str, Form]]) == FORMS
    assert table["opsets"] == [18, 19, 20, 21, 22, 23, 24]
    assert set(table["plain"]) < {*FORMS[""], *FORMS["com.microsoft"]}


@pytest.mark.parametrize(
    "path", [*RELEASED.glob("*/manifest.json"), *FIXTURES.glob("bad_bundles/bases/*/manifest.json")], ids=str
)
def test_manifests_of_2_0_pass(path):
    assert not list(published.validator().iter_errors(json.loads(path.read_bytes())))


def test_manifests_that_are_written_now_pass_and_are_read_by_0_8(written, tmp_path):
    old = jsonschema.Draft202012Validator(json.loads((FIXTURES / "manifest_0_8.schema.json").read_bytes()))
    step = json.loads((step_models.growing().write(tmp_path / "growing.txl") / "manifest.json").read_bytes())
    for document in (written, step):
        for reader in (published.validator(), old):
            assert not list(reader.iter_errors(document))
    assert set(written["counters"]) <= {"fill"}, "0.8 refuses a counter that it does not know"


WRONG: dict[str, tuple[str, Any]] = {
    "no B": ("batch_size", ...),
    "B 0": ("batch_size", 0),
    "B of 33 bits": ("batch_size", 2**32),
    "B as text": ("batch_size", "2"),
    "another format": ("format", "onnx"),
    "a newer major version": ("format_version", "3.0"),
    "a version without a number": ("format_version", "latest"),
    "a hash of upper case": ("model_id", "A" * 64),
    "another precision": ("precision", "fp8"),
    "another role": ("inputs.0.role", "words"),
    "another type": ("inputs.0.dtype", "int64"),
    "a letter for a size": ("inputs.0.shape.0", "T"),
    "a size of nothing": ("outputs.0.shape.2", 0),
    "more axes than an array has": ("inputs.0.shape", [1] * 33),
    "clusters of three": ("outputs.0.clusters.0", [0, 20, 40]),
    "a negative axis": ("states.0.row_axis", -1),
    "another rule": ("states.0.update", "queue"),
    "another rule of a program": ("programs.0.update", "queue"),
    "another kind": ("programs.0.kind", "backwards"),
    "an opset as text": ("programs.0.opset", {"ai.onnx": "18"}),
    "an opset 0": ("programs.0.opset", {"ai.onnx": 0}),
    "no programs": ("programs", []),
    "another counter": ("counters.sides", {"start": 0, "most": 1}),
    "a counter without a bound": ("counters.fill", {"start": 0}),
    "a count that goes elsewhere": ("inputs.2.counter.over", "jump"),
    "another count beyond": ("inputs.1.beyond", "smallest"),
    "a negative spill": ("states.0.spill", -1),
    "a truth as a number": ("states.0.in_place", 1),
    "other streams": ("streams", "alone"),
    "other lengths": ("lengths", "any"),
    "a file without a hash": ("files.weights", {"size": 1}),
    "no weights": ("weights", ...),
    "a number for the vectors": ("selftest", 7),
    "no format": ("format", ...),
    "a version as a number": ("format_version", 1.0),
    "B as a fraction": ("batch_size", 3.5),
    "a negative M": ("counters.fill.most", -1),
    "no M": ("counters.fill.most", None),
    "a negative L": ("programs.0.segment_length", -4),
    "no inputs": ("inputs", ...),
    "inputs as text": ("inputs", "tokens"),
    "a family as text": ("family", "transformer_xl"),
    "a ring of no slots": ("states.3.slots", 0),
    "another type of a state": ("states.0.dtype", "float64"),
    "programs as an object": ("programs", {}),
    "a size of words": ("programs.2.inputs.0.shape.0", "some"),
    "files as a list": ("files", []),
    "a negative size of a file": ("files.weights", {"size": -1, "sha256": "0" * 64}),
    "a short hash": ("files.weights", {"size": 1, "sha256": "abc"}),
    "provenance as text": ("provenance", "from a friend"),
}


@pytest.mark.parametrize(("at", "value"), WRONG.values(), ids=WRONG)
def test_what_the_runtime_refuses_by_type_or_range_the_schema_refuses(written, at, value):
    without = {name: part for name, part in written.items() if name != at}
    document = without if value is ... else changed(written, at, value)
    with pytest.raises(BundleError):
        decode_manifest(json.dumps(document).encode(), "manifest.json")
    assert not published.validator().is_valid(document)


def test_of_the_bad_bundles_the_schema_refuses_every_manifest_that_the_structs_do_not_take(tmp_path):
    refused = 0
    for number, case in enumerate(spoiling.index()["cases"]):
        edited = [c for c in case["changes"] if c["file"] == "manifest.json" and c["do"] in ("set", "remove")]
        if case["base"] not in ("step", "transformer_xl") or case["expected"] != "refused" or not edited:
            continue
        data = (spoiling.build(case, tmp_path / str(number)) / "manifest.json").read_bytes()
        try:
            decode_manifest(data, "manifest.json")
            said = ""
        except BundleError as error:
            said = str(error)
        if "expected the manifest of a bundle" in said:  # by the structs, not by what tables have to agree on
            refused += 1
            assert not published.validator().is_valid(json.loads(data)), case["name"]
    assert refused > 30


def test_a_schema_that_refuses_what_is_read_is_found(written, monkeypatch):
    data = json.dumps({**written, "parameters": 2**40}).encode()
    decode_manifest(data, "manifest.json")
    strict = copy.deepcopy(published.schema())
    strict["$defs"]["Manifest"]["properties"]["parameters"]["maximum"] = 2**30
    monkeypatch.setattr(published, "validator", lambda: jsonschema.Draft202012Validator(strict))
    with pytest.raises(AssertionError, match=r"refuses a manifest that is read: \['\$\.parameters: "):
        decode_manifest(data.replace(str(2**40).encode(), str(2**40 + 1).encode()), "manifest.json")
