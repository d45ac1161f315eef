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
