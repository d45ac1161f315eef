"""Bundles of format 1: they load as they are, give the same bits as before, and altered ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import txl_runtime
from support import FIXTURES
from txl_runtime import BackendError, BundleError, StreamState
from txl_runtime.bundle.manifest import Manifest, decode_manifest
from txl_runtime.bundle.reading import MANIFEST, open_bundle
from txl_runtime.device.engines.files import checked_engines
from txl_runtime.device.engines.sidecar import COMPOSED
from txl_runtime.selftest import run_selftest

OLD = FIXTURES / "format1"
NAMES = ("adaptive", "half", "hidden", "kv", "plain10", "zeros")
RULES = [(name, rule) for name in NAMES for rule in open_bundle(OLD / name).manifest.updates]


def test_no_bundle_is_forgotten():
    assert {path.name for path in OLD.iterdir() if path.is_dir()} == set(NAMES)
    versions = {json.loads((OLD / name / MANIFEST).read_text())["format_version"] for name in NAMES}
    assert versions == {"1.0", "1.1"}


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_an_old_bundle_gives_the_bits_it_gave(name, rule):
    recorded = dict(np.load(OLD / f"{name}.npz"))
    tokens = recorded["tokens"]
    model = txl_runtime.load(OLD / name, "cpu", threads=1, update=rule)
    stream = model.stream()
    assert np.array_equal(stream.feed(tokens), recorded[f"{rule}/feed"])
    for state, rows in stream.memory().items():
        assert np.array_equal(rows, recorded[f"{rule}/memory/{state}"]), state
    lengths = np.array([3, 0][: model.batch_size])
    assert np.array_equal(stream.step(tokens[:, :3], lengths), recorded[f"{rule}/step"])
    assert np.array_equal(stream.score(tokens[:, :9]), recorded[f"{rule}/score"])
    drawn = np.stack(list(stream.generate(tokens[:, :2], 6, seed=1)))
    assert np.array_equal(drawn, recorded[f"{rule}/drawn"])
    saved = StreamState.load(OLD / f"{name}.{rule}.state")
    after = stream.step(tokens[:, :1])
    stream.restore(saved)
    assert np.array_equal(stream.step(tokens[:, :1]), after), "the snapshot was taken where the stream stood"


@pytest.mark.parametrize("name", NAMES)
def test_an_old_bundle_passes_its_selftest(name):
    run_selftest(txl_runtime.load(OLD / name, "cpu", threads=1)).require()


@pytest.mark.parametrize("name", NAMES)
def test_the_adapter_takes_over_every_table(name):
    document, manifest = json.loads((OLD / name / MANIFEST).read_text()), open_bundle(OLD / name).manifest
    assert manifest.format_version == "2.1"
    assert [state.name for state in manifest.states] == [state["name"] for state in document["states"]]
    assert [list(state.shape) for state in manifest.states] == [state["shape"] for state in document["states"]]
    assert [program.name for program in manifest.programs] == [program["name"] for program in document["programs"]]
    assert manifest.model_id == document["model_id"]
    assert manifest.memory_length == document["memory_length"]
    assert manifest.fresh_fill == (document["memory_length"] if name == "zeros" else 0)
    assert manifest.config.n_layer == document["config"]["n_layer"]
    assert manifest.dialect.family == document["dialect"]["family"]
    assert manifest.transformer_xl.memory == document["memory"]
    assert (manifest.streams, manifest.lengths, manifest.commits) == ("independent", "valid", "rows")


def test_old_graphs_for_onnx_runtime_are_refused_by_name():
    """They computed wrong numbers on a GPU: the ids that their Clips read were copied once."""
    wanted = r"was composed by recipe 1, this version of txl-deploy takes recipe 2; txl-deploy build .* --target cuda"
    with pytest.raises(BackendError, match=wanted):
        checked_engines(open_bundle(OLD / "kv"), "cuda", COMPOSED, "ring")


@pytest.mark.parametrize("name", ["kv", "hidden", "adaptive", "half"])
def test_a_build_bounds_the_whole_numbers_of_old_graphs_by_max_and_min(tmp_path, name):
    onnx = pytest.importorskip("onnx")
    from txl_engines.bundles import build_bundle

    shutil.copytree(OLD / name, tmp_path / "old.txl")
    made = build_bundle(tmp_path / "old.txl", "cuda")
    bundle = open_bundle(tmp_path / "old.txl")
    assert "Clip" in {node.op_type for node in onnx.load(bundle.path / "logprobs-4.onnx").graph.node}
    for engine in made.engines:
        graph = onnx.load(bundle.path / engine.file, load_external_data=False).graph
        assert "Clip" not in {node.op_type for node in graph.node}
        assert {"Max", "Min"} <= {node.op_type for node in graph.node}
    assert {engine.program.update for engine in checked_engines(bundle, "cuda", COMPOSED)} == {made.update}


def test_a_build_beside_an_old_bundle_leaves_its_manifest_in_its_format(tmp_path):
    pytest.importorskip("onnx")
    from txl_engines.bundles import build_bundle

    shutil.copytree(OLD / "hidden", tmp_path / "old.txl")
    build_bundle(tmp_path / "old.txl", "cuda")
    assert json.loads((tmp_path / "old.txl" / MANIFEST).read_text())["format_version"] == "1.1"
    assert len(checked_engines(open_bundle(tmp_path / "old.txl"), "cuda", COMPOSED)) == 4


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "B changed": (lambda m: m.update(batch_size=4), "state table"),
    "M changed": (lambda m: m.update(memory_length=8), "state table"),
    "M is none": (lambda m: m.update(memory_length=0), "state table"),
    "M is negative": (lambda m: m.update(memory_length=-1), "$.memory_length"),
    "other form of memory": (lambda m: m.update(memory="hidden"), "hidden memory"),
    "unknown form of memory": (lambda m: m.update(memory="both"), "$.memory"),
    "no config": (lambda m: m.pop("config"), "`config`"),
    "config is text": (lambda m: m.update(config="small"), "$.config"),
    "more layers": (lambda m: m["config"].update(n_layer=3), "state table"),
    "no heads": (lambda m: m["config"].update(n_head=0), "$.config.n_head"),
    "larger vocabulary": (lambda m: m["config"].update(vocab_size=61), "do not fit"),
    "another width": (lambda m: m["config"].update(d_model=17), "do not fit"),
    "cutoffs out of order": (lambda m: m["config"].update(cutoffs=[30, 20]), "cutoffs [30, 20]"),
    "cutoffs too large": (lambda m: m["config"].update(cutoffs=[60]), "cutoffs [60]"),
    "other cutoffs": (lambda m: m["config"].update(cutoffs=[20, 41]), "do not fit"),
    "unknown start": (lambda m: m["dialect"].update(memory_start="noise"), "$.dialect.memory_start"),
    "window of nothing": (lambda m: m["dialect"].update(window=0), "$.dialect.window"),
    "no states": (lambda m: m.update(states=[]), "state table"),
    "a state missing": (lambda m: m["states"].pop(1), "state table"),
    "another axis": (lambda m: m["states"][0].update(axis=1), "state table"),
    "another shape": (lambda m: m["states"][0].update(shape=[2, 2, 8, 8]), "state table"),
    "a program missing": (lambda m: m["programs"].pop(), "is missing"),
    "a softmax missing": (lambda m: m.update(programs=[p for p in m["programs"] if p["kind"] != "head"]), "head"),
    "newer major version": (lambda m: m.update(format_version="3.0"), "up to 2.x"),
}


@pytest.mark.parametrize(("edit", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_an_altered_old_manifest_is_refused(edit, words):
    document = json.loads((OLD / "adaptive" / MANIFEST).read_text())
    decode_manifest(json.dumps(document).encode(), MANIFEST)
    edit(document)
    with pytest.raises(BundleError) as caught:
        decode_manifest(json.dumps(document).encode(), MANIFEST)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_is_read_of_a_transformer_xl_alone():
    document = json.loads(Path(OLD / "kv" / MANIFEST).read_text())
    manifest: Manifest = decode_manifest(json.dumps(document).encode(), MANIFEST)
    other = msgspec.structs.replace(manifest, family={"name": "own_module"})
    with pytest.raises(BundleError, match="family is 'own_module'"):
        _ = other.config
