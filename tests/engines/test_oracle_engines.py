"""Engines of other packages' models with state: TensorRT-RTX builds the last program of every stored case."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_forms import ADAPTED, form_of
from oracle_stateful import BUILDS, Case
from txl_engines.building import CompiledEngines
from txl_engines.composing import compose
from txl_export import export
from txl_export.families.own_module.spec import StepSpec
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.engines.library import load_library
from txl_runtime.errors import BundleError
from txl_runtime.listener import Silent

GPU = 86
REFUSED: dict[str, str] = {}
"""What the library says of the cases that it refuses."""
OTHERWISE = {"xt01_rotary_shift"}
"""Cases whose minimal module grows and whose adapter counts."""


def build(spec: StepSpec, case: Case, folder: Path) -> int:
    """Build the last program of a case's longest segments, its states as full as they get; the bytes of the engine."""
    length = case.segment_lengths()[0]
    made = export(
        spec,
        folder / "model.txl",
        batch_size=case.batch_size,
        segment_length=length,
        growth="stages",
        verify=False,
    )
    bundle, engine = open_bundle(made.path), folder / "step.engine"
    program = bundle.manifest.programs[-1]
    maker = CompiledEngines(load_library("rtx"), "fp32", (GPU,))
    maker.make(maker.read(compose(bundle, program), program, bundle.path), program, engine, Silent())
    return engine.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILDS))
def test_every_case_is_built_or_its_refusal_is_known(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    case = Case(name)
    if name in REFUSED:
        with pytest.raises(BundleError, match=REFUSED[name]):
            build(case.build(), case, tmp_path)
    else:
        assert build(case.build(), case, tmp_path) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OTHERWISE))
def test_the_adapters_graphs_are_built(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has no wheel for this platform or Python")
    case = Case(name)
    form = form_of(case)
    if form.how != f"adapter {ADAPTED[name]}":
        pytest.skip(f"the package of {name} is not installed; make packages")
    assert build(form.spec, case, tmp_path) > 1000
