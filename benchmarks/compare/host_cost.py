"""Time the host's part of a step on a device, with a driver and engines that do nothing, in one checkout or in two.

    python benchmarks/compare/host_cost.py [../old-checkout] [--rounds 12] [--seconds 0.3] [--out FOLDER]

Every call of the driver returns at once and every launch of an engine is empty, so the time that remains is the host's.
The results are zeros. Each kind of work is timed in both ways of the loop. "Recorded" makes a step one launch of a
graph, as with TensorRT and TensorRT-RTX. "Singly" queues the copies to the device, the engine and the copies back one
by one, as with ONNX Runtime and with RTX engines that record themselves. The time inside these libraries is not
measured. The driver is either a library in C, called as the real one is, or a Python module whose functions do nothing,
which is less work than a call into a library. A checkout that still calls CUDA through NVIDIA's Python bindings can
only use the Python module. So both are shown: "Python" compares equal drivers, and "C" is nearer to the cost on the
host of a real GPU.

Each side has a process of its own. The processes work in turns, and the one that begins changes with every round. One
thread calls, and the clock is its processor time, so waiting for a processor costs nothing. Blocks of calls are timed,
since the clock takes time too. A round's figure is the 10 % quantile of its blocks, because other programs slow some
blocks down where processors share a core or a cache. The table has medians and quartiles over the rounds, of each side
and of its ratio to the old side. It also has the median block of the last side, and the number of driver calls.
"""

# ruff: noqa: N802, N815 - names are CUDA's
from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from asking import Ask, asked
from bit_equality import runtime_of
from numpy.typing import NDArray

from benchmarks.shared.idle import Idle

OLD, NEW = ("old Python",), ("new Python", "new C")
"""The sides of the old and of the new checkout: the checkout's name, and the language of the driver that it calls."""
WAYS = {"recorded": True, "singly": False}
"""Ways to submit work to a device: True if the engines say that their work can be recorded into a graph."""
BUNDLES = {"one": 1, "eight": 8}
"""The Transformer-XLs to export: name of the bundle, and its batch size."""
WORKS = {
    "decode, 1 sequence, ring": ("one", "ring"),
    "decode, 1 sequence, rolled": ("one", "rolled"),
    "decode, 8 sequences, ring": ("eight", "ring"),
    "decode, 8 sequences, rolled": ("eight", "rolled"),
    "greedy token, 1 sequence, ring": ("one", "ring"),
    "greedy token, 8 sequences, rolled": ("eight", "rolled"),
    "segment of 64, 8 sequences, ring": ("eight", "ring"),
    "score of 64, 8 sequences, ring": ("eight", "ring"),
    "run of an own step, 1 sequence": ("own", "replace"),
}
"""The timed kinds of work by title: the name of the bundle, and the update rule."""
VOCABULARY, LENGTH, MEMORY = 64, 64, 128
WARM_UP_CALLS, BLOCK = 8, 25

NO_OP_DRIVER = r"""
#include <stdlib.h>
#include <string.h>
unsigned long calls = 0;
static size_t next = 1 << 20;
static size_t handle(void) { return next += 4096; }
#define NOTHING(name) int name(void) { calls++; return 0; }
#define NUMBER(name, value) int name(int *out) { calls++; *out = value; return 0; }
#define HANDLE(name) int name(size_t *out) { calls++; *out = handle(); return 0; }
NOTHING(cuInit) NUMBER(cuDriverGetVersion, 13000) NUMBER(cuDeviceGetCount, 1) NUMBER(cuDeviceGet, 0)
NUMBER(cuDeviceGetAttribute, 8) HANDLE(cuDevicePrimaryCtxRetain) NOTHING(cuDevicePrimaryCtxRelease_v2)
NOTHING(cuGetErrorName) NOTHING(cuGetErrorString)
int cuDeviceGetName(char *out, int size, int device) { calls++; strncpy(out, "no-op", size); return 0; }
static __thread size_t current = 0;
int cuCtxGetCurrent(size_t *out) { calls++; *out = current; return 0; }
int cuCtxPushCurrent_v2(size_t context) { calls++; current = context; return 0; }
int cuCtxPopCurrent_v2(size_t *out) { calls++; *out = current; current = 0; return 0; }
int cuMemAlloc_v2(size_t *out, size_t size) { calls++; *out = handle(); next += (size + 255) & ~(size_t)255; return 0; }
int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    calls++; *out = aligned_alloc(256, (size + 255) & ~(size_t)255); memset(*out, 0, size); return 0; }
static int relaxed;
int cuMemFreeHost(void *block) { calls++; free(block); return 0; }
int cuMemGetInfo_v2(size_t *left, size_t *all) { calls++; *left = *all = (size_t)1 << 34; return 0; }
NOTHING(cuMemFree_v2) NOTHING(cuMemcpyHtoDAsync_v2) NOTHING(cuMemcpyDtoHAsync_v2) NOTHING(cuMemcpyDtoDAsync_v2)
NOTHING(cuMemcpy2DAsync_v2) NOTHING(cuMemsetD8Async) NOTHING(cuMemsetD2D8Async)
HANDLE(cuStreamCreate) NOTHING(cuStreamDestroy_v2) NOTHING(cuStreamSynchronize) NOTHING(cuStreamBeginCapture_v2)
int cuStreamEndCapture(size_t stream, size_t *out) { calls++; *out = handle(); return 0; }
int cuStreamIsCapturing(size_t stream, int *out) { calls++; *out = 0; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = relaxed;
    calls++; relaxed = *mode; *mode = before; return 0;
}
HANDLE(cuGraphInstantiateWithFlags) NOTHING(cuGraphDestroy) NOTHING(cuGraphExecDestroy) NOTHING(cuGraphLaunch)
HANDLE(cuEventCreate) NOTHING(cuEventDestroy_v2) NOTHING(cuEventRecord) NOTHING(cuEventSynchronize)
"""


