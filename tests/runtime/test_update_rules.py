"""An ONNX Runtime without TensorScatter runs what it can."""

from __future__ import annotations

import onnxruntime
import pytest
from frozen import frozen
from txl_runtime import BundleError, load
from txl_runtime.selftest import run_selftest
from txl_runtime.update_rules import missing_version, usable_updates


@pytest.mark.parametrize(
    ("version", "usable"),
    [
        ("1.20.1", ("rolled",)),
        ("1.23.2", ("rolled",)),
        ("1.24.1", ("rolled",)),
        ("1.25.0", ("ring", "rolled")),
        ("1.31.1", ("ring", "rolled")),
        ("2.0.0", ("ring", "rolled")),
        ("of our own", ("ring", "rolled")),
    ],
)
def test_a_ring_is_for_versions_that_have_its_operator(version, usable, monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", version)
    assert usable_updates(("ring", "rolled")) == usable
    assert usable_updates(("rolled",)) == ("rolled",)
    assert usable_updates(("ring",)) == ("ring",), "then loading says what is wanted"
    assert usable_updates(("replace",)) == ("replace",)


def test_an_old_version_loads_rolled_programs(monkeypatch):
    assert load(frozen("ring")).update == "ring"
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    model = load(frozen("ring"))
    assert model.update == "rolled"
    assert run_selftest(model).passed


@pytest.mark.parametrize(
    ("opset", "version", "missing"),
    [
        (18, "1.20.0", ""),
        (21, "1.20.0", ""),
        (22, "1.20.1", "1.21"),
        (22, "1.21.1", ""),
        (23, "1.22.1", "1.23"),
        (23, "1.23.2", ""),
        (24, "1.24.4", "1.25"),
        (24, "1.25.0", ""),
        (24, "of our own", ""),
    ],
)
def test_the_first_version_that_runs_an_opset_is_known(opset, version, missing):
    assert missing_version(opset, version) == missing


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (
            "ring",
            "ONNX Runtime 1.25 or newer for opset 24, and this is 1.23.2; install that, or load with update rolled",
        ),
        ("rolled", "expected a graph ONNX Runtime can load"),
    ],
)
def test_an_engine_without_the_opset_of_a_graph_says_which_version_has_it(monkeypatch, update, said):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("opset 24 is under development")

    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(BundleError) as caught:
        load(frozen("ring"), "cpu", update=update)
    assert said in str(caught.value)
