"""The loop on the CPU by its protocol: what is not committed did not happen, and a sequence can change places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frozen import frozen
from txl_runtime import load

B, V = 3, 41
both = pytest.mark.parametrize("update", ["ring", "rolled"])


def open_loop(update: str) -> Any:
    return load(frozen("ring"), backend="cpu", threads=1, update=update).open_loop()


def segment(columns: int, seed: int) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(seed).integers(0, V, (B, columns)).astype(np.int32)}


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@both
def test_counts_are_what_they_are_at_each_call_also_where_one_array_is_given_again(update):
    loop, fixed, changing = open_loop(update), counts(4, 4, 4), counts(1, 2, 0)
    fixed.flags.writeable = False
    for turn in range(3):
        assert [loop.count(fixed), loop.count(fixed)] == [B, B]
        assert loop.counters.valid.tolist() == [4, 4, 4]
        assert loop.count(changing) == 2 + (turn > 0)
        assert loop.counters.valid.tolist() == changing.tolist()
        changing[2] = 3
        assert loop.count(changing) == B
        assert loop.counters.valid.tolist() == changing.tolist()


@both
def test_some_tensors_can_be_taken_alone(update):
    loop = open_loop(update)
    loop.run(segment(4, 0), counts(4, 2, 0))
    whole = loop.take(0)
    name = next(iter(whole.tensors))
    part = loop.take(0, [name])
    assert list(part.tensors) == [name]
    assert part.tensors[name].tobytes() == whole.tensors[name].tobytes()
    assert loop.take(0, []).tensors == {}
    assert loop.take(2).tensors[name].shape[0] == 0


@both
def test_a_result_gives_what_is_asked_of_it(update):
    loop, tokens = open_loop(update), segment(4, 1)["tokens"]
    targets = segment(4, 2)["tokens"]
    result = loop.run({"tokens": tokens, "targets": targets}, counts(4, 2, 0), "nll")
    rows = result.rows()
    assert result.last().tobytes() == np.stack([rows[0, 3], rows[1, 1], rows[2, 0]]).tobytes()
    flat = rows.reshape(4 * B, -1)
    whole = np.empty((4 * B, V), np.float32)
    loop.output.logprobs(flat, whole)
    expected = -np.take_along_axis(whole, targets.reshape(-1, 1), axis=1).reshape(B, 4)
    np.testing.assert_allclose(result.nll(), expected, rtol=0, atol=2e-6)
