"""Measure what a GPU's driver costs in a step whose programs do nothing, and what a node of a CUDA graph costs.

    python benchmarks/gpu/gpu_costs.py host --bundle BUNDLE [--seconds 1.5] [--out FOLDER]
    python benchmarks/gpu/gpu_costs.py nodes [--out FOLDER]

`host` measures the microseconds of a step of one token with full memory, with the copies to and from the device and the
wait, once recorded into a graph and once queued call by call. `nodes` measures graphs of several numbers of memsets of
4 bytes, recorded as a step is; a node's cost is the difference in time divided by the difference in nodes. Both need
only NumPy, msgspec and the driver.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import txl_runtime
from gpu_journal import Journal, writing
from txl_engines.composing import whole_programs
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.device import choosing
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.choosing import NO_GPU
from txl_runtime.device.cuda import open_cuda
from txl_runtime.device.gpu import gpu_name

from benchmarks.shared.idle import Idle

NODES = (50, 123, 250)
"""The numbers of nodes of the measured graphs; 123 is the number of kernels of TensorRT-RTX in a step of 12 layers."""
WARM_UP, CALLS = 20, 200


def median_us(work: Callable[[], object], seconds: float = 0.0) -> float:
    """Call a function for some seconds, at least `CALLS` times; return the median time of a call in microseconds."""
    samples: list[float] = []
    for _ in range(WARM_UP):
        work()
    until = time.perf_counter() + seconds
    while len(samples) < CALLS or time.perf_counter() < until:
        started = time.perf_counter_ns()
        work()
        samples.append((time.perf_counter_ns() - started) / 1e3)
    return float(np.median(samples))


def host(path: Path, rule: str, recordable: bool, seconds: float) -> Mapping[str, Any]:
    """Time steps of a bundle whose programs compute nothing; return µs of a step, B, and the ways of recording.

    Args:
        path: the bundle.
        rule: the update rule.
        recordable: True if the loop may record the programs into a graph.
        seconds: of timing.
    """

    def open_idle(name: str, bundle: Bundle, update: str | None) -> DeviceBackend:
        states, device = bundle.manifest.states_of(rule), open_cuda()
        programs: list[Any] = [Idle(program, states, recordable) for program in whole_programs(bundle.manifest, rule)]
        return DeviceBackend(name, "programs that do nothing", device, device.queue(), programs)

    real, choosing.open_device = choosing.open_device, open_idle
    try:
        model = txl_runtime.load(path, backend="rtx", update=rule)
    finally:
        choosing.open_device = real
    stream, tokens = model.stream(), np.zeros((model.batch_size, model.segment_lengths[0]), np.int32)
    while int(stream.fill.min()) < model.manifest.memory_length:
        stream.feed(tokens)
    micro = median_us(lambda: stream.step(tokens[:, :1]), seconds)
    loop: Any = stream.loop
    return {"µs": micro, "B": model.batch_size, "recorded": sorted(set(loop.recorded.values()))}


def nodes() -> Mapping[str, Any]:
    """Time the launch of graphs of each size in `NODES`, with the wait; return µs by number of nodes, and per node."""
    device = open_cuda()
    with device.current():
        queue, block = device.queue(), device.allocate(256)
        took = {}
        for count in NODES:

            def work(count: int = count) -> None:
                for _ in range(count):
                    queue.zero(block.address, 4)

            replay = queue.capture(work)

            def step(replay: Callable[[], None] = replay) -> None:
                replay()
                queue.wait()

            took[count] = median_us(step)
    per_node = (took[NODES[-1]] - took[NODES[0]]) / (NODES[-1] - NODES[0])
    return {f"{count} nodes µs": micro for count, micro in took.items()} | {"µs per node": per_node}


def main() -> int:
    """Read the command line and measure; return 1 if a part failed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    options.add_argument("what", choices=("host", "nodes"))
    options.add_argument("--bundle", type=Path, help="whose steps they are, for host")
    options.add_argument("--seconds", type=float, default=1.5, help="of timing, per kind of step (default 1.5)")
    options.add_argument("--out", type=Path, metavar="FOLDER", help="write the results here")
    given = options.parse_args()
    if given.what == "host" and given.bundle is None:
        options.error("host needs --bundle")
    with writing("gpu_costs"):
        journal = Journal("gpu_costs", given.out)
    if gpu_name() is None:
        journal.skip(given.what, NO_GPU)
    elif given.what == "nodes":
        journal.run("a node of a graph", nodes)
    else:
        for update in (rule for rule in open_bundle(given.bundle).manifest.updates if rule != "none"):
            for kind, recordable in (("recorded", True), ("singly", False)):
                work = partial(host, given.bundle, update, recordable, given.seconds)
                journal.run(f"host, {update} memory, {kind}", work)
    return journal.finish()


if __name__ == "__main__":
    sys.exit(main())
