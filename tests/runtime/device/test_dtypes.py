"""Numbers as devices hold them."""

from __future__ import annotations

import numpy as np
import pytest
from txl_runtime.device.dtypes import from_float32, to_float32


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_numbers_come_back_as_the_type_holds_them(name):
    import ml_dtypes

    types = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32) * np.float32(100)
    values[:6] = [0.0, -0.0, np.inf, -np.inf, 1.00390625, 3.3e38]
    stored = from_float32(values, name)
    with np.errstate(over="ignore"):
        expected = values.astype(types[name])
    assert stored.tobytes() == expected.tobytes()
    assert to_float32(stored, name).tobytes() == expected.astype(np.float32).tobytes()
    assert np.isnan(to_float32(from_float32(np.array([np.nan], np.float32), name), name)).all()


def test_codes_of_fp8_are_the_nearest_and_int8_is_symmetric():
    import ml_dtypes

    every = to_float32(np.arange(256, dtype=np.uint8), "float8e4m3fn")
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    real = ~np.isnan(theirs)
    assert (every[real] == theirs[real]).all()
    between = (theirs[:126] + theirs[1:127]) / 2
    draws = np.random.default_rng(0).normal(size=5000) * np.exp(np.random.default_rng(1).uniform(-9, 7, 5000))
    values = np.concatenate([draws, between, -between, [0.0, -0.0, 448, 464, -1e9]]).astype(np.float32)
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert from_float32(values, "float8e4m3fn").tobytes() == expected.tobytes()
    assert from_float32(np.float32([1.5, 2.5, -0.6, 127.4, -200]), "int8").tolist() == [2, 2, -1, 127, -127]
