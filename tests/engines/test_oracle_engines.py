"""Engines of other packages' models with state: TensorRT-RTX builds the last program of every stored case."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_forms import ADAPTED, form_of
from oracle_stateful import BUILDS, Case, exported
from txl_engines.building import CompiledEngines
from txl_engines.composing import compose
from txl_export import export
from txl_export.exporting import ExportResult
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.engines.library import load_library
from txl_runtime.errors import BundleError
from txl_runtime.listener import Silent

GPU = 86
REFUSED: dict[str, str] = {}
"""The library's words on the cases that it refuses."""
OTHERWISE = {"xt01_rotary_shift", "xt02_t5_bias"}
"""Cases whose minimal module grows through many sizes and whose adapter counts: what people export is the adapter's."""


def build(made: ExportResult, folder: Path) -> int:
    """Build the last program of the longest segments, the states as full as they get; the bytes of the engine."""
    bundle, engine = open_bundle(made.path), folder / "step.engine"
    longest = bundle.manifest.segment_lengths[0]
    program = [one for one in bundle.manifest.programs if one.segment_length == longest][-1]
    maker = CompiledEngines(load_library("rtx"), "fp32", (GPU,))
    maker.make(maker.read(compose(bundle, program), program, bundle.path), program, engine, Silent())
    return engine.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILDS.keys() - OTHERWISE))
def test_every_case_is_built_or_its_refusal_is_known(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    made = exported(name)
    if made.manifest.family["growth"] == "symbolic":  # engines need to know the number of rows
        made = exported(name, "stages")
    if name in REFUSED:
        with pytest.raises(BundleError, match=REFUSED[name]):
            build(made, tmp_path)
    else:
        assert build(made, tmp_path) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OTHERWISE))
def test_the_adapters_graphs_are_built(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    case = Case(name)
    form = form_of(case)
    if form.how != f"adapter {ADAPTED[name]}":
        pytest.skip(f"the package of {name} is not installed; make packages")
    sizes = {"batch_size": case.batch_size, "segment_length": case.segment_lengths()[0]}
    assert build(export(form.spec, tmp_path / "model.txl", **sizes, verify=False), tmp_path) > 1000