def main() -> int:
    """Read the command line; measure, or answer requests as the process of one side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, nargs="?", metavar="OLD_CHECKOUT", help="what to compare with")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[2], help="by default this checkout")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side (default 12)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a slice (default 0.3)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the table and every round's figures here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="bundles of an earlier run, made if missing")
    options = parser.parse_args()
    if options.child is not None:
        _answer(options.old, options.files, options.child)
        return 0
    for source in filter(None, (options.old, options.new)):
        if not (source / "runtime" / "txl_runtime").is_dir():
            parser.error(f"{source} has no runtime/txl_runtime, expected a checkout of this project")
    with tempfile.TemporaryDirectory() as folder:
        files = options.files or Path(folder)
        if not (files / "words.txl").exists():
            files.mkdir(parents=True, exist_ok=True)
            export_bundles(files)
        (files / "driver.c").write_text(NO_OP_DRIVER)
        shared = ["gcc", "-O2", "-w", "-shared", "-fPIC", "-o", str(files / "driver.so"), str(files / "driver.c")]
        subprocess.run(shared, check=True)
        result = _measure(options, files)
    text = _table(result)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "host_cost.md").write_text(text)
        (options.out / "host_cost.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


def export_bundles(files: Path) -> None:
    """Export the bundles into a folder; their models are so small that their own computation takes no time."""
    import torch
    from torch import nn
    from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, export

    from benchmarks.shared.models import random_bundle, shape

    for name, batch in BUNDLES.items():
        config = shape(2, 16, 2, 8, 32, VOCABULARY)
        random_bundle(files / f"{name}.txl", config, (LENGTH, 1), MEMORY, batch_size=batch)

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.action = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, obs: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden, (h, c) = self.cell(obs, (h, c))
            return self.action(hidden), h, c

    states = [StateSpec("h", (1, "B", 8)), StateSpec("c", (1, "B", 8))]
    spec = StepSpec(Policy(), [InputSpec("obs", ("B", "L", 6))], states, ["action"])
    export(spec, files / "own.txl", segment_length=(1,), batch_size=1, verify=False)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.cell = nn.Embedding(VOCABULARY, 8), nn.GRU(8, 8, batch_first=True)
            self.scores = nn.Linear(8, VOCABULARY)

        def forward(self, tokens: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden, h = self.cell(self.embedding(tokens), h)
            return self.scores(hidden), h

    tokens, state = InputSpec("tokens", ("B", "L"), tokens=VOCABULARY), StateSpec("h", (1, "B", 8))
    spec = StepSpec(Words(), [tokens], [state], [OutputSpec("logits", role="logits")])
    export(spec, files / "words.txl", segment_length=(LENGTH, 1), batch_size=1, verify=False)


def _measure(options: argparse.Namespace, files: Path) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Start one process for each side; return nanoseconds and driver calls by row of the table, side and round."""
    sides = (*OLD, *NEW) if options.old else NEW
    rows = [f"{work}: {way}" for work, way in itertools.product(WORKS, WAYS)]
    results: dict[str, dict[str, list[dict[str, float]]]] = {row: {side: [] for side in sides} for row in rows}
    with ExitStack() as stack:
        sources = {"old": options.old, "new": options.new}
        ask = {side: stack.enter_context(_child(sources[side.split()[0]], files, side)) for side in sides}
        for turn, row in itertools.product(range(options.rounds), rows):
            for place in range(len(sides)):
                side = sides[(turn + place) % len(sides)]
                results[row][side].append(ask[side]({"work": row, "seconds": options.seconds}))
    return results


