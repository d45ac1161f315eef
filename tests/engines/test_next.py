"""The program `next`, composed of a bundle's pieces and run by ONNX Runtime: its parts are those of its row."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import txl_runtime
from composed import Runner, segments, spoiled
from txl_engines.checking import read_graph
from txl_engines.composing import BEST, compose, whole_programs
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.engines.library_features import find_facts

pytestmark = pytest.mark.device

B, V = 6, 1500
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "plain, ring": ({}, "ring"),
    "two clusters, rolled": ({"config": {"cutoffs": (700,)}}, "rolled"),
    "three clusters, ring, one with few words": ({"config": {"cutoffs": (300, 420)}}, "ring"),
    "four clusters, rolled, few words in the head": ({"config": {"cutoffs": (100, 500, 600), "div_val": 2}}, "rolled"),
    "three clusters, ring, fp16": ({"config": {"cutoffs": (300, 420)}, "precision": "fp16"}, "ring"),
    "three clusters, rolled, fp16": ({"config": {"cutoffs": (300, 420)}, "precision": "fp16"}, "rolled"),
}
QUICK = ("plain, ring", "three clusters, ring, one with few words")
shapes = pytest.mark.parametrize(
    "shape", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow(keep=1)) for name in SHAPES]
)
TEMPERATURES = np.array([0, 0.3, 0.8, 1, 2, 1e30], np.float32)


@pytest.fixture
def bundle(make_bundle, tmp_path, shape: str) -> Path:
    """A copy of a bundle, to write composed graphs beside its weights."""
    options, _ = SHAPES[shape]
    config = {"vocab_size": V, "n_layer": 1, **options.get("config", {})}
    path = tmp_path / "large.txl"
    shutil.copytree(make_bundle(verify=False, batch_size=B, **{**options, "config": config}), path)
    return path


def check_parts(returned: dict[str, np.ndarray], clusters: Any, temperature: np.ndarray) -> None:
    """Hold the parts against the row beside them: in part the same bits, in no case far from them."""
    row, warm = returned["logprobs"], np.maximum(temperature, 1e-30).astype(np.float64)[:, None]
    for part, (first, last) in enumerate(clusters):
        name, words = f"tail.{part}" if part else "head", row[:, first:last]
        ids, values = returned[f"{name}.ids"], returned[f"{name}.values"]
        assert ids.shape == values.shape == (B, min(BEST, last - first))
        assert ((first <= ids) & (ids < last)).all()
        assert all(len(set(line)) == len(line) for line in ids.tolist()), "no word twice"
        assert (np.diff(values, axis=1) <= 0).all(), "the best first"
        offset = returned["clusters"][:, part - 1, None] if part else np.float32(0)
        np.testing.assert_array_equal(values + offset, np.take_along_axis(row, ids, axis=1), err_msg="the row's words")
        others = np.ones_like(row, bool)
        np.put_along_axis(others, ids, False, axis=1)
        for line in range(B):
            rest = row[line, first:last][others[line, first:last]]
            assert not rest.size or rest.max() <= (values + offset)[line, -1], "none of the others is better"
        with np.errstate(over="ignore"):
            wanted = np.exp((words - words.max(axis=1, keepdims=True)).astype(np.float64) / warm).sum(axis=1)
        live = temperature > 0
        np.testing.assert_allclose(returned["sums"][live, part], wanted[live], rtol=3e-5)
        alike = np.minimum(returned["sums"], BEST)[~live, part]
        np.testing.assert_array_equal(alike, (values == values[:, :1]).sum(axis=1)[~live], err_msg="the best alone")
        if part:
            total = np.log(np.exp(words.astype(np.float64)).sum(axis=1))
            np.testing.assert_allclose(offset[:, 0], total, rtol=0, atol=1e-4)
    assert all(np.isfinite(array).all() for array in returned.values()), "idle rows and temperature 0 too"


@shapes
def test_the_parts_of_a_next_are_those_of_its_row_and_the_row_is_the_runtime_s(bundle: Path, shape: str):
    manifest, (_, update) = open_bundle(bundle).manifest, SHAPES[shape]
    close = {"rtol": 0, "atol": 0.05 if manifest.precision == "fp16" else 3e-5}
    programs = [program for program in whole_programs(manifest, update) if program.kind == "next"]
    assert [program.segment_length for program in programs] == [4, 1]
    for program in programs:
        truth, run = txl_runtime.load(bundle, update=update).stream(B), Runner(bundle, program)
        for number, (ids, valid) in enumerate(segments(B, program.segment_length)):
            tokens, temperature = ids[:, :-1], np.roll(TEMPERATURES, number)
            wanted = truth.step(tokens, valid)[np.arange(B), np.maximum(valid, 1) - 1]
            found = run(spoiled(tokens, valid, number), valid, None, temperature=temperature)
            np.testing.assert_allclose(found[valid > 0], wanted[valid > 0], **close)
            check_parts(run.returned, manifest.clusters, temperature)


@pytest.mark.parametrize("shape", QUICK[-1:])
def test_words_that_tie_come_in_the_vocabulary_s_order(bundle: Path, shape: str):
    """All embeddings are one: of a part all words tie, and with each sum only their number counts."""
    opened, (_, update) = open_bundle(bundle), SHAPES[shape]
    program = next(p for p in whole_programs(opened.manifest, update) if p.name == "next-ring-1")
    data = bytearray((bundle / "weights.safetensors").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = bytes(len(data) - start)
    (bundle / "weights.safetensors").write_bytes(data)
    run = Runner(bundle, program)
    run(np.zeros((B, 1), np.int32), np.ones(B, np.int32), None, temperature=TEMPERATURES)
    check_parts(run.returned, opened.manifest.clusters, TEMPERATURES)
    for part, (first, last) in zip(("head", "tail.1", "tail.2"), opened.manifest.clusters, strict=True):
        expected = np.arange(first, last)[:BEST]
        np.testing.assert_array_equal(run.returned[f"{part}.ids"], np.tile(expected, (B, 1)))
    np.testing.assert_array_equal(run.returned["sums"], np.tile(np.array([300, 120, 1080], np.float32), (B, 1)))


@shapes
def test_the_graph_of_a_next_is_deterministic(bundle: Path, shape: str):
    opened, (_, update) = open_bundle(bundle), SHAPES[shape]
    programs = {program.name: program for program in whole_programs(opened.manifest, update)}
    middle = "-ring" if update == "ring" else ""
    expected = {f"{kind}{middle}-{length}" for kind in ("logprobs", "next") for length in (4, 1)}
    assert programs.keys() == expected | {f"score{middle}-4"}, "no `last` beside a `next`"
    for name in (f"next{middle}-4", f"next{middle}-1"):
        data = compose(opened, programs[name])
        assert compose(opened, programs[name]) == data
        path = bundle / "composed.onnx"
        path.write_bytes(data)
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert [node.op_type for node in model.graph.node].count("TopK") == len(opened.manifest.clusters)
        graph = read_graph(data, programs[name], bundle, find_facts("tensorrt", "10.16.1").opset)
        assert graph.attention_layers == 1
