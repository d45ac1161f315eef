"""The program that tells where a model looks has to fit the other tables, or the bundle is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from frozen import frozen
from txl_runtime import BundleError
from txl_runtime.bundle.manifest import decode_manifest

SHAPED = [{"name": "attention", "dtype": "float32", "shape": [2, 1, 2, 4, 12]}]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"update": "rolled"}, "program attention-4 has update rule 'rolled', expected 'none'"),
    ({"open_batch": True}, "expected 'none' and one sequence"),
    ({"name": "head"}, "program head shares its name head with another, expected one of its own"),
    ({"file": "head.onnx"}, "program attention-4 shares its file head.onnx with another"),
    ({"segment_length": 1}, "the inputs of program attention-4 do not fit the state table"),
    ({"outputs": SHAPED}, "are not attention [layers, 1, heads, 4, 11]"),
    ({"outputs": []}, "are not attention [layers, 1, heads, 4, 11]"),
]


def test_the_program_is_believed_as_it_is_written_and_refused_where_it_does_not_fit():
    tables = json.loads((frozen("0.8/tokens") / "manifest.json").read_bytes())
    manifest = decode_manifest(json.dumps(tables).encode(), "manifest.json")
    assert manifest.attention
    assert (manifest.segment_lengths, manifest.updates) == ((4, 1), ("ring", "rolled"))
    (place,) = (n for n, program in enumerate(tables["programs"]) if program["kind"] == "attention")
    for changes, message in WRONG:
        programs = [program | changes if n == place else program for n, program in enumerate(tables["programs"])]
        with pytest.raises(BundleError) as refused:
            decode_manifest(json.dumps(tables | {"programs": programs}).encode(), "manifest.json")
        assert message in str(refused.value)
