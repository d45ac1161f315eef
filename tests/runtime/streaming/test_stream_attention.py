"""A look from a stream: it changes nothing, sees what the stream remembers, and refuses what is no segment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from stand_ins.engine import open_stand_in
from txl_runtime import Model, UsageError, load
from txl_runtime import model as model_module
from txl_runtime.bundle.reading import open_bundle

B, M, L = 3, 7, 4
HAVING: dict[str, Any] = {"config": {}, "batch_size": B, "verify": False, "attention": True}


@pytest.fixture(scope="module")
def model(make_bundle):
    return load(make_bundle(**HAVING))


def segments(count: int) -> Any:
    draws = np.random.default_rng(3)
    for _ in range(count):
        yield draws.integers(0, 60, (B, L)), draws.integers(0, L + 1, B)


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_a_look_changes_no_bit(make_bundle, update):
    looking, alone = (load(make_bundle(**HAVING), update=update).stream() for _ in range(2))
    for tokens, counts in segments(7):
        looking.attention(tokens, counts)
        assert np.array_equal(looking.step(tokens, counts), alone.step(tokens, counts))
        looking.attention(tokens[:, :1])
        one, other = looking.snapshot(), alone.snapshot()
        assert np.array_equal(one.fill, other.fill)
        assert np.array_equal(one.head, other.head)
        assert all(np.array_equal(one.memory[name], other.memory[name]) for name in one.memory)


def test_every_sequence_looks_alone(model):
    """Beside others, without them, and when they are idle: the same to the bit."""
    stream = model.stream()
    for tokens, counts in segments(4):
        stream.step(tokens, counts)
    whole = stream.attention(tokens)
    assert whole.shape == (2, B, 2, L, M + L)
    assert not stream.attention(tokens, [0, 0, 0]).any()
    assert np.array_equal(stream.attention(tokens, [0, L, 0])[:, 1], whole[:, 1])
    single = model.stream(1)
    single.put(0, stream.take(1))
    assert np.array_equal(single.attention(tokens[1:2])[:, 0], whole[:, 1])


def test_slots_are_memory_rows_then_the_segment(model):
    stream = model.stream(1)
    tokens = np.arange(4)[None]
    seen = stream.attention(tokens)
    assert not seen[..., :M].any(), "nothing is remembered"
    assert (np.triu(seen[0, 0, 0, :, M:], 1) == 0).all()
    assert (np.tril(seen[0, 0, 0, :, M:]) > 0)[np.tril_indices(4)].all()
    stream.step(tokens[:, :3])
    seen = stream.attention(tokens[:, :2])
    assert seen.shape == (2, 1, 2, 2, M + 2)
    assert not seen[..., : M - 3].any()
    assert (seen[..., M - 3 : M] > 0).all()


def test_a_limit_on_memory_rows_counts(model):
    stream = model.stream(1, memory_length=2)
    tokens = np.arange(4)[None]
    stream.step(tokens)
    stream.step(tokens)
    seen = stream.attention(tokens)
    assert not seen[..., : M - 2].any()
    assert (seen[..., M - 2 : M] > 0).all()
    assert not model.stream(1, memory_length=0).attention(tokens)[..., :M].any()


def test_the_program_is_opened_when_it_is_first_asked_for(make_bundle, monkeypatch):
    opened, true = [], model_module.open_look
    monkeypatch.setattr(model_module, "open_look", lambda *given: opened.append(1) or true(*given))
    model = load(make_bundle(**HAVING))
    one, other = model.stream(), model.stream(1)
    one.step(np.zeros((B, 1), np.int32))
    assert not opened
    one.attention(np.zeros((B, 1), np.int32))
    other.attention(np.zeros((1, L), np.int32))
    assert len(opened) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_streams_of_one_model_look_at_once_and_see_what_each_sees_alone(make_bundle, threads):
    """Also while others step, and while the program is being opened."""
    model, alone = (load(make_bundle(**HAVING), threads=threads) for _ in range(2))

    def seen(by: Model, seed: int) -> list[bytes]:
        stream, draws, found = by.stream(), np.random.default_rng(seed), []
        for number in range(12):
            tokens = draws.integers(0, 60, (B, int(draws.integers(1, L + 1))))
            found.append(stream.attention(tokens).tobytes())
            if (number + seed) % 2:
                found.append(stream.step(tokens).tobytes())
        return found

    expected = [seen(alone, seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(partial(seen, model), range(8))) == expected


def test_several_threads_may_look_from_one_stream_that_stands_still(model):
    stream, tokens = model.stream(), np.arange(B * L).reshape(B, L)
    stream.feed(np.arange(B * 9).reshape(B, 9))
    expected = stream.attention(tokens).tobytes()
    with ThreadPoolExecutor(8) as pool:
        assert {found.tobytes() for found in pool.map(stream.attention, [tokens] * 40)} == {expected}


def test_a_bundle_without_the_program_says_what_to_do(make_bundle):
    stream = load(make_bundle(config={}, verify=False)).stream()
    with pytest.raises(UsageError, match=r"which this bundle lacks; export the model again with --attention"):
        stream.attention([[1]])


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (np.zeros((B, L + 1), int), None, r"tokens have 5 columns, expected at most one segment of 4; feed what comes"),
        (np.zeros((2, L), int), None, r"tokens have shape \[2, 4\], expected \[3, T\]"),
        (np.zeros(L, int), None, r"tokens have shape \[4\], expected \[3, T\]"),
        (np.zeros((B, L)), None, "tokens are float64, expected whole numbers"),
        (np.full((B, L), 60), None, r"tokens hold id 60 at \[0, 0\], expected 0 … 59"),
        (np.zeros((B, L), int), [1, 2], r"lengths are \[1, 2\], expected 3 whole numbers of 0 … 4"),
        (np.zeros((B, L), int), [1, 2, 5], r"lengths are \[1, 2, 5\], expected 3 whole numbers of 0 … 4"),
    ],
)
def test_what_is_no_segment_is_refused_and_nothing_changes(model, tokens, lengths, message):
    stream = model.stream()
    with pytest.raises(UsageError, match=message):
        stream.attention(tokens, lengths)
    assert not stream.fill.any()


def test_a_stream_that_was_left_half_changed_refuses(model):
    stream = model.stream()
    stream._half_changed = True
    with pytest.raises(UsageError, match="left half replaced"):
        stream.attention(np.zeros((B, 1), np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_memory_on_a_device_is_looked_at_on_the_cpu(make_bundle, update, monkeypatch):
    from txl_runtime.device import choosing

    path = make_bundle(**HAVING)
    monkeypatch.setattr(choosing, "open_device", lambda *given: open_stand_in(open_bundle(path), update))
    device, host = load(path, backend="rtx", update=update).stream(), load(path, "cpu", update=update).stream()
    for tokens, counts in segments(6):
        assert np.abs(device.attention(tokens, counts) - host.attention(tokens, counts)).max() <= 1e-6
        device.step(tokens, counts)
        host.step(tokens, counts)
    assert device.attention(tokens)[..., :M].any()
