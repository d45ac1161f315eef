"""Random graphs in two processes whose fresh memory differs: `python -m fuzz.fresh_memory --count 50000`.

ONNX Runtime runs what the graph check lets through twice, with different bytes in memory that nobody has written to.
Where the results differ, it read what it was not given. A process that dies is none: the trial of a stranger's bundle
is there for that. Prints counts, and every finding with the seed that makes it; exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from txl_runtime.guard.graph_check import Walk
from txl_runtime.guard.protobuf import RefusedError

from fuzz.odd_nodes import Odd, make

FILLS = ("85", "170")
"""Values of MALLOC_PERTURB_, by which glibc fills memory that it hands out."""
BATCH, MEMORY, SECONDS = 1000, 2**31, 5
"""Graphs of a process, its bytes of address space, and its seconds of processor time for each graph."""


def main() -> None:
    """Read the command line, make graphs, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--constants", type=float, default=0.3, help="share of graphs about a constant's encoding")
    asked = parser.parse_args()
    counts, found = attack(range(asked.first, asked.first + asked.count), asked.constants)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    sys.exit(1 if found else 0)


def attack(seeds: Sequence[int], constants: float) -> tuple[collections.Counter[str], list[str]]:
    """Make the graphs of seeds and run what passes: counts, and findings in words."""
    counts, found = collections.Counter[str](), list[str]()
    batch: list[tuple[int, Odd]] = []

    def flush() -> None:
        for at, (kind, told) in enumerate(compared([(odd.data(True), odd.feeds) for _, odd in batch])):
            seed, odd = batch[at]
            counts[kind] += 1
            if kind == "finding":
                found.append(f"seed {seed}, {odd.name}: {told}")
                print(found[-1], flush=True)
        batch.clear()

    for seed in seeds:
        try:
            odd = make(seed, constants)
        except (ValueError, TypeError, OverflowError):
            counts["not written"] += 1
            continue
        try:
            Walk(odd.data(False), "step", "", 0)
        except RefusedError:
            counts["refused by the check"] += 1
            continue
        batch.append((seed, odd))
        if len(batch) == BATCH:
            flush()
    flush()
    return counts, found


def compared(graphs: Sequence[tuple[bytes, dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """Run graphs in both processes: "ran", "refused" by ONNX Runtime, "died", or "finding" and what it is."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "graphs.npz"
        arrays = {f"{i}/{name}": array for i, (_, feeds) in enumerate(graphs) for name, array in feeds.items()}
        files = {str(i): np.frombuffer(data, np.uint8) for i, (data, _) in enumerate(graphs)}
        np.savez(place, **arrays, **files)
        first, second = (_all_of(place, len(graphs), fill) for fill in FILLS)
    for one, other in zip(first, second, strict=True):
        if "died" in (one[0], other[0]) or one == other:
            yield "died" if "died" in (one[0], other[0]) else one[0], None
        else:
            yield "finding", f"{one} in one process, {other} in the other"


def _all_of(place: Path, count: int, fill: str) -> list[list[Any]]:
    """Return the outcome of every graph in processes with one fill; if a process dies, the next goes on behind it."""
    log, done = place.with_suffix(f".{fill}"), list[list[Any]]()
    environment = os.environ | {"MALLOC_PERTURB_": fill, "OMP_NUM_THREADS": "1"}
    while len(done) < count:
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "fuzz.fresh_memory", "--run", str(place), str(log), str(len(done))]
        ended = subprocess.run(
            command, env=environment, capture_output=True, check=False, cwd=Path(__file__).parents[1]
        )
        lines = log.read_text("utf-8").splitlines() if log.exists() else []
        if not lines and ended.returncode:
            raise RuntimeError(ended.stderr.decode(errors="replace")[-500:])
        done += [json.loads(line) for line in lines]
        if len(done) < count:
            done.append(["died", ended.returncode])
    return done


def _run(place: str, log: str, start: str) -> None:
    """The other process: run the graphs from one on, and write a line of each."""
    import resource  # which Windows lacks

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    graphs, feeds = dict[str, bytes](), collections.defaultdict[str, dict[str, Any]](dict)
    with np.load(place) as arrays:
        for key, array in arrays.items():
            number, _, name = key.partition("/")
            if name:
                feeds[number][name] = array
            else:
                graphs[number] = array.tobytes()
    with Path(log).open("w", encoding="utf-8") as lines:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        for at in range(int(start), len(graphs)):
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = int(used.ru_utime + used.ru_stime) + SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            print(json.dumps(_result(graphs[str(at)], feeds[str(at)], options)), file=lines, flush=True)


def _result(data: bytes, feeds: dict[str, Any], options: Any) -> list[Any]:
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        if any(output.type == "tensor(bfloat16)" for output in session.get_outputs()):  # NumPy has no such type
            return ["refused"]
        found = session.run(None, feeds)
    except Exception as error:  # it raises kinds of its own
        if not type(error).__module__.startswith("onnxruntime"):
            return ["failed", repr(error)[:200]]
        return ["refused"]
    total = hashlib.sha256()
    for array in found:
        whole = np.where(np.isnan(array), np.array(np.nan, array.dtype), array) if array.dtype.kind == "f" else array
        total.update(whole.tobytes())
    return ["ran", total.hexdigest()]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _run(*sys.argv[2:])
    else:
        main()
