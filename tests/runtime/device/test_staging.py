"""Results that come back through a bounded piece of page-locked memory, however large they are (L5)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device
from txl_runtime.bundle.tables import TensorSpec
from txl_runtime.device import staging
from txl_runtime.device.blocks import Results
from txl_runtime.device.cuda_context import open_lock
from txl_runtime.device.staging import LARGEST, PIECE, Staging
from txl_runtime.device.tail import Tail

B, V = 3, 41
both = pytest.mark.parametrize("update", ["ring", "rolled"])


def tokens_of(columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (B, columns)).astype(np.int32)


@both
@pytest.mark.parametrize("piece", [40, 240, 700])
def test_l5_results_that_do_not_fit_come_in_pieces_and_are_the_same(opened, update, piece, monkeypatch):
    theirs = opened(update).stream()
    monkeypatch.setattr(staging, "PIECE", piece)
    monkeypatch.setattr(staging, "LARGEST", B * V * 4)  # a step of one position fits
    monkeypatch.setattr(staging, "SMALLEST", 16)
    model = opened(update)
    ours, memory = model.stream(), model.backend.driver.memory
    for seed in range(8):
        for columns in (1, 4, 3, 2):
            mine, other = (stream.step(tokens_of(columns, seed)) for stream in (ours, theirs))
            assert mine.tobytes() == other.tobytes()
    assert ours.score(tokens_of(9)).tobytes() == theirs.score(tokens_of(9)).tobytes()
    inputs = sum(len(block._staged) for block, _ in ours.loop._blocks.values())
    assert memory.used("pinned") <= inputs + B * V * 4 + 2 * piece
    assert memory.used("pinned") < inputs + B * 4 * V * 4, "no room for the log-probabilities of a whole segment"


def test_l5_a_stream_takes_at_most_64_mib_for_results_of_any_size():
    driver = FakeDriver(capacity=2**40)
    device = open_fake_device(driver)
    queue, lock = device.queue(), open_lock()
    found = Staging(device, queue, Tail(device, queue, lock))
    row = 32 * 267_735 * 4
    assert found.fits(row), "a token of 32 sequences arrives with its step"
    assert not found.fits(64 * row), "a segment of 64 does not: 2.2 GB"
    for size in (1, 5000, row, LARGEST):
        assert found.grow(size) or len(found.arrived) >= size
    found.open_buffers(64 * row)
    assert driver.memory.used("pinned") == LARGEST + 2 * PIECE == 64 * 2**20


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_part_in_pieces_is_what_one_copy_brings(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    sizes = tuple(data.draw(st.integers(1, size)) for size in shape)
    device = open_fake_device(FakeDriver())
    queue, lock = device.queue(), open_lock()
    results = Results(device, [TensorSpec(name="x", dtype="float32", shape=shape)])
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    part = results.part("x", sizes)
    with lock, device.current():
        queue.send(part.address, whole.ctypes.data, whole.nbytes)
        queue.wait()
    brought = Staging(device, queue, Tail(device, queue, lock))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "PIECE", 4 * data.draw(st.integers(1, 40)))
        patch.setattr(staging, "SMALLEST", 4)
        brought.open_buffers(part.size)
        found = brought.bring(part)
    assert np.array_equal(found, whole[tuple(slice(size) for size in sizes)])
