"""Tables of any size are read in time that grows as they do, and names have to be such that every system can have."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from frozen import frozen
from resealing import BASES
from txl_runtime import BundleError
from txl_runtime.bundle.agreement import contradictions
from txl_runtime.bundle.manifest import MOST_BYTES, Manifest, decode_manifest

MANY = 20_000
Tables = dict[str, Any]


@pytest.fixture(scope="module")
def tables() -> Tables:
    return json.loads((frozen("clusters") / "manifest.json").read_bytes())


def decoded(tables: Tables) -> Manifest:
    return decode_manifest(json.dumps(tables).encode(), "manifest.json")


def refusal(tables: Tables) -> str:
    with pytest.raises(BundleError) as caught:
        decoded(tables)
    return str(caught.value)


def listing(tables: Tables, name: str) -> Tables:
    return {**tables, "files": {**tables["files"], name: {"size": 0, "sha256": "0" * 64}}}


def renamed(entry: Tables, number: int, **changes: Any) -> Tables:
    return {**entry, "name": f"x{number:06}", **changes}


def clusters(tables: Tables, many: int) -> None:
    """Clusters of one token each, every one with its program."""
    tables["inputs"][0]["vocab"] = many
    output = tables["outputs"][0]
    output.update(shape=["B", "L", many], clusters=[[first, first + 1] for first in range(many)])
    output.update(cluster_columns=[*range(1, many)])
    for program in tables["programs"]:
        for spec in program["outputs"]:
            if spec["name"] == "logprobs" and program["segment_length"]:
                spec["shape"][-1] = many
    head = next(program for program in tables["programs"] if program["kind"] == "head")
    head["outputs"][0]["shape"] = ["rows", many]
    tail = {**copy.deepcopy(head), "outputs": [{**head["outputs"][0], "shape": ["rows", 1]}]}
    rest = [program for program in tables["programs"] if not program["kind"].startswith("tail.")]
    tails = [{**tail, "name": f"tail.{number}", "kind": f"tail.{number}"} for number in range(1, many)]
    tables["programs"] = [*rest, *tails]


def lengths(tables: Tables, many: int) -> None:
    """A program of every length, in place of those there are."""
    program = next(program for program in tables["programs"] if program["segment_length"] > 1)
    tables["programs"] += [{**program, "name": f"x-{1000 + n}", "segment_length": 1000 + n} for n in range(many)]


LARGE: dict[str, Callable[[Tables, int], None]] = {
    "files": lambda m, n: m["files"].update({f"x{i}": {"size": 1, "sha256": "0" * 64} for i in range(n)}),
    "programs": lambda m, n: m["programs"].extend(renamed(m["programs"][0], i) for i in range(n)),
    "lengths": lambda m, n: lengths(m, n // 20),
    "states": lambda m, n: m["states"].extend(renamed(m["states"][0], i) for i in range(n // 4)),
    "names of states": lambda m, n: m["states"].extend(
        renamed(m["states"][0], i, input=f"i{i:06}", output=f"o{i:06}") for i in range(n // 4)
    ),
    "inputs": lambda m, n: m["inputs"].extend(renamed(m["inputs"][0], i) for i in range(n)),
    "outputs": lambda m, n: m["outputs"].extend(renamed(m["outputs"][0], i, role="value") for i in range(n)),
    "counters": lambda m, n: m["counters"].update({f"x{i}": {"start": 0, "most": 1} for i in range(n)}),
    "clusters": lambda m, n: clusters(m, n // 2),
    "family": lambda m, n: m.update(family={"name": "x", "a": [[] for _ in range(n)]}),
}


@pytest.mark.parametrize("edit", LARGE.values(), ids=LARGE)
def test_a_table_of_any_length_takes_time_as_its_length(tables, edit):
    large = copy.deepcopy(tables)
    edit(large, MANY)
    data = json.dumps(large).encode()[: MOST_BYTES + 1]
    began, said = time.process_time(), ""
    try:
        decode_manifest(data, "manifest.json")
    except BundleError as error:
        said = str(error)
    assert time.process_time() - began < 1 + 0.4 * len(data) / 1e6
    assert len(said) < 600


def test_clusters_of_one_token_each_are_read(tables):
    large = copy.deepcopy(tables)
    clusters(large, 500)
    assert len(decoded(large).clusters) == 500


@pytest.mark.parametrize("place", ["states", "inputs", "outputs"])
def test_a_shape_has_no_more_axes_than_an_array(tables, place):
    large = copy.deepcopy(tables)
    large[place][0]["shape"] = [2**31 - 1] * 100_000
    assert "Expected `array` of length <= 32" in refusal(large)


@pytest.mark.parametrize("data", [b" " * (MOST_BYTES + 1), b'{"format":' + b"[" * (1 << 20), b"1" * 5000, b'"\\ud800"'])
def test_what_is_too_long_too_deep_or_no_text_is_refused(data):
    with pytest.raises(BundleError, match=r"^manifest\.json: ") as caught:
        decode_manifest(data, "manifest.json")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("field", ["boundary_token", "parameters", "batch_size"])
def test_a_number_of_thousands_of_digits_is_refused(tables, field):
    data = json.dumps({**tables, field: 0}).replace(f'"{field}": 0', f'"{field}": {"9" * 5000}').encode()
    with pytest.raises(BundleError, match=r"^manifest\.json: .{1,300}; expected the manifest of a bundle"):
        decode_manifest(data, "manifest.json")


RESERVED = ["CON", "nul.txt", "com1", "a/LPT9.onnx", "dot.", "space ", "a./b"]


@pytest.mark.parametrize("name", [*RESERVED, *(f"a{sign}b" for sign in '<"|?*\n\x7f')])
def test_a_file_name_that_some_system_cannot_have_is_refused(tables, name):
    assert "not every system can have" in refusal(listing(tables, name))


@pytest.mark.parametrize("name", ["console", "nulls.txt", "com.onnx", "a b", ".hidden", "größe", "a..b", "x" * 255])
def test_other_file_names_are_fine(tables, name):
    decoded(listing(tables, name))


def test_names_that_differ_in_case_alone_are_refused(tables):
    said = refusal(listing(tables, "WEIGHTS.safetensors"))
    assert "there twice but for upper and lower case" in said


def test_a_number_of_sequences_that_no_tensor_has_is_small():
    manifest = decode_manifest((BASES / "step" / "manifest.json").read_bytes(), "manifest.json")
    shared = msgspec.structs.replace(
        manifest,
        inputs=tuple(msgspec.structs.replace(entry, shape=(2, 3)) for entry in manifest.inputs[:1]),
        outputs=tuple(msgspec.structs.replace(output, shape=(2, 2)) for output in manifest.outputs),
        states=tuple(msgspec.structs.replace(state, batch_axis=None) for state in manifest.states),
        streams="lockstep",
    )
    for size, told in ((4096, False), (4097, True), (2**31 - 1, True)):
        found = list(contradictions(msgspec.structs.replace(shared, batch_size=size), (), ()))
        assert any("which no input, output or state has, expected at most 4096" in each for each in found) is told


def test_a_fill_counts_memory_rows(tables):
    states = [
        {**state, "update": "replace", "slots": None, "row_axis": None, "name": f"s{place}"}
        for place, state in enumerate(tables["states"])
    ]
    programs = [{**program, "update": "replace", "kind": "step"} for program in tables["programs"][:1]]
    assert "the states are replaced" in refusal({**tables, "states": states, "programs": programs})


def test_a_number_that_a_state_starts_as_is_finite(tables):
    state = {**tables["states"][0], "initial": 7}
    text = json.dumps({**tables, "states": [state, *tables["states"][1:]]})
    for number in ("1e400", "-1e999", "NaN", "Infinity", "9" * 400):
        with pytest.raises(BundleError):
            decode_manifest(text.replace('"initial": 7', f'"initial": {number}').encode(), "manifest.json")


def beside(tables: Tables) -> Tables:
    """The tables with one more state, which every step returns whole, beside the memory rows."""
    mixed = copy.deepcopy(tables)
    shape = [mixed["batch_size"], 3]
    names = {"name": "total", "input": "total.in", "output": "total.out"}
    mixed["states"].append(names | {"shape": shape, "update": "replace", "initial": 1.0})
    for program in mixed["programs"]:
        if program["update"] in ("ring", "rolled"):
            for side, name in (("inputs", "total.in"), ("outputs", "total.out")):
                program[side].append({"name": name, "dtype": "float32", "shape": shape})
    return mixed


def test_whole_states_may_stand_beside_memory_rows(tables):
    manifest = decoded(beside(tables))
    for rule in manifest.updates:
        assert [state.update for state in manifest.states_of(rule)][-1] == "replace"
        assert {state.update for state in manifest.states_of(rule)} == {rule, "replace"}
    assert [state.name for state in manifest.states_of("replace")] == ["total"]


def test_a_state_beside_memory_rows_has_to_be_in_every_program_and_every_sequence_s_own(tables):
    mixed = beside(tables)
    mixed["states"][-1]["batch_axis"] = None
    assert "sequences are independent, but total is shared, grows or is absent at first" in refusal(mixed)
    mixed = beside(tables)
    mixed["programs"][0]["inputs"].pop()
    assert mixed["programs"][0]["name"] in refusal(mixed)


def test_rows_are_counted_of_states_that_have_some(tables):
    mixed = beside(tables)
    mixed["states"] = mixed["states"][-1:]
    assert "rule" in refusal(mixed)
    for program in mixed["programs"]:
        if program["update"] in ("ring", "rolled"):
            program["update"] = "replace"
    assert "counter fill counts memory rows, but the states are replaced" in refusal(mixed)
