"""Bundles of format 1: they load as they are, give the same bits as before, and altered ones are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import txl_runtime
from support import FIXTURES
from txl_runtime import BundleError, StreamState
from txl_runtime.bundle.manifest import decode_manifest
from txl_runtime.bundle.reading import MANIFEST, open_bundle

OLD = FIXTURES / "format1"
NAMES = ("adaptive", "half", "hidden", "kv", "plain10", "zeros")


@pytest.mark.parametrize("name", NAMES)
def test_an_old_bundle_gives_the_bits_it_gave_and_every_table_is_taken_over(name):
    document, manifest = json.loads((OLD / name / MANIFEST).read_text()), open_bundle(OLD / name).manifest
    assert [list(state.shape) for state in manifest.states] == [state["shape"] for state in document["states"]]
    assert [program.name for program in manifest.programs] == [program["name"] for program in document["programs"]]
    assert (manifest.model_id, manifest.memory_length) == (document["model_id"], document["memory_length"])
    assert manifest.fresh_fill == (document["memory_length"] if name == "zeros" else 0)
    assert manifest.config.n_layer == document["config"]["n_layer"]
    assert (manifest.streams, manifest.lengths, manifest.commits) == ("independent", "valid", "rows")
    recorded = dict(np.load(OLD / f"{name}.npz"))
    tokens = recorded["tokens"]
    for rule in manifest.updates:
        stream = txl_runtime.load(OLD / name, "cpu", threads=1, update=rule).stream()
        assert np.array_equal(stream.feed(tokens), recorded[f"{rule}/feed"])
        for state, rows in stream.memory().items():
            assert np.array_equal(rows, recorded[f"{rule}/memory/{state}"]), state
        stream.restore(StreamState.load(OLD / f"{name}.{rule}.state"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 4}, "state table"),
        ({"memory_length": 8}, "state table"),
        ({"memory": "hidden"}, "hidden memory"),
        ({"states": []}, "state table"),
        ({"config": "small"}, "$.config"),
        ({"format_version": "3.0"}, "up to 2.x"),
    ],
)
def test_an_altered_old_manifest_is_refused(changes, said):
    document = json.loads((OLD / "adaptive" / MANIFEST).read_text())
    with pytest.raises(BundleError) as caught:
        decode_manifest(json.dumps(document | changes).encode(), MANIFEST)
    assert said in str(caught.value)
