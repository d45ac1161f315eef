"""The program that tells where a model looks has to fit the other tables, or the bundle is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from txl_runtime import BundleError
from txl_runtime.bundle.manifest import decode_manifest

Tables = dict[str, Any]


@pytest.fixture(scope="module")
def tables(make_bundle) -> Tables:
    path = make_bundle(config={}, batch_size=3, verify=False, attention=True)
    found: Tables = json.loads((path / "manifest.json").read_bytes())
    return found


def look(tables: Tables) -> Tables:
    return next(program for program in tables["programs"] if program["kind"] == "attention")


def twice(tables: Tables) -> None:
    tables["programs"].append({**look(tables), "name": "attention-again"})


def alone(tables: Tables) -> None:
    tables["programs"] = [look(tables)]


def without_rolled(tables: Tables) -> None:
    for kind in ("programs", "states"):
        tables[kind] = [entry for entry in tables[kind] if entry["update"] != "rolled"]


def set_to(**changes: Any) -> Callable[[Tables], None]:
    return lambda tables: look(tables).update(changes)


def shaped(*shape: int) -> Callable[[Tables], None]:
    return set_to(outputs=[{"name": "attention", "dtype": "float32", "shape": list(shape)}])


def without_valid(tables: Tables) -> None:
    tables |= {"lengths": "exact", "streams": "lockstep"}
    for holder in (tables, *tables["programs"]):
        holder["inputs"] = [entry for entry in holder["inputs"] if entry["name"] != "valid"]


def fewer_inputs(tables: Tables) -> None:
    look(tables)["inputs"].pop()


def ahead(tables: Tables) -> None:
    for entry in tables["inputs"]:
        entry["lookahead"] = 2 * (entry["role"] == "tokens")
    for program in tables["programs"]:
        program["inputs"] = [
            entry | {"shape": [entry["shape"][0], entry["shape"][1] + 2]} if entry["name"] == "tokens" else entry
            for entry in program["inputs"]
        ]


WRONG: dict[str, tuple[Callable[[Tables], None], str]] = {
    "tokens that lie ahead": (ahead, "is there, but the model does not read tokens"),
    "twice": (twice, "two programs are of kind attention, attention-4 and attention-again, expected one"),
    "alone": (alone, "no program runs segments"),
    "a rule": (set_to(update="rolled"), "program attention-4 has update rule 'rolled', expected 'none'"),
    "open": (set_to(open_batch=True), "expected 'none' and one sequence"),
    "its name": (set_to(name="head"), "program head shares its name head with another, expected one of its own"),
    "its file": (set_to(file="head.onnx"), "program attention-4 shares its file head.onnx with another"),
    "its length": (set_to(segment_length=1), "the inputs of program attention-4 do not fit the state table"),
    "an input less": (fewer_inputs, "the inputs of program attention-4 do not fit the state table and segments of 4"),
    "no rolled memory": (without_rolled, "program attention-4 takes rolled memory, which no other program"),
    "no count of positions": (without_valid, "is there, but the model does not read tokens, how many of them count"),
    "slots": (shaped(2, 1, 2, 4, 12), r"are not attention [layers, 1, heads, 4, 11]"),
    "sequences": (shaped(2, 3, 2, 4, 11), r"are not attention [layers, 1, heads, 4, 11]"),
    "no layers": (shaped(0, 1, 2, 4, 11), r"are not attention [layers, 1, heads, 4, 11]"),
    "axes": (shaped(1, 2, 4, 11), r"are not attention [layers, 1, heads, 4, 11]"),
    "no output": (set_to(outputs=[]), r"are not attention [layers, 1, heads, 4, 11]"),
    "text where a size is": (
        set_to(outputs=[{"name": "attention", "dtype": "float32", "shape": ["rows", 1, "rows", 4, 11]}]),
        r"are not attention [layers, 1, heads, 4, 11]",
    ),
}


def test_the_program_is_believed_as_it_is_written(tables):
    manifest = decode_manifest(json.dumps(tables).encode(), "manifest.json")
    assert manifest.attention
    assert manifest.segment_lengths == (4, 1)
    assert manifest.updates == ("ring", "rolled")


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_does_not_fit_is_refused(tables, name):
    change, message = WRONG[name]
    changed = copy.deepcopy(tables)
    change(changed)
    with pytest.raises(BundleError) as refused:
        decode_manifest(json.dumps(changed).encode(), "manifest.json")
    assert message in str(refused.value)
