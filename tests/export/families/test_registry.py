"""Families: adding one takes its folder and one line of the registry, nothing in the runtime or the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import txl_export
import txl_runtime
from frozen import frozen
from stand_ins.averaging import Average
from txl_export.families import registry
from txl_report.facts.model import describe_bundle
from txl_runtime import UsageError
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.selftest import run_selftest


@pytest.fixture
def averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line."""
    monkeypatch.setitem(registry.FAMILIES, "averaging", "stand_ins.averaging")
    order = ["averaging", *(name for name in registry.FAMILIES if name != "averaging")]
    monkeypatch.setattr(registry, "FAMILIES", {name: registry.FAMILIES[name] for name in order})


@pytest.mark.usefixtures("averaging")
def test_a_new_family_gets_everything(tmp_path: Path):
    made = txl_export.export(Average(4, 0.75), tmp_path / "average.txl", batch_size=2)
    assert made.parity is not None
    assert made.parity.passed
    model = txl_runtime.load(made.path)
    run_selftest(model).require()
    stream, values = model.stream(), np.ones((2, 4), np.float32)
    for step in range(1, 4):
        difference = stream.run({"values": values})["difference"]
        np.testing.assert_allclose(difference, 0.75**step, rtol=1e-5)
    assert txl_export.verify(made.path, segments=20).passed
    assert describe_bundle(model.manifest)["family"] == "averaging"
    assert registry.facts_of_bundle(model.manifest) == {"decay": "0.75"}


@pytest.mark.usefixtures("averaging")
def test_other_sources_still_find_their_family():
    assert registry.family_of_source("model.pt").__name__ == "txl_export.families.transformer_xl.family"
    assert registry.family_of_source("model.py:build").__name__ == "txl_export.families.own_module.family"
    old = open_bundle(frozen("0.8/tokens")).manifest
    assert registry.family_of_bundle(old).__name__ == "txl_export.families.transformer_xl.family"


def test_a_source_of_no_family_is_refused():
    with pytest.raises(UsageError, match="the checkpoint is Average, expected a path, a state dict"):
        registry.family_of_source(Average(1, 0.5))


def test_a_bundle_of_an_unknown_family_runs_and_is_not_verified(tmp_path: Path, averaging: None):
    made = txl_export.export(Average(1, 0.5), tmp_path / "average.txl", verify=False)
    registry.FAMILIES.pop("averaging")
    run_selftest(txl_runtime.load(made.path)).require()
    assert registry.facts_of_bundle(open_bundle(made.path).manifest) == {}
    with pytest.raises(UsageError, match="family is 'averaging', this version knows own_module, graph, transformer_xl"):
        txl_export.verify(made.path)


def test_a_file_of_that_name_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py:build").write_text(json.dumps({}))
    assert registry.family_of_source("model.py:build").__name__ == "txl_export.families.transformer_xl.family"
