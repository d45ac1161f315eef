"""The self-test's vectors of any step: what the reference stored is replayed, and whatever differs is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from stand_ins.step_stream import AXES, ArrayModel, ArrayStream, NumpyReference
from txl_export.proof.selftest_vectors import MOST_STEPS, drawn_places, selftest_vectors, values_kept
from txl_runtime import BundleError, CheckError
from txl_runtime.selftest import SelftestResult, run_selftest

Vectors = dict[str, Any]


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    return selftest_vectors(ArrayModel().manifest, NumpyReference())


def replayed(vectors: Vectors, stream: type[ArrayStream] = ArrayStream, precision: str = "fp32") -> SelftestResult:
    return run_selftest(ArrayModel(stream, vectors, precision))


def test_what_the_reference_computed_is_replayed_with_one_to_all_sequences(vectors):
    result = replayed(vectors)
    result.require()
    assert result.streams == (1, 2, 3)
    assert 0 < result.largest["outputs"] < 1e-5
    assert 0 < result.largest["state"] < 1e-5
    assert result.limits == {"outputs": 1e-4, "state": 1e-4}
    named = "backend steps streams max_outputs max_state limit_outputs limit_state passed"
    assert list(result.document()) == named.split()


def test_the_chain_is_short_and_has_every_length_idle_sequences_and_resets(vectors):
    assert set(vectors["length"].tolist()) == {1, 4}
    assert 6 <= len(vectors["length"]) <= MOST_STEPS
    assert (vectors["counts"] == 0).any()
    assert vectors["reset"].any()
    assert not vectors["reset"].all(axis=1).any(), "sequences begin anew one by one where they can"
    assert sum(values.nbytes for values in vectors.values()) < 300_000
    assert all(values.dtype != object for values in vectors.values())


def test_places_are_told_once_where_they_are_the_same_in_every_step_and_none_is_compared_twice(vectors):
    assert vectors["place/mean"].tolist() == [0, 1, 2], "of an output without positions all values are compared"
    assert vectors["output/mean"].shape == (*vectors["counts"].shape, 3)
    assert vectors["place/words"].shape == vectors["output/words"].shape == (*vectors["counts"].shape, 20)
    for places, count in zip(vectors["place/words"].reshape(-1, 20), vectors["counts"].ravel(), strict=True):
        assert len(set(places.tolist())) == (5 * count or 1), "all values of the positions that count, and no others"
        assert places.max() < (5 * count or 1)


@pytest.mark.parametrize(("sizes", "of"), [((2, 3), (4, 3)), ((3, 2), (3, 4))], ids=["first", "last"])
def test_places_are_drawn_among_the_positions_that_count(sizes, of):
    places = drawn_places(sizes, 10, np.random.default_rng(0), of)
    counted = np.arange(12).reshape(of)[tuple(map(slice, sizes))]
    assert set(places.tolist()) == set(counted.ravel().tolist())
    assert len(places) == 10, "the same again, where there are fewer values than are kept"


def test_places_as_older_bundles_have_them_are_replayed(vectors):
    old = {**vectors, "place/mean": np.broadcast_to(vectors["place/mean"], vectors["output/mean"].shape)}
    assert replayed(old).largest == replayed(vectors).largest


@pytest.mark.parametrize(
    "places", [np.zeros(4, np.int32), np.zeros((2, 3, 3), np.int32), np.array([0, 1, 3], np.int32)]
)
def test_places_that_do_not_fit_are_refused(vectors, places):
    with pytest.raises(BundleError, match="stored vectors do not fit"):
        replayed({**vectors, "place/mean": places})


@pytest.mark.parametrize(("batch", "kept"), [(1, 64), (8, 64), (16, 32), (100, 8)])
def test_many_sequences_have_fewer_values_each_but_never_fewer_together(batch, kept):
    model = msgspec.structs.replace(ArrayModel().manifest, batch_size=batch)
    wide = msgspec.structs.replace(model.outputs[0], shape=("B", "L", 1000))
    assert values_kept(model, wide) == kept


def test_large_inputs_make_the_chain_shorter():
    manifest = ArrayModel().manifest
    wide = msgspec.structs.replace(manifest.inputs[0], shape=("B", "L", 3, 100_000))
    model = msgspec.structs.replace(manifest, inputs=(wide, *manifest.inputs[1:]))

    class Narrow(NumpyReference):
        def step(self, inputs, states, valid):
            return super().step({"x": inputs["x"][..., 0]}, states, valid)

    found = selftest_vectors(model, Narrow())
    assert len(found["length"]) == 6
    assert found["reset"].any()


class Off(ArrayStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"h": after["h"] + np.float32(2e-4)}


class OffOutput(ArrayStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs | {"mean": outputs["mean"] + np.float32(2e-4)}, after


class Miscounts(ArrayStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"count": after["count"] + np.int32(1)}


class ForgetsToForget(ArrayStream):
    def reset(self, rows=None):
        held = self.held["rows"]
        super().reset(rows)
        self.held["rows"] = held


class IdleMoves(ArrayStream):
    def keep(self, live, after):
        return dict(after)


class Nan(ArrayStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs | {"words": np.full_like(outputs["words"], np.nan)}, after


class OtherShape(ArrayStream):
    def state(self):
        found = super().state()
        return found | {"rows": found["rows"][:, 1:]}


@pytest.mark.parametrize(
    ("stream", "name"),
    [
        (Off, "state"),
        (OffOutput, "outputs"),
        (Miscounts, "state"),
        (ForgetsToForget, "outputs"),
        (IdleMoves, "state"),
        (Nan, "outputs"),
        (OtherShape, "state"),
    ],
)
def test_whatever_differs_fails(vectors, stream, name):
    result = replayed(vectors, stream)
    assert result.largest[name] > 1e-4
    assert not result.passed
    with pytest.raises(
        CheckError, match=r"self-test failed on arrays of NumPy: outputs differ by .*, state by "
    ) as caught:
        result.require()
    assert len(str(caught.value).splitlines()) == 1


def test_below_float32_it_may_not_become_twice_as_far_away(vectors):
    near = vectors | {"reached": np.array([1e-3, 2e-3])}
    assert replayed(near, Off, "fp16").limits == pytest.approx({"outputs": 2.1e-3, "state": 4.1e-3})
    assert replayed(near, Off, "fp16").passed
    far = vectors | {"reached": np.array([1e-6, 1e-6])}
    assert not replayed(far, Off, "fp16").passed


@pytest.mark.parametrize("reached", [np.nan, -1.0, np.inf, 1e30, None])
def test_no_bundle_passes_by_what_it_says_that_it_reached(vectors, reached):
    said = vectors | ({} if reached is None else {"reached": np.array([reached, reached])})
    with pytest.raises(BundleError, match=r"stored vectors do not fit .*reached"):
        replayed(said, precision="fp16")
    assert not replayed(said, Off).passed, "float32 has a limit of its own"


def test_a_bundle_of_small_numbers_has_reached_no_more_than_the_largest_of_them(vectors):
    small = {name: values / 100 if name.startswith("output/") else values for name, values in vectors.items()}
    with pytest.raises(BundleError, match=r"reached is \[0\.5, 0\.5\], expected 0 … 0\.0\d+ and"):
        replayed(small | {"reached": np.array([0.5, 0.5])}, precision="fp16")


CHANGES: dict[str, Callable[[Vectors], object]] = {
    "no inputs": lambda found: found.pop("input/x"),
    "no states": lambda found: found.pop("state/h"),
    "no resets": lambda found: found.pop("reset"),
    "only idle steps": lambda found: found.update(counts=found["counts"] * 0),
    "places out of range": lambda found: found.update({"place/words": found["place/words"] + 10_000}),
    "places of states out of range": lambda found: found.update({"state_place/h": found["state_place/h"] + 99}),
    "fewer values": lambda found: found.update({"output/words": found["output/words"][..., :3]}),
    "fewer steps": lambda found: found.update({"input/x": found["input/x"][:2]}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_vectors_that_do_not_fit_are_refused(vectors, change):
    altered = dict(vectors)
    change(altered)
    with pytest.raises(BundleError, match="stored vectors do not fit") as caught:
        replayed(altered)
    assert str(caught.value).endswith("; export the model again")


def test_axes_of_sequences_may_stand_anywhere(vectors):
    assert AXES["h"] == 1
    assert vectors["state/h"].shape == (3, 4)
    assert vectors["state_shape/h"].tolist() == [1, 4]


class Rounds(NumpyReference):
    """In float32 far from itself where an input is large, or after a second segment."""

    def __init__(self, single: bool = False, always: bool = False) -> None:
        self.single, self.always = single, always

    def step(self, inputs, states, valid):
        outputs, after = super().step(inputs, states, valid)
        return outputs | {"mean": outputs["mean"] + self.single * ill(inputs["x"], states, self.always)}, after

    def in_single(self):
        return Rounds(True, self.always)


class RoundsToo(ArrayStream):
    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs | {"mean": outputs["mean"] + np.float32(ill(x, states, False))}, after


def ill(x: np.ndarray, states: Any, always: bool) -> Any:
    """The error of each sequence."""
    return 2e-4 * (always | (x[:, :, 0].max(1, keepdims=True) > 1.75) | (states["count"][:, None] >= 8))


def test_a_correct_bundle_of_a_model_that_amplifies_rounding_passes():
    found = selftest_vectors(ArrayModel().manifest, Rounds())
    assert found["reset"].all(axis=1).any()
    assert "rounding" not in found, "inputs are found on which it does not"
    assert (found["counts"] == 0).any()
    replayed(found, RoundsToo).require()
    assert not replayed(found, OffOutput).passed


def test_rounding_that_is_large_for_all_inputs_is_told():
    found = selftest_vectors(ArrayModel().manifest, Rounds(always=True))
    assert found["rounding"] == pytest.approx(2e-4, rel=0.2)