def _child(source: Path, files: Path, side: str) -> AbstractContextManager[Ask]:
    """Start the process of one side, with the packages of its checkout."""
    command = [sys.executable, __file__, str(source), "--files", str(files), "--child", side]
    return asked(command, source, side)


def _table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    sides = list(next(iter(results.values())))
    compared, counted = (sides[1:], sides[:2]) if sides[0] in OLD else ([], sides[:1])
    head = ["µs of processor time (quartiles), 1 thread", *(f"{side} driver" for side in sides)]
    head += [f"{side} / old" for side in compared]
    head += [
        f"{sides[-1]} driver, median block",
        f"calls of the driver, {', '.join(side.split()[0] for side in counted)}",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row, answers in results.items():
        values = {side: np.array([answer["tenth"] for answer in answers[side]]) for side in sides}
        cells = [row, *(spread(values[side] / 1e3, 1) for side in sides)]
        cells += [spread(values[side] / values[sides[0]], 2) for side in compared]
        cells.append(spread(np.array([answer["median"] for answer in answers[sides[-1]]]) / 1e3, 1))
        cells.append(", ".join(f"{statistics.median(a['calls'] for a in answers[s]):g}" for s in counted))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(values: NDArray[np.float64], digits: int) -> str:
    """Return the median and the quartiles as text, e.g. "12.1 (11.9 … 12.6)"."""
    low, middle, high = (f"{value:.{digits}f}" for value in np.percentile(values, (25, 50, 75)))
    return f"{middle} ({low} … {high})"


# --- the process of one side --------------------------------------------------------------------------------------


def _answer(source: Path, files: Path, side: str) -> None:
    """Read requests from stdin, time the named work with the packages of this process, and print each result."""
    runtime = runtime_of(source)
    from txl_engines.composing import whole_programs
    from txl_runtime.device import choosing
    from txl_runtime.device.backend import DeviceBackend

    backends: Any = choosing
    device, calls = _open_device(side, files)

    def opener(recordable: bool) -> Callable[[str, Any, str], Any]:
        def open_device(name: str, bundle: Any, update: str) -> Any:
            manifest = bundle.manifest
            idle: Any = [Idle(p, manifest.states_of(update), recordable) for p in whole_programs(manifest, update)]
            return DeviceBackend(name, "a driver that does nothing", device, device.queue(), idle)

        return open_device

    streams = {}
    for (work, (name, update)), (way, recordable) in itertools.product(WORKS.items(), WAYS.items()):
        backends.open_device = opener(recordable)
        model = runtime.load(files / f"{name}.txl", backend="rtx", update=update)
        streams[f"{work}: {way}"] = model.stream()
    for line in sys.stdin:
        request = json.loads(line)
        work = request["work"]
        answer = timed(_calls(work, streams[work]), request["seconds"], calls)
        print(json.dumps(answer), flush=True)


def _calls(work: str, stream: Any) -> Callable[[], object]:
    """Return a function that does one step of the named work on a stream, and can be called without end."""
    b, number = stream.batch_size, itertools.count()
    draws = np.random.default_rng(0)
    kind = work.split()[0].rstrip(",")
    if kind == "greedy":
        tokens = stream.generate(np.zeros((b, 1), np.int32), 10**9, temperature=0)
        return lambda: next(tokens)
    if kind == "run":
        inputs = [{"obs": obs} for obs in draws.normal(size=(64, b, 1, 6)).astype(np.float32)]
        return lambda: stream.run(inputs[next(number) % 64])
    length = {"decode": 1, "segment": LENGTH, "score": LENGTH + 1}[kind]
    batches = draws.integers(0, VOCABULARY, (64, b, length), np.int32)
    call = stream.score if kind == "score" else stream.step
    return lambda: call(batches[next(number) % 64])


def timed(call: Callable[[], object], seconds: float, calls: Callable[[], int]) -> dict[str, float]:
    """Call a function in blocks for some seconds, and return ns of processor time of one call, and its driver calls.

    For example, {"tenth": 9100.0, "median": 9300.0, "calls": 3}, where "tenth" is the 10 % quantile of all blocks.
    `calls` returns the number of driver calls so far.
    """
    for _ in range(WARM_UP_CALLS):
        call()
    before = calls()
    call()
    asked = calls() - before
    samples: list[float] = []
    until = time.perf_counter_ns() + int(seconds * 1e9)
    while not samples or time.perf_counter_ns() < until:
        started = time.thread_time_ns()
        for _ in range(BLOCK):
            call()
        samples.append((time.thread_time_ns() - started) / BLOCK)
    return {"tenth": float(np.percentile(samples, 10)), "median": statistics.median(samples), "calls": asked}


def _open_device(side: str, files: Path) -> tuple[Any, Callable[[], int]]:
    """Open the runtime's device on a driver that does nothing; return it with a function that counts driver calls."""
    if find_spec("txl_runtime.device.driver") is None:
        before: Any = importlib.import_module("txl_runtime.device.cuda")
        bindings = _Bindings()
        return before.CudaDevice(before._Runtime(bindings)), lambda: bindings.calls
    from txl_runtime.device.cuda import Device
    from txl_runtime.device.driver import Driver

    if side.endswith("C"):
        library = ctypes.CDLL(str(files / "driver.so"))
        return Device(Driver(library)), lambda: ctypes.c_ulong.in_dll(library, "calls").value
    module = _Module()
    return Device(Driver(module)), lambda: module.calls


class _Counting:
    """The base of both stand-ins in Python: the number of calls, the next handle, and memory for pinned blocks."""

    calls = 0
    handles = itertools.count(1 << 20, 4096)

    def __init__(self) -> None:
        self._blocks: list[Any] = []

    def _pinned(self, size: int) -> int:
        block = np.zeros(size + 256, np.uint8)
        self._blocks.append(block)
        return int(block.ctypes.data) + -int(block.ctypes.data) % 256


class _Status(IntEnum):
    """A status as NVIDIA's Python bindings return it."""

    cudaSuccess = 0


class _Handle:
    """A stream or an event as the bindings return it."""

    def __int__(self) -> int:
        return 7


class _Bindings(_Counting):
    """A stand-in for NVIDIA's module cuda.bindings.runtime, whose functions return tuples that begin with a status."""

    cudaStreamNonBlocking, cudaEventDisableTiming, cudaHostAllocDefault = 1, 2, 0
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed=2)
    NUMBERS = ("cudaMalloc",)
    HANDLES = ("cudaStreamCreateWithFlags", "cudaEventCreateWithFlags", "cudaStreamEndCapture", "cudaGraphInstantiate")

    def __getattr__(self, name: str) -> Any:
        success = (_Status.cudaSuccess,)

        def nothing(*_: Any) -> tuple[_Status]:
            self.calls += 1
            return success

        def handle(*_: Any) -> tuple[_Status, _Handle]:
            self.calls += 1
            return _Status.cudaSuccess, _Handle()

        result = handle if name in self.HANDLES else nothing
        setattr(self, name, result)
        return result

    def cudaGetDeviceCount(self) -> tuple[_Status, int]:
        return _Status.cudaSuccess, 1

    def cudaGetDeviceProperties(self, device: int) -> tuple[_Status, Any]:
        return _Status.cudaSuccess, SimpleNamespace(name=b"no-op", major=8, minor=0)

    def cudaMalloc(self, size: int) -> tuple[_Status, int]:
        return _Status.cudaSuccess, next(self.handles) * 4096

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[_Status, int]:
        return _Status.cudaSuccess, self._pinned(size)


