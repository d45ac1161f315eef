"""Compute the bytes that a step must read, and measure the memory's speed: together they give a step's shortest time.

A step of one token multiplies every weight with one vector. So it takes at least the time to read once the weights, the
keys and values, and the table of relative positions. A small model can be faster, because it fits into caches.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from txl_report.schema.measurement import DeviceFloor
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import STATE_DTYPES
from txl_runtime.bundle.weight_header import read_header

from txl_deploy.bench.driving import is_transformer_xl

PASSES_SECONDS = 0.15
"""Seconds for which one measurement reads the memory again and again; its fastest pass counts."""
ARRAY_BYTES = 512 * 2**20
"""Size of the array that is read, 512 MiB: far more than a cache holds."""
GOAL = 0.6
"""Share of the memory's speed that a step on a device should reach; a goal, not a measurement."""


def floor_of(bundle: Bundle, length: int, saved: int = 0) -> dict[str, int]:
    """Return the smallest number of bytes that a segment of `length` reads for all sequences, by kind of data.

    The numbers follow from the manifest and the sizes in the weight file's header. For a Transformer-XL:

    * weights: the layers and the softmax, each once, as stored in the weight file;
    * embedding: one row of the table per token;
    * memory: M rows of keys and values, or of hidden states, per layer and sequence;
    * positions: relative positions, one table per layer, up to the clamp or the window.

    With an adaptive softmax this is the floor of the full distribution; `generate` may read less. For any other model,
    `length` makes no difference:

    * weights: each tensor of the weight file once. A table counts as a whole, even if a step reads only single rows;
      small constants that are stored in the graphs do not count;
    * state: the state of all sequences, with the largest number of rows that it can have.

    `saved` is the number of bytes that an engine saves by rounding matrices; the weights are counted without them.
    """
    m = bundle.manifest
    if not is_transformer_xl(m):
        stored = read_header(bundle.file(m.weights)).items()
        read = sum(tensor.length for name, tensor in stored if not name.startswith("initial."))
        return {"weights": read - saved, "state": state_bytes(m)}
    c, sizes = m.config, {name: tensor.length for name, tensor in read_header(bundle.file(m.weights)).items()}
    item = 4 if not m.states or m.states[0].dtype == "float32" else 2
    width = 2 * c.n_head * c.d_head if m.transformer_xl.memory == "kv" else c.d_model
    memory = m.batch_size * c.n_layer * m.memory_length * width * item
    untied = {name.split(".")[2] for name in sizes if name.startswith("softmax.tables.")}
    weights = embedding = 0
    for name, size in sizes.items():
        if name.startswith("initial.") or ".table." in name or name.endswith(".positions"):
            # not counted: initial memory rows; positions are counted below by the distances that a query can reach
            continue
        if ".attention.position.weight" in name or ".attention.position.bias" in name or ".distance." in name:
            continue  # not counted: folded into the tables of positions
        matrix, _, part = name.rpartition(".")
        if part in ("columns", "column_scale") and f"{matrix}.int8" in sizes:
            continue  # not counted: a second copy of the matrix, for longer segments
        if name.startswith("embedding.tables."):
            cluster = name.split(".")[2]
            tied = len(untied) < len(c.clusters) if c.div_val == 1 else cluster not in untied
            weights += size if tied else 0
            embedding += 0 if tied else m.batch_size * length * c.cluster_width(int(cluster)) * 4
        else:
            weights += size
    positions = _position_bytes(m, length)
    return {"weights": weights - saved, "embedding": embedding, "memory": memory, "positions": positions}


def state_bytes(manifest: Manifest) -> int:
    """Return the size of the state of all sequences in bytes; a growing state counts with its largest size."""
    sizes = {"bool": 1, "float16": 2, "bfloat16": 2}
    states = manifest.states_of(manifest.updates[0])
    return sum(sizes.get(state.dtype, 4) * math.prod(state.shape) for state in states)


def _position_bytes(m: Manifest, length: int) -> int:
    """Return the bytes of position rows that a segment reads: one row for each distance from a query to a key."""
    rows = m.memory_length + length
    if (window := m.dialect.window_of(length, m.memory_length)) is not None:
        rows = min(rows, window)
    if m.dialect.clamp_length is not None:
        rows = min(rows, m.dialect.clamp_length + 1)
    c, item = m.config, 2 if m.precision in STATE_DTYPES else 4
    if c.attn_type in (0, 1):
        return item * c.n_layer * rows * c.n_head * c.d_head
    return item * rows * c.d_model * (c.n_layer if c.attn_type == 3 else 1)


def device_floor(by: str, gb_per_second: float | None, size: int, kernels: int | None) -> DeviceFloor:
    """Compute the shortest time of a step that reads `size` bytes; `by` says where the memory's speed comes from."""
    us = size / gb_per_second / 1e3 if gb_per_second else None
    goal = us / GOAL if us else None
    each = goal / kernels if goal and kernels else None
    return DeviceFloor(
        by=by, gb_per_second=gb_per_second, bytes=size, us=us, goal_us=goal, kernels=kernels, us_per_kernel=each
    )


class Bandwidth(ABC):
    """A measurement of the speed of reading memory, repeated in every round.

    Attributes:
        method: the method, or the reason why nothing is measured.
        measured: all measurements, GB/s.
        everyone: True if all competitors read from this memory, False if only the bundle does.
    """

    method: str
    everyone = True

    def __init__(self) -> None:
        self.measured: list[float] = []

    @abstractmethod
    def measure(self) -> None:
        """Measure once, and append the result to `measured`."""

    @property
    def gb_per_second(self) -> float | None:
        """Return the median of all measurements; None before the first measurement."""
        return float(np.median(self.measured)) if self.measured else None

    def serves(self, competitor: str, bundle: str) -> float | None:
        """Return the memory speed for a competitor; None if it reads from different memory."""
        return self.gb_per_second if self.everyone or competitor == bundle else None


class HostBandwidth(Bandwidth):
    """The machine's reading speed: each thread computes the bitwise or of its part of one large array.

    NumPy's reduction needs one vector instruction per load and holds no lock. The array is far larger than a cache.
    """

    method = "numpy bitwise_or.reduce over 512 MB of int64, one part per thread, best pass"

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._parts: list[NDArray[np.int64]] = np.array_split(np.ones(ARRAY_BYTES // 8, np.int64), threads)

    def measure(self) -> None:
        """Read the array again and again, and append the speed of the fastest pass to `measured`."""
        size = sum(part.nbytes for part in self._parts)
        until, best = time.perf_counter() + PASSES_SECONDS, 0.0
        while time.perf_counter() < until or not best:
            best = max(best, size / self._pass() / 1e9)
        self.measured.append(best)

    def _pass(self) -> float:
        others = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in self._parts[1:]]
        started = time.perf_counter()
        for thread in others:
            thread.start()
        np.bitwise_or.reduce(self._parts[0])
        for thread in others:
            thread.join()
        return time.perf_counter() - started
