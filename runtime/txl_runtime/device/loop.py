"""A stream whose memory stays on a device: the same interface and the same results as any other stream's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from txl_runtime.device.call import DeviceCall, InputBlock, ResultBlock
from txl_runtime.device.dlpack import DeviceTokens, device_tokens
from txl_runtime.device.memory import DeviceMemory, open_device_memory
from txl_runtime.errors import UsageError
from txl_runtime.streaming.checks import check_lengths
from txl_runtime.streaming.snapshot import StreamState
from txl_runtime.streaming.stream import Logprobs, Stream

if TYPE_CHECKING:
    from txl_runtime.device.backend import DeviceBackend
    from txl_runtime.model import Model

__all__ = ["DeviceStream"]

Ids = NDArray[np.int32]


class DeviceStream(Stream):
    """See `Stream`.

    All streams of a model share one queue of the device. Its lock is held while work is put in, not while it is
    waited for, so streams in different threads keep each other waiting no longer than the device itself does.

    `step` and `feed` also take tokens that are on the device already (DLPack, int32 [b, T]). Those are not brought to
    the host to be checked: the graph takes an id beyond the vocabulary for the nearest one.
    """

    def __init__(self, model: Model, backend: DeviceBackend, batch_size: int) -> None:
        self._device_backend, self._on_device = backend, backend.device
        self._lock, self._queue = backend.lock, backend.queue
        self._inputs: dict[str, InputBlock] = {}
        self._results: dict[str, ResultBlock] = {}
        self._device_calls: dict[tuple[str, int], DeviceCall] = {}
        super().__init__(model, batch_size)

    def step(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Logprobs:
        """See `Stream.step`."""
        there = self._there(tokens)
        if there is None:
            return super().step(self._here(tokens), lengths)
        longest = self._manifest.segment_lengths[0]
        if there.shape[1] > longest:
            raise UsageError(
                f"tokens have {there.shape[1]} columns, expected at most one segment of {longest}; use feed for more"
            )
        return self._feed_there(there, lengths)

    def feed(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Logprobs:
        """See `Stream.feed`."""
        there = self._there(tokens)
        return super().feed(self._here(tokens), lengths) if there is None else self._feed_there(there, lengths)

    def score(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """See `Stream.score`."""
        return super().score(self._here(tokens))

    def generate(self, prompt: ArrayLike, max_new_tokens: int, *options: Any, **named: Any) -> Iterator[Ids]:
        """See `Stream.generate`."""
        return super().generate(self._here(prompt), max_new_tokens, *options, **named)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """See `Stream.reset`."""
        with self._lock:
            super().reset(rows)

    def select(self, rows: ArrayLike) -> None:
        """See `Stream.select`."""
        with self._lock:
            super().select(rows)

    def restore(self, state: StreamState) -> None:
        """See `Stream.restore`."""
        with self._lock:
            super().restore(state)

    def memory(self) -> dict[str, NDArray[np.float32]]:
        """See `Stream.memory`."""
        with self._lock:
            return dict(super().iter_memory())

    def iter_memory(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """See `Stream.iter_memory`; they come from the device together."""
        yield from self.memory().items()

    @property
    def recorded(self) -> dict[str, str]:
        """Per program and side of the memory: "recorded", or why its steps are put in one by one."""
        backend = self._device_backend
        return {
            f"{name}, side {side}": call.not_recorded
            or (
                ("recorded" if call.steps > 1 else "not yet")
                if backend.executables[name].recordable
                else "by the engine"
            )
            for (name, side), call in self._device_calls.items()
        }

    def _open_memory(self) -> DeviceMemory:
        backend = self._device_backend
        with self._lock:
            self._states = open_device_memory(
                backend.update, self._on_device, self._queue, self._manifest, self._model.initial
            )
        return self._states

    def _there(self, tokens: Any) -> DeviceTokens | None:
        found = device_tokens(tokens, self._on_device.dlpack, self._queue.handle)
        if found is not None and (found.shape[0] != self._b or found.shape[1] < 1):
            raise UsageError(
                f"tokens have shape {list(found.shape)}, expected [{self._b}, T] with T at least 1; one row per stream"
            )
        return found

    def _here(self, tokens: Any) -> Any:
        """Tokens on the host; those on the device are brought here where they are needed here."""
        found = device_tokens(tokens, self._on_device.dlpack, self._queue.handle)
        if found is None:
            return tokens
        host = np.zeros(found.shape, np.int32)
        with self._lock:
            self._queue.copy(host.ctypes.data, found.address, host.strides[0], len(host), host.strides[0], found.pitch)
            self._queue.wait()
        return host

    def _feed_there(self, tokens: DeviceTokens, lengths: ArrayLike | None) -> Logprobs:
        counts = check_lengths(lengths, self._b, tokens.shape[1])
        result = np.zeros((*tokens.shape, self._manifest.config.vocab_size), np.float32)
        for first, last, inside in self._cuts(tokens.shape[1], counts):
            features = self._step(self._model.kind, {}, inside, last - first, tokens.columns(first, last))
            for row, count in enumerate(inside.tolist()):
                if count:
                    self._output.logprobs(features[row, :count], result[row, first : first + count])
        return result

    def _run(self, ids: Ids, counts: Ids) -> NDArray[np.float32]:
        return self._step(self._model.kind, {"tokens": ids}, counts, ids.shape[1])

    def _nll(self, ids: Ids, targets: Ids, counts: Ids) -> NDArray[np.float32]:
        if not self._device_backend.has("score", ids.shape[1]):
            return super()._nll(ids, targets, counts)
        return self._step("score", {"tokens": ids, "targets": targets}, counts, ids.shape[1])

    def _last(self, ids: Ids, counts: Ids) -> NDArray[np.float32]:
        if not self._device_backend.has("last", ids.shape[1]):
            return super()._last(ids, counts)
        return self._step("last", {"tokens": ids}, counts, 0, length=ids.shape[1])

    def _step(
        self,
        kind: str,
        values: dict[str, Ids],
        counts: Ids,
        columns: int,
        tokens: DeviceTokens | None = None,
        length: int = 0,
    ) -> NDArray[np.float32]:
        """One segment through the smallest program of a kind; a view of what it returned, good until its next run."""
        self._valid[: self._b] = counts
        call, result = self._call(kind, length or columns)
        inputs = {**values, "valid": self._valid, "fill": self._fill}
        with self._lock:
            if self._model.update == "ring":
                inputs["head"] = self._memory.heads
            event = call.step(inputs, tokens, self._b, columns)
            self._memory.advance(self._valid)
        event.wait()
        np.minimum(self._fill + self._valid, self._manifest.memory_length, out=self._fill)
        if call.steps == 2:
            self._device_backend.settled()
        return result.host[: self._b, :columns] if columns else result.host[: self._b]

    def _call(self, kind: str, length: int) -> tuple[DeviceCall, ResultBlock]:
        """The program tied to this side of the memory, for the first time or again."""
        executable = self._device_backend.find(kind, length)
        name, side = executable.program.name, self._memory.side
        call = self._device_calls.get((name, side))
        if call is None:
            with self._lock:
                memory = self._states.places()
                if name not in self._inputs:
                    self._inputs[name] = InputBlock(self._on_device, executable, frozenset(memory[0]))
                    self._results[name] = ResultBlock(self._on_device, executable)
                call = DeviceCall(executable, self._queue, self._inputs[name], self._results[name], memory)
            self._device_calls[name, side] = call
        return call, self._results[name]