class _Module(_Counting):
    """A stand-in for the library libcuda, whose functions write results through the pointers that ctypes passes."""

    FIRST = (
        "cuDeviceGetCount",
        "cuDevicePrimaryCtxRetain",
        "cuStreamCreate",
        "cuEventCreate",
        "cuGraphInstantiateWithFlags",
    )

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def nothing(*_: Any) -> int:
            self.calls += 1
            return 0

        def handle(out: Any, *_: Any) -> int:
            self.calls += 1
            out._obj.value = 1 if name == "cuDeviceGetCount" else next(self.handles)
            return 0

        result = handle if name in self.FIRST else nothing
        setattr(self, name, result)
        return result

    _context = 0

    def cuCtxGetCurrent(self, out: Any) -> int:
        self.calls += 1
        out._obj.value = self._context
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.calls += 1
        self._context = getattr(context, "value", context)
        return 0

    def cuCtxPopCurrent_v2(self, out: Any) -> int:
        self.calls += 1
        self._context = 0
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 13000
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
        out._obj.value = 8
        return 0

    def cuMemAlloc_v2(self, out: Any, size: int) -> int:
        out._obj.value = next(self.handles) * 4096
        return 0

    def cuMemHostAlloc(self, out: Any, size: int, flags: int) -> int:
        out._obj.value = self._pinned(getattr(size, "value", size))
        return 0

    def cuStreamEndCapture(self, stream: Any, out: Any) -> int:
        self.calls += 1
        out._obj.value = next(self.handles)
        return 0


if __name__ == "__main__":
    sys.exit(main())
