"""Replies held against what is expected: what may differ by rounding, and what may not differ at all."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from txl_runtime import StreamState
from txl_runtime.bundle.reading import open_bundle

from conformance.driver import packed, packed_bytes, unpacked
from conformance.judging import Judge, Wrong, same_bits
from conformance.run import FOLDER

LOGPROBS = np.array([[-20.0, -1.0, np.float32(-0.5)]], np.float32)
STATE = StreamState(
    "m" * 64, np.array([2, 1], np.int32), {"k": np.ones((2, 2, 3), np.float32)}, np.array([2, 1], np.int32)
)
REPLY = {
    "ok": {
        "outputs": {"logprobs": packed(LOGPROBS), "which": packed(np.array([1, 2], np.int32))},
        "fill": [2, 1],
        "bytes": packed_bytes(STATE.to_bytes()),
    }
}


@pytest.fixture
def judge() -> Judge:
    return Judge(open_bundle(FOLDER / "bundles" / "ring").manifest)


def changed(**parts: Any) -> dict[str, Any]:
    """The reply with other parts; one that is None is left out."""
    reply = copy.deepcopy(REPLY)
    for name, value in parts.items():
        inner = reply["ok"] if name in reply["ok"] else reply["ok"]["outputs"]
        inner[name] = value
        if value is None:
            del inner[name]
    return reply


def other(**fields: Any) -> str:
    """The bytes of another state."""
    parts = {name: getattr(STATE, name) for name in ("model_id", "fill", "memory", "head")}
    return packed_bytes(StreamState(**{**parts, **fields}).to_bytes())


def test_the_same_passes_to_the_bit(judge: Judge) -> None:
    judge.check(REPLY, copy.deepcopy(REPLY))
    assert judge.largest == 0
    assert same_bits(REPLY, copy.deepcopy(REPLY))
    judge.check(REPLY, {"ok": {**REPLY["ok"], "seconds": 3}})


def test_rounding_passes_and_is_not_the_same(judge: Judge) -> None:
    near = changed(
        logprobs=packed(LOGPROBS + np.float32(5e-5)), bytes=other(memory={"k": np.full((2, 2, 3), 1.00004, np.float32)})
    )
    judge.check(REPLY, near)
    assert 3e-5 < judge.largest < 1e-4
    assert not same_bits(REPLY, near)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (changed(logprobs=packed(LOGPROBS + np.float32(2e-4))), r"outputs\.logprobs differs by 0\.0002, limit 0\.0001"),
        (changed(logprobs=packed(LOGPROBS * np.float32(np.nan))), "outputs.logprobs differs by inf"),
        (changed(logprobs=packed(LOGPROBS[0])), r"outputs\.logprobs is float32 \[3\], expected float32 \[1, 3\]"),
        (changed(logprobs=packed(LOGPROBS.astype(np.float16))), "outputs.logprobs is float16"),
        (changed(logprobs=[1.0]), "outputs.logprobs: an array is"),
        (changed(logprobs={"dtype": "float32", "shape": [2**62, 2**62, 0], "data": ""}), "outputs.logprobs: an array"),
        (changed(logprobs=None), "outputs has which, expected logprobs, which"),
        (changed(which=packed(np.array([1, 3], np.int32))), r"outputs\.which differs: \[1, 3\]"),
        (changed(fill=[2, 2]), r"fill is \[2, 2\], expected \[2, 1\]"),
        (changed(fill=[2.0, 1.0]), r"fill is \[2\.0, 1\.0\]"),
        (changed(fill="21"), "fill is 21"),
        (changed(bytes=other(fill=np.array([2, 2], np.int32))), "saved.fill differs"),
        (changed(bytes=other(head=np.array([0, 1], np.int32))), "saved.head differs"),
        (changed(bytes=other(model_id="n" * 64)), "the saved state is of model 'nnnnnnnnnnnn'"),
        (changed(bytes=other(memory={"v": np.ones((2, 2, 3), np.float32)})), "the saved state has fill, head, v"),
        (changed(bytes="AAAA"), "bytes: "),
        ({"ok": []}, "the reply has"),
        ({"refused": "no", "kind": "usage"}, "refused: no"),
    ],
    ids=range(18),
)
def test_what_differs_is_wrong(reply: dict[str, Any], told: str, judge: Judge) -> None:
    with pytest.raises(Wrong, match=told):
        judge.check(REPLY, reply)
    assert not same_bits(REPLY, reply)


def test_a_refusal_is_expected_with_its_kind(judge: Judge) -> None:
    expected = {"refused": "rows", "kind": "usage"}
    judge.check(expected, {"refused": "in other words", "kind": "usage"})
    with pytest.raises(Wrong, match="refused as 'bundle', expected 'usage'"):
        judge.check(expected, {"refused": "rows", "kind": "bundle"})
    with pytest.raises(Wrong, match="was not refused"):
        judge.check(expected, REPLY)


@pytest.mark.parametrize(
    "array", [np.zeros((0, 3), np.float32), np.array(True), np.arange(6, dtype=np.int32).reshape(2, 3).T]
)
def test_arrays_come_back_as_they_went(array: np.ndarray) -> None:
    found = unpacked(packed(array))
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())
