"""Interrupts before any opcode of an operation on a stream, and what the stream has to be then.

That is more often than the interpreter looks at signals, so nothing hides between two places where it does.
"""

from __future__ import annotations

import dis
import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import txl_runtime
from txl_runtime import Model, Stream, StreamState, UsageError

LOOKS = ("RESUME", "CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "FOR_ITER", "SEND", "POP_JUMP_BACKWARD", "GEN_START")
"""Beginnings of the names of opcodes after which the interpreter looks at signals."""
RUNTIME = str(Path(txl_runtime.__file__).parent)
_LOCKING = functools.cached_property.__get__.__code__
"""Before Python 3.12 it takes a lock, which an interrupt in its middle leaves taken for every later test."""
EVERY = int(os.environ.get("TXL_EVERY_OPCODE", "0"))
"""The step of the sweep: 1 for every opcode, a quarter of an hour; 0 for those that the tests have time for."""


@functools.cache
def _looked_before(code: CodeType) -> frozenset[int]:
    """Offsets of the opcodes right behind one at which the interpreter looks at signals."""
    found, looked = set(), True
    for instruction in dis.get_instructions(code):
        if looked:
            found.add(instruction.offset)
        jumps = instruction.opname in ("JUMP_BACKWARD", "JUMP_ABSOLUTE")
        if jumps:  # nothing falls through to what stands behind it
            found.add(instruction.argval)
        looked = instruction.opname.startswith(LOOKS) and not jumps
    return frozenset(found)


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether a frame is the runtime's, and not called by a stand-in, which is C in the real thing."""
    if frame is None or RUNTIME not in frame.f_code.co_filename:
        return False
    while frame is not None:
        if "stand_ins" in frame.f_code.co_filename or frame.f_code.co_filename.endswith("weakref.py"):
            return False
        frame = frame.f_back
    return True


def _traced(call: Callable[[], Any], at: Callable[[], None], looking: bool) -> None:
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and (frame.f_code is _LOCKING or (looking and not _is_ours(frame))):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and not (looking and frame.f_lasti not in _looked_before(frame.f_code)):
            at()
        return trace

    before, called = sys.gettrace(), gc.callbacks[:]
    gc.callbacks.clear()  # other packages' (hypothesis has one), in which an interrupt would be told as a warning
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.callbacks[:] = called


def interrupted_at(call: Callable[[], Any], number: int, looking: bool = False) -> bool:
    """Run a call and interrupt it before the n-th opcode, of whatever module; whether it came that far.

    With `looking` those opcodes of the runtime alone count at which a signal can come. Between the last one of a block
    and what leaves it, if that is not Python's, there is none; no code could make up for an interrupt there.
    """
    left = number

    def at() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    try:
        _traced(call, at, looking)
    except KeyboardInterrupt:
        return True
    return False


def bits(stream: Stream) -> tuple[Any, ...]:
    """All that a stream carries."""
    state, held = stream.snapshot(), stream.state()
    head = b"" if state.head is None else state.head.tobytes()
    tensors = {**state.memory, **held}
    return (
        stream.batch_size,
        state.fill.tobytes(),
        head,
        *((name, tensors[name].shape, tensors[name].tobytes()) for name in sorted(tensors)),
    )


@dataclass(frozen=True)
class Operation:
    """An operation that is interrupted.

    Attributes:
        call: the operation.
        pieces: whether it may end after any whole segment.
        replaces: whether it may leave a stream that says it is half replaced.
    """

    call: Callable[[Stream], Any]
    pieces: bool = False
    replaces: bool = False


def operations(inputs: Callable[[int, int], dict[str, Any]], counts: Any, start: StreamState) -> dict[str, Operation]:
    """Those that a stream of a form has.

    Args:
        inputs: arrays by name, of b sequences and T positions.
        counts: of each sequence in one segment of the longest length.
        start: what is restored.
    """
    b, tokens = len(counts), "tokens" in inputs(1, 1)
    longest = int(max(counts))
    segment, long = inputs(b, longest), inputs(b, 3 * longest)
    found = {
        "run": Operation(lambda s: s.run(segment, counts)),
        "try": Operation(lambda s: s.run(segment, counts, commit=False)),
        "part": Operation(lambda s: (s.run(segment, counts, commit=False), s.commit(np.minimum(counts, 1)))),
        "feed arrays": Operation(lambda s: s.feed(long), pieces=True),
        "reset": Operation(lambda s: s.reset(), replaces=True),
        "select": Operation(lambda s: s.select([*range(1, b), 0]), replaces=True),
        "snapshot": Operation(lambda s: s.snapshot()),
        "state": Operation(lambda s: s.state()),
        "restore": Operation(lambda s: s.restore(start), replaces=True),
    }
    if tokens:
        plain, ids = long["tokens"][:, : longest + 1], segment["tokens"]
        more = {
            "step": Operation(lambda s: s.step(ids, counts)),
            "feed": Operation(lambda s: s.feed(long["tokens"]), pieces=True),
            "last": Operation(lambda s: s.feed(long["tokens"], last=True), pieces=True),
            "score": Operation(lambda s: s.score(plain), pieces=True),
            "generate": Operation(lambda s: list(s.generate(ids, 3, top_k=5, seed=1)), pieces=True),
            "generate, fed": Operation(lambda s: list(s.generate(ids, 1, seed=1, feed_last=True)), pieces=True),
        }
        found.update(more)
    return found


ALONE = {
    "reset one": Operation(lambda s: s.reset([0]), replaces=True),
    "fewer": Operation(lambda s: s.select([1]), replaces=True),
    "take": Operation(lambda s: s.take(1)),
    "put": Operation(lambda s: s.put(0, s.take(1)), replaces=True),
}
"""Operations of streams whose sequences are independent."""


class Trial:
    """One operation, interrupted at one opcode after the other.

    Args:
        model: whose streams are opened.
        start: the state that all begin with.
        operation: what is interrupted.
        probe: what is run afterwards; its results have to be those of a stream that nobody interrupted.
        looking: see `interrupted_at`.
    """

    def __init__(
        self,
        model: Model,
        start: StreamState,
        operation: Operation,
        probe: Callable[[Stream], Mapping[str, Any]],
        looking: bool = False,
    ) -> None:
        self._model, self._start, self._operation, self._looking = model, start, operation, looking
        self._probe = probe
        stream = self._open()
        self._allowed = {bits(stream): self._results(stream)}
        stream = self._open()
        if operation.pieces:
            run = stream.loop.run

            def recorded(*arguments: Any, **options: Any) -> Any:
                result = run(*arguments, **options)
                self._allow(stream)
                return result

            stream.loop.run = recorded
        operation.call(stream)
        self._allow(stream)

    def _open(self) -> Stream:
        stream = self._model.stream(self._start.batch_size)
        stream.restore(self._start)
        return stream

    def _allow(self, stream: Stream) -> None:
        """Allow the stream's present state after an interrupt, too."""
        copy = self._model.stream(stream.batch_size)
        copy.restore(stream.snapshot())
        self._allowed.setdefault(bits(copy), self._results(copy))

    def _results(self, stream: Stream) -> bytes:
        return b"".join(np.ascontiguousarray(array).tobytes() for array in self._probe(stream).values())

    def go(self, first: int, step: int, fresh: bool = False) -> tuple[int, int]:
        """Interrupt at every `step`-th opcode from the `first` on: how many, and how many left a broken stream.

        With `fresh` each interrupt comes to a stream that has not run anything yet.
        """
        stream, number, broken = self._open(), first, 0
        while True:
            if fresh or stream.batch_size != self._start.batch_size:
                stream = self._open()
            stream.restore(self._start)
            stopped = interrupted_at(functools.partial(self._operation.call, stream), number, self._looking)
            broken += self._look_at(stream, f"opcode {number}")
            if not stopped:
                return (number - first) // step, broken
            number += step

    def _look_at(self, stream: Stream, where: str) -> bool:
        """Return whether a stream says that it is broken; if not, check that its state is an allowed one."""
        try:
            found = bits(stream)
        except UsageError as error:
            said = str(error)
        else:
            assert found in self._allowed, f"{where}: neither before nor after a segment"
            assert self._results(stream) == self._allowed[found], f"{where}: other results"
            return False
        assert self._operation.replaces, f"{where}: {said}"
        with pytest.raises(UsageError, match="half replaced"):
            self._probe(stream)
        stream.reset()
        return True
