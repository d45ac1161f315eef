"""A sound that tells where it broke, and a step that counts it: for the microphone of pages.

Sample i is number i of a series in which each follows from the one before it, so any two neighbours that do not belong
together are seen by the step, whatever came before them.
"""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from onnx import TensorProto
from step_models import B, Graph, StepModel, state
from txl_runtime.bundle.tables import Input, Output

RATE, CHUNK = 44_100, 441  # the rate of the microphone of tests, so that nothing is resampled
FACTOR, MORE, PERIOD = 109, 12_345, 1 << 14  # a quarter of what int16 holds: Chromium scales values above 0 by 32767


def series(samples: int) -> np.ndarray:
    """The sound, int16."""
    numbers = np.empty(PERIOD, np.int64)
    number = 0
    for place in range(PERIOD):
        numbers[place] = number
        number = (FACTOR * number + MORE) % PERIOD
    return (4 * (np.resize(numbers, samples) - PERIOD // 2)).astype(np.int16)


def write_sound(path: Path, seconds: float) -> Path:
    """A sound file for Chromium's microphone of tests."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(series(int(seconds * RATE)).astype("<i2").tobytes())
    return path


def listener(path: Path) -> Path:
    """A bundle that reads chunks and returns how many it read, and how many neighbours did not belong together.

    Breaks count from the second chunk on that has neighbours of the sound: before it a microphone gives silence.
    """
    model = StepModel(
        inputs=(Input(name="sound", dtype="float32", shape=("B", CHUNK), role="feature"),),
        outputs=tuple(Output(name=name, dtype="float32", shape=("B", 1)) for name in ("chunks", "breaks", "hears")),
        states=tuple(state(name, (B, 1), 0) for name in ("breaks", "chunks", "heard", "last")),
        streams="lockstep",
    )
    graph = Graph()
    half = graph.constant([PERIOD // 2], np.float32)
    numbers = graph.add("Round", [graph.add("Add", [graph.add("Mul", ["sound", half]), half])])
    every = graph.add("Concat", ["state.last.in", numbers], axis=1)
    every = graph.add("Cast", [every], to=TensorProto.INT32)
    ends = [graph.constant([place], np.int64) for place in (0, CHUNK, 1, CHUNK + 1)]
    before = graph.add("Slice", [every, ends[0], ends[1], ends[2]])
    after = graph.add("Slice", [every, ends[2], ends[3], ends[2]])
    factor, more, period = (graph.constant([value], np.int32) for value in (FACTOR, MORE, PERIOD))
    wanted = graph.add("Mod", [graph.add("Add", [graph.add("Mul", [before, factor]), more]), period])
    fits = graph.add("Cast", [graph.add("Equal", [wanted, after])], to=TensorProto.FLOAT)
    sound = graph.add("ReduceMax", [fits, ends[2]], keepdims=1)
    size = graph.constant([CHUNK], np.float32)
    broken = graph.add("Sub", [size, graph.add("ReduceSum", [fits, ends[2]], keepdims=1)])
    graph.add("Add", ["state.breaks.in", graph.add("Mul", [broken, "state.heard.in"])], "state.breaks.out")
    graph.add("Max", ["state.heard.in", sound], "state.heard.out")
    graph.add("Add", ["state.chunks.in", graph.constant([1], np.float32)], "state.chunks.out")
    graph.add("Slice", [numbers, graph.constant([CHUNK - 1], np.int64), ends[1], ends[2]], "state.last.out")
    graph.add("Identity", ["state.chunks.out"], "chunks")
    graph.add("Identity", ["state.breaks.out"], "breaks")
    graph.add("Identity", ["state.heard.out"], "hears")
    model.add("step-1", 1, graph)
    return model.write(path)
