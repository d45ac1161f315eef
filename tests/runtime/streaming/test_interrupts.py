"""An interrupt may come at any line: a step then happened or did not, and half-replaced memory says what it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from frozen import frozen
from support import interrupted
from txl_runtime import Stream, StreamState, UsageError, load

B, V = 3, 41
both = pytest.mark.parametrize("update", ["ring", "rolled"])


@pytest.fixture(scope="module")
def open_stream() -> Callable[[str], Stream]:
    models = {update: load(frozen("ring"), "cpu", threads=1, update=update) for update in ("ring", "rolled")}
    return lambda update: models[update].stream()


def bits(state: StreamState) -> tuple[bytes, ...]:
    assert state.head is not None
    return (
        state.fill.tobytes(),
        state.head.tobytes(),
        *(state.memory[name].tobytes() for name in sorted(state.memory)),
    )


def tokens_of(columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (B, columns)).astype(np.int32)


@both
@pytest.mark.parametrize("fed", [1, 10], ids=["filling", "rolled over"])
def test_a_step_happens_or_does_not_wherever_it_is_interrupted(open_stream, update, fed):
    stream, tokens, lengths = open_stream(update), tokens_of(4, 1), [4, 2, 0]
    stream.feed(tokens_of(fed))
    start = stream.snapshot()
    stream.step(tokens, lengths)
    after, further = bits(stream.snapshot()), stream.step(tokens_of(3, 2)).tobytes()
    stream.restore(start)
    before, other = bits(stream.snapshot()), stream.step(tokens_of(3, 2)).tobytes()
    seen, line = set(), 0
    while True:
        line += 1
        stream.restore(start)
        if not interrupted(lambda: stream.step(tokens, lengths), line):
            break
        found = bits(stream.snapshot())
        assert found in (before, after), f"neither before nor after the step, interrupted at line {line}"
        assert stream.step(tokens_of(3, 2)).tobytes() == (further if found == after else other)
        seen.add(found)
    assert seen == {before, after}
    assert line > 20


@both
def test_a_segment_after_one_that_was_interrupted_counts_all_of_its_positions(open_stream, update):
    """Lengths that counted before are forgotten, also by a stream that has seen a segment like this one."""
    stream, whole, part = open_stream(update), {"tokens": tokens_of(4, 1)}, {"tokens": tokens_of(4, 2)}
    stream.run(whole)
    start = stream.snapshot()
    found = stream.run(whole)["logprobs"].tobytes()
    after = bits(stream.snapshot())
    line, came = 0, True
    while came:
        line += 2
        stream.restore(start)
        stream.run(part, [1, 0, 2], commit=False)
        came = interrupted(lambda: stream.run(whole), line)
        stream.restore(start)
        assert stream.run(whole)["logprobs"].tobytes() == found, f"interrupted at line {line}"
        assert bits(stream.snapshot()) == after
    assert line > 20


@both
@pytest.mark.parametrize("change", ["reset", "select", "restore"])
def test_memory_that_is_half_replaced_is_not_streamed_on(open_stream, update, change):
    stream = open_stream(update)
    stream.feed(tokens_of(9))
    start = stream.snapshot()
    stream.feed(tokens_of(5, 3))
    calls = {
        "reset": lambda: stream.reset([0, 1]),
        "select": lambda: stream.select([2, 0, 1]),
        "restore": lambda: stream.restore(start),
    }
    refused, line = 0, 0
    while True:
        line += 1
        if not interrupted(calls[change], line):
            break
        if stream.half_changed:
            refused += 1
            for call in (lambda: stream.step(tokens_of(1)), stream.snapshot, lambda: stream.reset([0])):
                with pytest.raises(UsageError, match=r"half replaced .* call reset\(\) or restore\(...\)"):
                    call()
        stream.restore(start)
        assert bits(stream.snapshot()) == bits(start)
    assert refused > 3
    stream.reset()
    assert stream.fill.tolist() == [0, 0, 0]


@both
def test_a_running_generate_does_not_go_on_over_half_replaced_memory(open_stream, update):
    stream = open_stream(update)
    drawn = stream.generate(tokens_of(3), 9, temperature=0)
    next(drawn)
    line = 1
    while interrupted(lambda: stream.reset([0]), line) and not stream.half_changed:
        line += 1
    with pytest.raises(UsageError, match="was reset, selected or restored while generating"):
        next(drawn)
