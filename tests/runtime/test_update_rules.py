"""An ONNX Runtime without TensorScatter runs what it can."""

from __future__ import annotations

import onnxruntime
import pytest
from txl_export import verify
from txl_runtime import load
from txl_runtime.update_rules import usable_updates


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


def test_an_old_version_loads_and_verifies_rolled_programs(make_bundle, monkeypatch):
    path = make_bundle()
    assert load(path).update == "ring"
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    assert load(path).update == "rolled"
    parity = verify(path, segments=4)
    assert parity.passed
    assert {chain.name.rpartition(", ")[2] for chain in parity.chains} == {"rolled"}
