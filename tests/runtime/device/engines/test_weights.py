"""Weights that engines share, laid out on a stand-in for a device."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from frozen import frozen
from resealing import copied
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device
from txl_runtime.bundle.engines.sidecar import GivenWeight
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.device.engines.weights import SharedWeights
from txl_runtime.errors import BackendError, BundleError


@pytest.fixture
def bundle() -> Bundle:
    return open_bundle(frozen("0.8/tokens"))


def weight(name: str, shape: tuple[int, ...], offset: int, turned: bool = False, dtype: str = "float16") -> GivenWeight:
    return GivenWeight(name=name, dtype=dtype, shape=shape, offset=offset, turned=turned)  # type: ignore[arg-type]


def test_each_lies_as_its_engine_wants_it_and_beginnings_of_others_are_those(bundle: Bundle) -> None:
    driver = FakeDriver()
    device = open_fake_device(driver)
    given = [
        weight("table", (40, 8), 64),
        weight("turned", (8, 40), 64, turned=True),
        weight("rows", (10, 8), 64),
        weight("heads", (2, 3, 5), 1000, turned=True, dtype="float32"),
        weight("brain", (6, 4), 2001, turned=True, dtype="bfloat16"),
    ]
    with device.current():
        queue = device.queue()
        weights = SharedWeights(bundle, given, device, queue)
    places = weights.addresses(given)
    assert places["rows"] == places["table"]
    assert len(set(places.values())) == 4
    assert all(address % 256 == 0 for address in places.values())
    file = (bundle.path / bundle.manifest.weights).read_bytes()

    def stored(dtype: str, count: int, offset: int) -> np.ndarray:
        return np.frombuffer(file, dtype, count, offset)

    def lies(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        return (
            driver.memory.view(places[name], int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
        )

    table = stored("<u2", 320, 64)
    np.testing.assert_array_equal(lies("table", "<u2", (40, 8)), table.reshape(40, 8))
    np.testing.assert_array_equal(lies("turned", "<u2", (8, 40)), table.reshape(40, 8).T)
    np.testing.assert_array_equal(
        lies("heads", "<u4", (2, 3, 5)), stored("<u4", 30, 1000).reshape(2, 5, 3).transpose(0, 2, 1)
    )
    np.testing.assert_array_equal(lies("brain", "<u2", (6, 4)), stored("<u2", 24, 2001).reshape(4, 6).T)
    assert weights.size < 5 * 1024, "nothing is there twice"


@pytest.mark.parametrize(("shape", "before_end"), [((8, 8), 100), ((1 << 30, 1 << 20), 1000), ((8, 8), -(1 << 62))])
def test_what_is_not_in_the_file_is_refused_before_memory_is_asked_for(bundle: Bundle, shape, before_end) -> None:
    driver = FakeDriver()
    device, end = open_fake_device(driver), bundle.manifest.weight_bytes
    with device.current():
        queue = device.queue()
        used = driver.memory.used()
        with pytest.raises(BundleError, match=r"ends before byte \d+, where a weight of an engine does"):
            SharedWeights(bundle, [weight("early", (8, 8), 0), weight("late", shape, end - before_end)], device, queue)
        assert driver.memory.used() == used


@pytest.mark.parametrize(("shape", "offset"), [((2**31 - 1,) * 32, 0), ((8, 8), 2**63 - 1)])
def test_a_weight_that_no_file_holds_is_refused_when_the_facts_of_an_engine_are_read(shape, offset) -> None:
    given = {"name": "w", "dtype": "float16", "shape": shape, "offset": offset, "turned": False}
    with pytest.raises(msgspec.ValidationError, match="a weight that no file holds"):
        msgspec.convert(given, GivenWeight)


def test_weights_that_were_replaced_since_are_refused(tmp_path: Path) -> None:
    path = copied(frozen("ring"), tmp_path / "small.txl")
    opened, device = open_bundle(path), open_fake_device(FakeDriver())
    file = path / opened.manifest.weights
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[::-1])
    with device.current(), pytest.raises(BundleError, match="is not the file that the bundle was opened with"):
        SharedWeights(opened, [weight("w", (8, 8), 0)], device, device.queue())


def test_a_device_that_has_no_room_for_them_says_so(bundle: Bundle) -> None:
    device = open_fake_device(FakeDriver(capacity=4096))
    with device.current():
        queue = device.queue()
        with pytest.raises(BackendError, match="memory"):
            SharedWeights(bundle, [weight("large", (64, 33), 0)], device, queue)
