"""Both forms of a bundle's graphs, compared: what verification demands of the form that the CPU runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from step_models import FEATURES, B, counting, recurrent
from txl_export.proof import same_bits
from txl_export.proof.bits import FORMS, Bits
from txl_export.proof.same_bits import compare_forms
from txl_runtime import Model, load
from txl_runtime.host import loop


def compared(model: Model) -> dict[str, int]:
    bits = Bits()
    compare_forms(model, None, bits)()
    return bits.found


@pytest.fixture
def masked(tmp_path) -> Callable[[], Model]:
    path = recurrent().write(tmp_path / "own.txl")
    return lambda: load(path, "cpu", threads=1)


def test_both_forms_give_the_same_bits(masked):
    assert compared(masked()) == {FORMS: 0}


def test_samples_are_what_both_forms_run_on(masked):
    bits, samples = Bits(), {"obs": np.full((B, 40, FEATURES), np.nan, np.float32), "starts": np.zeros((B,), bool)}
    compare_forms(masked(), samples, bits)()
    assert bits.found == {FORMS: 0}


def test_states_that_the_loop_does_not_keep_are_found(masked, monkeypatch):
    monkeypatch.setattr(loop.HostLoop, "_keep", lambda self, states, rows: None)
    assert compared(masked())[FORMS] > 0


def test_a_model_without_another_form_has_nothing_to_compare(tmp_path):
    assert compared(load(counting().write(tmp_path / "own.txl"), "cpu", threads=1)) == {}


def test_the_graphs_as_they_lie_are_opened_when_the_other_form_is_gone(masked, monkeypatch):
    """Two models would hold their weights at once."""
    model, bits = masked(), Bits()
    later, gone = compare_forms(model, None, bits), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    later()
    assert bits.found == {FORMS: 0}


@pytest.mark.parametrize(("plain", "differing"), [(0.0, 0), (1e-45, 1), (np.nan, 1)], ids=("zero", "least", "nan"))
def test_the_sign_of_a_zero_is_all_that_may_differ(masked, monkeypatch, plain, differing):
    runs = [[{"h": np.array([value, 1], np.float32)}] for value in (-0.0, plain)]
    monkeypatch.setattr(same_bits, "_run", lambda stream, calls: iter(runs.pop(0)))
    assert compared(masked()) == {FORMS: differing}
