"""Odd inputs: an input whose NaN is hidden is named, and large numbers are compared where the module itself can say."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from stand_ins.step_stream import ArrayModel, ArrayStream, NumpyReference
from txl_export.proof.parity import ParityError
from txl_export.proof.unusual_inputs import FAR, far_gates, hidden_nan
from txl_runtime.errors import BackendError, UsageError
from verified_steps import Heard, failing, verified


class Bounds(ArrayStream):
    """Hides NaN of its input, as a layer with bounded gates does."""

    def compute(self, x, states):
        return super().compute(np.nan_to_num(x), states)


class BoundsItsState(ArrayStream):
    """Hides NaN of one state in an output."""

    def compute(self, x, states):
        return super().compute(x, {**states, "rows": np.nan_to_num(states["rows"])})


class Refuses(Bounds):
    """Takes no NaN, and so hides none."""

    def run(self, inputs, lengths=None, commit=True):
        if np.isnan(inputs["x"]).any():
            raise BackendError("a step failed")
        return super().run(inputs, lengths, commit)


class RefusingReference(NumpyReference):
    """A module that asserts that what it reads is finite."""

    def step(self, inputs, states, valid):
        if np.isnan(inputs["x"]).any() or any(np.isnan(one).any() for one in states.values()):
            raise UsageError("the module failed")
        return super().step(inputs, states, valid)


def told(stream=ArrayStream, reference=None, streams="independent", backend="cpu"):
    model = ArrayModel(stream)
    model.manifest = msgspec.structs.replace(model.manifest, streams=streams)
    model.backend = SimpleNamespace(name=backend)
    return hidden_nan(model, reference or NumpyReference(), None)


@pytest.mark.parametrize("streams", ["independent", "lockstep"])
def test_a_nan_of_an_input_that_the_bundle_hides_is_told_by_name(streams):
    assert told(streams=streams) == ""
    assert told(Bounds, streams=streams).startswith(
        "a NaN in input x does not show in output words, as it does in the module; where a sensor may break, run with "
        "require_finite=True"
    )


@pytest.mark.parametrize(
    ("stream", "said"),
    [(BoundsItsState, {}), (Refuses, {}), (Bounds, {"reference": RefusingReference()}), (Bounds, {"backend": "rtx"})],
    ids=["a state", "refused", "refused by the module", "a device"],
)
def test_nan_of_a_state_and_what_is_refused_hide_nothing_and_a_device_is_not_asked(stream, said):
    assert told(stream, **said) == ""


def test_hidden_nan_is_no_failure_and_told_once():
    heard = Heard()
    verified(Bounds, listener=heard).require()
    assert sum("a NaN in input x" in line for line in heard.warnings) == 1


class CoarseInFloat32(NumpyReference):
    """Far from itself, by this share of every value, where inputs are large."""

    def __init__(self, own: float, off: float = 0.0) -> None:
        self.own, self.off = own, off

    def step(self, inputs, states, valid):
        outputs, after = super().step(inputs, states, valid)
        off = self.off * (np.abs(inputs["x"]).max() > 20) * np.maximum(1, np.abs(outputs["mean"]))
        return outputs | {"mean": outputs["mean"] + off}, after

    def in_single(self):
        return CoarseInFloat32(self.own, self.own)


class WrongIfLarge(ArrayStream):
    """Is wrong where inputs are large."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs | {"mean": outputs["mean"] + 100 * (np.abs(x).max() > 20)}, after


@pytest.mark.parametrize(("own", "judged"), [(0.004, True), (0.006, False)])
def test_large_numbers_are_judged_where_the_modules_own_rounding_leaves_room(own, judged):
    (gate,), where = far_gates(ArrayModel(WrongIfLarge), CoarseInFloat32(own))
    assert (gate.passed is False, "output mean" in where) == (judged, judged)
    assert gate.limit == 0.01
    (gate,), _ = far_gates(ArrayModel(), CoarseInFloat32(own))
    assert gate.passed, "what the module itself rounds is no failure"


class ElseIfLarge(ArrayStream):
    """Does something else with inputs that the chains never show."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs | {"mean": np.clip(outputs["mean"], -20, 20)}, after


class NothingIfZero(ArrayStream):
    """Does something else where there is nothing to read."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | ({} if x.any() else {"h": states["h"]})


@pytest.mark.parametrize("stream", [ElseIfLarge, NothingIfZero])
def test_what_shows_with_inputs_far_from_the_usual_alone_is_found(stream):
    samples = {"x": np.random.default_rng(0).normal(size=(2, 50, 3)).astype(np.float32)}
    for given in (None, samples):
        parity = verified(stream, samples=given)
        assert failing(parity) == {FAR}
        with pytest.raises(
            ParityError, match=r"with x (100 times as large|all zero).* (output mean|state h) is .* where"
        ):
            parity.require()
