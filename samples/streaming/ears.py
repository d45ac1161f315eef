"""A buffer in front of a bundle that reads segments of frames and some frames ahead, for any such bundle; copy it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import txl_runtime
from txl_runtime import UsageError

Array: TypeAlias = np.ndarray[Any, Any]


class Ears:
    """Several streams that begin and end at any time; their frames arrive in chunks of any size.

    Each stream has a buffer of the frames that are still needed. When a buffer holds a segment and the frames ahead of
    it, its stream is ready. A step runs one segment of every ready stream; streams that are not ready are idle in it.

    Attributes:
        model, stream: the bundle's model, and its stream.
        input, output: the names of the input of frames and of the output with a result per frame.
        segment, ahead: number of frames of a segment, and of frames after it that a step also reads.
        waiting: the buffer of each stream.
    """

    def __init__(self, model: txl_runtime.Model) -> None:
        manifest = model.manifest
        inputs = manifest.given
        outputs = manifest.outputs
        ports = [(entry.name, entry.shape) for entry in inputs] + [(entry.name, entry.shape) for entry in outputs]
        if [shape[:2] for _, shape in ports] != [("B", "L")] * 2 or not manifest.can.run_apart:
            has = ", ".join(f"{name} {list(shape)}" for name, shape in ports)
            raise UsageError(
                f"this bundle has {has} and {manifest.streams} streams, expected one input and one output [B, L, …] "
                "and independent ones; write a buffer of your own around Stream.run"
            )
        self.model, self.stream = model, model.stream()
        self.input, self.output = inputs[0].name, outputs[0].name
        self.segment, self.ahead = model.segment_lengths[0], inputs[0].lookahead
        self.none = np.zeros((0, *map(int, inputs[0].shape[2:])), inputs[0].dtype)
        self.nothing = np.zeros((0, *map(int, outputs[0].shape[2:])), outputs[0].dtype)
        self.waiting = [self.none] * model.batch_size

    def hear(self, chunks: Mapping[int, Array], ended: Collection[int] = ()) -> dict[int, Array]:
        """Return the results of all frames whose segment and frames ahead have arrived, by stream.

        For example, segments of 8 and 4 frames ahead: chunk {0: [13, 40]} of a new stream gives results {0: [8]}.

        Args:
            chunks: new frames by stream, [T, …] with any T.
            ended: streams of which this is the last chunk. Silence is appended to them, so that each of their frames
                gets its result.
        """
        for row, chunk in chunks.items():
            if chunk.shape[1:] != self.none.shape[1:]:
                wanted = ["T", *self.none.shape[1:]]
                raise UsageError(f"a chunk has shape {list(chunk.shape)}, expected {wanted}; give frames as trained")
            self.waiting[row] = np.concatenate([self.waiting[row], chunk])
        owed = [len(frames) for frames in self.waiting]
        for row in ended:
            self.waiting[row] = self.flushed(self.waiting[row])
        pieces: dict[int, list[Array]] = {row: [] for row in {*chunks, *ended}}
        seen = self.segment + self.ahead
        while ready := [row for row, frames in enumerate(self.waiting) if len(frames) >= seen]:
            windows = np.zeros((len(self.waiting), seen, *self.none.shape[1:]), self.none.dtype)
            lengths = np.zeros(len(self.waiting), np.int32)
            for row in ready:
                windows[row], lengths[row] = self.waiting[row][:seen], self.segment
            results = self.stream.run({self.input: windows}, lengths)[self.output]
            for row in ready:
                pieces[row].append(results[row, : owed[row]])
                self.waiting[row] = self.waiting[row][self.segment :]
                owed[row] -= min(self.segment, owed[row])
        for row in ended:
            self.stream.reset([row])
            self.waiting[row] = self.none
        return {row: np.concatenate([self.nothing, *parts]) for row, parts in pieces.items()}

    def flushed(self, frames: Array) -> Array:
        """Append silence to frames: enough to complete the last segment and the frames ahead of it.

        For example, with segments of 8 and 4 frames ahead, [10, 40] becomes [20, 40].
        """
        silence = np.zeros((-len(frames) % self.segment + self.ahead, *frames.shape[1:]), frames.dtype)
        return np.concatenate([frames, silence])
