"""The first layer that differs is named: one fault, one name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import call_main
from txl_export.families.transformer_xl.building import reference_for
from txl_export.families.transformer_xl.family import weights_of_bundle
from txl_export.families.transformer_xl.parity.bisecting import bisect_against_reference, bisect_engine, compare
from txl_export.verifying import bisect
from txl_runtime import BackendError
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.reading import open_bundle

KINDS = {
    "post-norm": {"config": {"n_layer": 3}},
    "pre-norm": {"config": {"n_layer": 3, "pre_lnorm": True, "attention_bias": True, "memory_start": "zeros"}},
    "hidden memory": {"config": {"n_layer": 3}, "memory": "hidden"},
    "pre-norm, hidden memory": {"config": {"n_layer": 3, "pre_lnorm": True}, "memory": "hidden"},
}
kinds = pytest.mark.parametrize(
    "kind", [kind if kind == "post-norm" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)


def scale_tensor(path: Path, name: str, factor: float) -> None:
    """Multiply one tensor of a weight file in place, and have the manifest accept it."""
    weights = path / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    first, last = (start + offset for offset in json.loads(data[8:start])[name]["data_offsets"])
    data[first:last] = (np.frombuffer(data[first:last], np.float32) * np.float32(factor)).tobytes()
    weights.write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["weights.safetensors"]["sha256"] = file_sha256(weights)
    (path / "manifest.json").write_text(json.dumps(manifest))


@kinds
def test_nothing_differs_in_a_good_bundle(make_bundle, kind):
    found = bisect(make_bundle(**KINDS[kind], verify=False))
    assert found.first is None
    assert [place.name for place in found.places] == [
        f"layers.0{i}.{part}" for i in range(3) for part in ("attention", "feed_forward")
    ]
    assert max(place.difference for place in found.places) < 1e-5


@kinds
@pytest.mark.parametrize(
    ("tensor", "first"),
    [
        ("layers.00.attention.query_key_value.weight", "layers.00.attention"),
        ("layers.01.attention.output.weight", "layers.01.attention"),
        ("layers.01.feed_forward.outer.weight", "layers.01.feed_forward"),
        ("layers.02.attention.query_key_value.weight", "layers.02.attention"),
        ("layers.02.feed_forward.inner.weight", "layers.02.feed_forward"),
    ],
)
def test_a_fault_in_one_layer_is_named(make_bundle, tmp_path, kind, tensor, first):
    good = make_bundle(**KINDS[kind], verify=False)
    bundle = open_bundle(good)
    m = bundle.manifest
    reference = reference_for(m.config, m.dialect, m.memory_length, weights_of_bundle(bundle.file(m.weights), m))
    path = Path(shutil.copytree(good, tmp_path / "a.txl"))
    scale_tensor(path, tensor, 1.2)
    found = bisect_against_reference(open_bundle(path), reference)
    assert found.first == first


def test_the_command_names_it(make_bundle, tmp_path, monkeypatch, capfd):
    good = make_bundle(config={"n_layer": 3}, verify=False)
    code, shown, said = call_main(("verify", good, "--bisect"), monkeypatch, capfd)
    assert code == 0, said
    assert "no layer differs" in shown
    path = Path(shutil.copytree(good, tmp_path / "a.txl"))
    (table,) = (name for name in open_header(path / "weights.safetensors") if "01.attention.position.table" in name)
    scale_tensor(path, table, 3.0)
    code, shown, _ = call_main(("verify", path, "--bisect", "--json"), monkeypatch, capfd)
    assert code == 1
    assert json.loads(shown)["first"] == "layers.01.attention", "a folded table that is not what the weights fold to"


def open_header(path: Path) -> list[str]:
    data = path.read_bytes()
    return [name for name in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]) if name != "__metadata__"]


def test_what_an_engine_needs_is_named(make_bundle, monkeypatch):
    monkeypatch.setattr("txl_export.families.transformer_xl.parity.bisecting.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"polygraphy is not installed.*pip install .*\[debug\]"):
        bisect_engine(open_bundle(make_bundle(config={"n_layer": 3}, verify=False)), "rtx")


def test_sides_are_compared_in_order():
    one, other = "layers.00.attention", "layers.00.feed_forward"
    good, bad = {one: np.ones(3), other: np.full(3, 4.0)}, {one: np.ones(3), other: np.array([4.0, np.nan, 4.0])}
    assert [(place.name, place.difference) for place in compare(good, good)] == [(one, 0.0), (other, 0.0)]
    assert [place.difference for place in compare(bad, good)] == [0.0, np.inf]


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["rtx", "tensorrt"])
def test_an_engine_agrees_with_onnx_runtime(make_bundle, target):
    from txl_runtime.device.choosing import NO_GPU
    from txl_runtime.device.gpu import shows_gpu

    if not shows_gpu():
        pytest.skip(NO_GPU)
    pytest.importorskip("polygraphy")
    pytest.importorskip({"rtx": "tensorrt_rtx"}.get(target, target))
    assert bisect_engine(open_bundle(make_bundle(config={"n_layer": 3}, verify=False)), target).first is None
